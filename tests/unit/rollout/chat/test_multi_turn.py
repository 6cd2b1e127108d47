from __future__ import annotations

import asyncio
from itertools import chain
from typing import Any

import pytest

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.data.packs import first_rows
from rlite.errors import ConfigError, DataError
from rlite.rollout import (
    GenerationHyperparameters,
    LLMRequest,
    MultiTurnWorkflow,
    RewardFunction,
    RewardRaised,
    ScriptedEngine,
)
from rlite.rollout.joined import pad_trajectories

TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_token_id
ITEM = {"messages": [{"role": "user", "content": "2+2?"}], "answer": "4"}
DROPS_THOUGHTS = (  # as Qwen3's: earlier answers without their thoughts
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content.split('</think>')[-1] if message.role == 'assistant' else message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


HALF = ids("é")[0]


def is_right(completions: str, answer: str, **_: Any) -> float:
    return 1.0 if completions.split("</think>")[-1] == answer else 0.25


def run(answers: Any, item: dict[str, Any] | None = None, reward_fn: Any = is_right, **options: Any) -> Any:
    reward = RewardFunction(reward_fn, in_process=True)
    gconfig = GenerationHyperparameters(max_new_tokens=options.pop("max_new_tokens", 32))
    workflow = MultiTurnWorkflow(reward, gconfig, options.pop("tokenizer", TOKENIZER), **options)
    return asyncio.run(workflow.arun_episode(ScriptedEngine(answers), dict(item or ITEM)))


def test_a_wrong_answer_is_told_so_and_goes_on_from_its_own_tokens() -> None:
    # half a character is no UTF-8: tokenised again, its text would be other tokens; the second turn has no end token
    answers = [[*ids("5"), HALF, END], ids("6"), [*ids("4"), END]]
    requests: list[LLMRequest] = []

    def answer(request: LLMRequest) -> list[int]:
        requests.append(request)
        return answers[len(requests) - 1]

    row = run(answer, feedback="No.", turn_discount=0.5, max_new_tokens=32)
    prompt = TOKENIZER.apply_chat_template(ITEM["messages"], add_generation_prompt=True, return_dict=False)
    turn = ids("\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n")
    parts = [prompt, answers[0], turn, answers[1], [END, *turn], answers[2]]
    assert row["input_ids"].tolist() == [[*chain(*parts)]]
    assert row["loss_mask"].int().tolist() == [[i % 2 for i, part in enumerate(parts) for _ in part]]
    made = row["loss_mask"]
    assert (row["logprobs"][made] == -1.0).all()
    assert (row["logprobs"][~made] == 0.0).all()
    assert (row["versions"][made] == 0).all()
    assert (row["versions"][~made] == -1).all()
    assert [request.input_ids for request in requests] == [prompt, [*chain(*parts[:3])], [*chain(*parts[:5])]]
    assert len({request.rid for request in requests}) == 1
    assert (row["rewards"].item(), row["scores"].item(), row["num_turns"].item()) == (0.25, 1.0, 3)
    assert "token_rewards" not in row, "the discount is in the reward alone"


def test_the_tokens_that_an_episode_begins_with_are_known_before() -> None:
    workflow = MultiTurnWorkflow(is_right, GenerationHyperparameters(), TOKENIZER)
    row = run([ids("4")])
    assert workflow.opening(ITEM) == row["input_ids"][~row["loss_mask"]].tolist()


def test_the_first_right_answer_is_worth_its_whole_reward() -> None:
    row = run([ids("4")], turn_discount=0.5)
    assert (row["rewards"].item(), row["num_turns"].item()) == (1.0, 1)


def test_the_last_attempt_counts_and_partial_credit_is_not_solved() -> None:
    row = run([ids("5")], turn_discount=0.5, max_turns=2)
    assert (row["rewards"].item(), row["scores"].item(), row["num_turns"].item()) == (0.125, 0.25, 2)
    assert run([ids("5")], solved=0.2)["num_turns"].item() == 1


def test_feedback_may_be_made_of_the_item_the_answer_and_its_reward() -> None:
    def feedback(item: Any, answer: str, reward: float) -> str:
        return f"{item['answer']}!={answer} ({reward})"

    row = run([ids("5"), ids("4")], feedback=feedback)
    assert "4!=5 (0.25)" in TOKENIZER.decode(row["input_ids"][0])
    with pytest.raises(ConfigError, match="feedback returned None; expected a text"):
        run([ids("5")], feedback=lambda *_: None)


def test_after_a_raw_prompt_feedback_is_raw_text() -> None:
    item = {"prompt": "2+2=", "answer": "4"}
    row = run([ids("5"), [*ids("4"), END]], item, feedback="\nno:")
    assert row["input_ids"].tolist() == [[*ids("2+2=5\nno:4"), END]]


def test_a_template_that_drops_thoughts_begins_another_sequence_of_the_same_trajectory() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = DROPS_THOUGHTS
    answers = [[*ids("hm</think>5"), END], [*ids("4"), END]]
    kept = run(answers, tokenizer=tokenizer, feedback="No.")
    assert kept["input_ids"].shape[0] == 1
    assert "hm</think>5<|im_end|>\n<|im_start|>user\nNo." in tokenizer.decode(kept["input_ids"][0])
    rows = run(answers, tokenizer=tokenizer, feedback="No.", history="template", turn_discount=0.5)
    real = rows["attention_mask"]
    texts = [tokenizer.decode(row[mask]) for row, mask in zip(rows["input_ids"], real, strict=True)]
    assert texts[0].endswith("hm</think>5<|im_end|>")
    assert "hm" not in texts[1]
    assert texts[1].endswith("5<|im_end|>\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n4<|im_end|>")
    assert rows["loss_mask"].sum(1).tolist() == [len(answers[0]), len(answers[1])], "each answer is trained on once"
    assert rows["rewards"].tolist() == [0.5, 0.5]
    assert rows["sequence_index"].tolist() == [0, 1]
    assert first_rows(pad_trajectories([rows, rows], [0, 0])).tolist() == [0, 2]
    # an answer that the template says as it was is gone on from
    assert run([[*ids("5"), END], ids("4")], tokenizer=tokenizer, history="template")["input_ids"].shape[0] == 1


def test_an_episode_without_room_for_a_retry_ends_with_its_last_answer() -> None:
    row = run([ids("5" * 8)], max_length=40, max_turns=9)
    assert row["truncated"].tolist() == [True]
    assert row["loss_mask"][0, -1]
    assert row["num_turns"].item() == 1
    with pytest.raises(DataError, match="no room for an answer in 8"):
        run([ids("5")], max_length=8)


def test_a_template_that_cannot_say_the_feedback_is_named() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content if loop.first }}{% endfor %}"
    with pytest.raises(ConfigError, match="renders an answer 0 times if there follow: user"):
        run([ids("5")], tokenizer=tokenizer)
    tokenizer.chat_template = "{% if messages|length > 1 %}{{ raise_exception('one only') }}{% endif %}x"
    with pytest.raises(ConfigError, match="refuses a conversation of the roles user, assistant, user: one only"):
        run([ids("5")], tokenizer=tokenizer)


def test_a_verifier_that_raises_is_a_reason_and_options_are_checked() -> None:
    with pytest.raises(RewardRaised, match="division by zero"):
        run([ids("5")], reward_fn=lambda **_: 1 / 0)
    for options, message in (
        ({"turn_discount": 1.5}, "turn_discount=1.5"),
        ({"max_turns": 0}, "max_turns=0"),
        ({"history": "all"}, "history='all': expected one of tokens, template"),
    ):
        with pytest.raises(ConfigError, match=message):
            run([ids("5")], **options)
