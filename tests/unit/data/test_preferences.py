"""Preferences to pairs of token rows."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils import chat_template_utils

from rlite.assembly.quickstart.run import CHATML, byte_tokenizer
from rlite.data.packs import sequence_lengths
from rlite.data.sft import labelled_rows, preference_rows
from rlite.errors import DataError
from rlite.runtime.parallel.microbatch_plan import plan_microbatches

TOKENIZER = byte_tokenizer()
CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}]
PAIR = {"chosen": "yes", "rejected": "nope"}


@pytest.mark.parametrize("prompt", [{"prompt": "p: "}, {"messages": CHAT}], ids=["raw", "messages"])
def test_the_sides_of_a_pair_share_their_prompt_and_only_answers_are_learnt(prompt: dict[str, Any]) -> None:
    pairs = preference_rows([{**prompt, **PAIR}, {**prompt, "chosen": "b", "rejected": "c"}], TOKENIZER, 128)
    batch = pairs.batch([1, 0])
    assert batch["pair_ids"].tolist() == [1, 1, 0, 0]
    assert batch["is_chosen"].tolist() == [True, False, True, False]
    learnt = [TOKENIZER.decode(row["input_ids"][row["loss_mask"]]) for row in batch]
    assert learnt == ["b<|im_end|>", "c<|im_end|>", "yes<|im_end|>", "nope<|im_end|>"]
    assert all(row["loss_mask"][row["attention_mask"].sum() - 1] for row in batch)  # a row ends with its answer
    starts = batch["loss_mask"].int().argmax(-1).tolist()
    assert len(set(starts)) == 1
    prompts = {TOKENIZER.decode(row["input_ids"][: starts[0]]) for row in batch}
    expected = prompt.get("prompt") or TOKENIZER.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert prompts == {expected}


def test_a_plan_keeps_pairs_together() -> None:
    rows = [{"prompt": "p" * n, **PAIR} for n in range(1, 20)]
    batch = preference_rows(rows, TOKENIZER, 64).batch(range(19))
    plan = plan_microbatches(sequence_lengths(batch), 2, 64, batch["pair_ids"].tolist())
    for microbatch in (pack for share in plan for pack in share):
        assert microbatch[1::2] == [row + 1 for row in microbatch[::2]]
        assert all(row % 2 == 0 for row in microbatch[::2])


def test_pairs_without_anything_to_compare_are_dropped_and_counted() -> None:
    rows = [
        {"prompt": "p", **PAIR},
        {"prompt": "p" * 8, **PAIR},  # nothing of the answers is left
        {"prompt": "p" * 5, "chosen": "abcd", "rejected": "abce"},  # the difference is cut off
        {"prompt": "p", "chosen": "abcdefgh", "rejected": "b"},
    ]
    pairs = preference_rows(rows, TOKENIZER, 8)
    assert pairs.source.tolist() == [0, 3]
    assert pairs.tally.num_truncated == 1
    assert pairs.tally.dropped == {
        "nothing to learn within max_length=8": 1,
        "chosen equals rejected within max_length=8": 1,
    }


def test_margins_go_with_their_pairs() -> None:
    rows = [{"prompt": "p" * n, **PAIR, "margin": n / 2} for n in (1, 99, 2)]
    assert preference_rows(rows, TOKENIZER, 16).batch([0, 1])["margin"].tolist() == [0.5, 0.5, 1.0, 1.0]
    with pytest.raises(DataError, match="row index 1: no 'margin'"):
        preference_rows([rows[0], {"prompt": "p", **PAIR}], TOKENIZER, 16)
    with pytest.raises(DataError, match="row index 1: 'margin' is nan; expected a finite number"):
        preference_rows([rows[0], {**rows[0], "margin": float("nan")}], TOKENIZER, 16)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "row index 0: no 'rejected'"),
        ({"prompt": "a", "chosen": ["b"], "rejected": "c"}, "row index 0: 'chosen' is a list; expected a text"),
        ({"messages": CHAT, "chosen": 4, "rejected": "c"}, "row index 0: 'chosen' is int 4; expected a text or a list"),
        ({"messages": CHAT, "chosen": ["b"], "rejected": "c"}, r"row index 0, chosen\[0\]: expected {'role'"),
        ({"messages": CHAT[:2], **PAIR}, "row index 0: 'messages' ends with the assistant"),
    ],
)
def test_a_row_of_another_form_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"data.path=x.json, {message}"):
        preference_rows([row], TOKENIZER, 64, "data.path=x.json")


CALLING = CHATML.replace(
    "{{ message['content'] }}",
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message['content'] or '' }}"
    "{% for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}",
)
CALL = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"city": "Zürich"}'}}],
}
CALLED = '<call>{"name": "f", "arguments": {"city": "Zürich"}}</call><|im_end|>'
RESULT = {"role": "tool", "content": "4"}
SAYING = {"role": "assistant", "content": "four"}
ALIASES = pytest.mark.skipif(
    not hasattr(chat_template_utils, "_alias_reasoning_fields"),
    reason="older transformers show a template thoughts under their own key alone; the row is refused",
)


@pytest.mark.parametrize(
    ("answer", "learnt", "unlearnt"),
    [
        ([CALL], CALLED, ""),
        ([{**CALL, "content": None}], CALLED, ""),
        ([{**CALL, "content": "let me"}], f"let me{CALLED}", ""),
        ([{**CALL, "reasoning_content": "hm"}], f"<think>hm</think>{CALLED}", ""),
        pytest.param([{**SAYING, "thinking": "hm"}], "<think>hm</think>four<|im_end|>", "", marks=ALIASES),
        ([{"role": "assistant", "content": [{"type": "text", "text": "four"}]}], "four<|im_end|>", ""),
        ([CALL, RESULT, SAYING], f"{CALLED}four<|im_end|>", "tool\n4"),
    ],
)
def test_an_answer_is_learnt_with_its_calls_and_thoughts(
    answer: list[dict[str, Any]], learnt: str, unlearnt: str
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CALLING
    row = {"messages": CHAT, "chosen": answer, "rejected": "no"}
    batch = preference_rows([row], tokenizer, 512).batch([0])
    first, second = (tokenizer.decode(side["input_ids"][side["loss_mask"]]) for side in batch)
    assert (first, second) == (learnt, "no<|im_end|>")
    assert unlearnt in tokenizer.decode(batch["input_ids"][0])
    assert batch["loss_mask"][0][batch["attention_mask"][0].sum() - 1]
    labelled = labelled_rows([{"messages": CHAT, "completion": answer, "label": True}], tokenizer, 512).batch([0])
    assert tokenizer.decode(labelled["input_ids"][labelled["loss_mask"]]) == learnt
