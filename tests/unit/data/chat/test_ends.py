"""Ends of learnt answers: always a token at which the model stops, or a refusal."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from rlite.assembly.quickstart.run import CHATML, byte_tokenizer
from rlite.data.chat.ends import LearntEnds
from rlite.data.sft import labelled_rows, preference_rows, sft_rows
from rlite.data.tokens import TokenRows
from rlite.errors import ConfigError, DataError

MARKS_WITHOUT_END = CHATML.replace(
    "{{ message['content'] }}<|im_end|>",
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}<|im_end|>",
)
BETWEEN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if not loop.last %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_end|>\nassistant: {% endif %}"
)
NEXT_ROLE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}###\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TWO_TOKENS = CHATML.replace("<|im_end|>", "<|im_start|><|im_end|>")
TEMPLATES = {
    "ChatML": CHATML,
    "marks without end": MARKS_WITHOUT_END,
    "between turns": BETWEEN,
    "next role": NEXT_ROLE,
    "two tokens": TWO_TOKENS,
}
ENDS = {"next role": "<|user|>"}


def tokenizer_for(template: str, *added: AddedToken) -> PreTrainedTokenizerFast:
    made = byte_tokenizer()
    roles = [AddedToken(f"<|{role}|>", special=True, normalized=False) for role in ("user", "assistant")]
    made.add_tokens([*roles, *added])
    made.chat_template = template
    return made


def number(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    return tokenizer.convert_tokens_to_ids(token)


def chat(*texts: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


KINDS = ("sft", "preferences", "labelled")


def rows_of(kind: str, tokenizer: PreTrainedTokenizerFast, ends: LearntEnds | None) -> TokenRows:
    """Return a conversation whose last answer is learnt, in one of the forms of rows."""
    messages, options = chat("a", "b", "c"), {"ends": ends}
    if kind == "sft":
        return sft_rows([{"messages": [*messages, *chat("", "good")[1:]]}], tokenizer, 200, **options)
    if kind == "labelled":
        row = {"messages": messages, "completion": "good", "label": True}
        return labelled_rows([row], tokenizer, 200, **options)
    return preference_rows([{"messages": messages, "chosen": "good", "rejected": "bad"}], tokenizer, 200, **options)


def learnt(tokenizer: PreTrainedTokenizerFast, rows: TokenRows, row: int = 0) -> str:
    tokens = slice(rows.starts[row], rows.starts[row + 1])
    return tokenizer.decode(rows.input_ids[tokens][rows.loss_mask[tokens]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("is_known", [False, True], ids=["base model", "instruct model"])
def test_every_learnt_answer_ends_with_a_token_at_which_the_model_stops(
    template: str, kind: str, is_known: bool
) -> None:
    tokenizer, name = tokenizer_for(TEMPLATES[template]), ENDS.get(template, "<|im_end|>")
    end, other = number(tokenizer, name), number(tokenizer, "<|endoftext|>")
    ends = LearntEnds(tokenizer, {other, end} if is_known else {other})
    rows = rows_of(kind, tokenizer, ends)
    for row in range(len(rows.lengths)):
        assert learnt(tokenizer, rows, row).endswith(name)
        last = rows.input_ids[rows.starts[row] : rows.starts[row + 1]][
            rows.loss_mask[rows.starts[row] : rows.starts[row + 1]]
        ][-1]
        assert last == end
    assert ends.new == (set() if is_known else {end})


@pytest.mark.parametrize("choice", ["keep", None])
def test_sft_learns_the_same_text_as_before_if_the_ends_are_kept(choice: Literal["keep"] | None) -> None:
    tokenizer = tokenizer_for(BETWEEN)
    ends = None if choice is None else LearntEnds(tokenizer, {0}, choice)
    assert learnt(tokenizer, rows_of("sft", tokenizer, ends)) == "bgood"
    assert ends is None or not ends.new


def test_inner_turns_learn_the_end_that_stands_between_turns_or_begins_the_next() -> None:
    for template, end in ((BETWEEN, "<|im_end|>"), (NEXT_ROLE, "<|user|>"), (MARKS_WITHOUT_END, "<|im_end|>")):
        tokenizer = tokenizer_for(template)
        ends = LearntEnds(tokenizer, {number(tokenizer, end)})
        assert learnt(tokenizer, rows_of("sft", tokenizer, ends)) == f"b{end}good{end}"
        assert "end of answers" in ends.describe(ends.new)


def test_the_marker_of_any_next_role_ends_a_call() -> None:
    tokenizer = tokenizer_for(NEXT_ROLE, AddedToken("<|tool|>", special=True, normalized=False))
    messages = [*chat("a", "b"), {"role": "tool", "content": "c"}, *chat("", "d")[1:]]
    ends = LearntEnds(tokenizer, {0})
    assert learnt(tokenizer, sft_rows([{"messages": messages}], tokenizer, 99, ends=ends)) == "b<|tool|>d<|user|>"
    assert ends.new == {number(tokenizer, "<|tool|>"), number(tokenizer, "<|user|>")}


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_that_is_no_token_is_refused_unless_the_user_chooses(kind: str) -> None:
    tokenizer = tokenizer_for(PLAIN)
    with pytest.raises(ConfigError, match=r"row index 0: .* ends an answer with '.*###\\n', without one token .*keep"):
        rows_of(kind, tokenizer, LearntEnds(tokenizer, {number(tokenizer, "<|im_end|>")}))
    appending = LearntEnds(tokenizer, {number(tokenizer, "<|im_end|>")}, "append")
    assert learnt(tokenizer, rows_of(kind, tokenizer, appending)).endswith("good###\n<|im_end|>")
    assert appending.describe(appending.new) == {
        "end of answers": f"an end is appended to {1 + (kind == 'preferences')} answer" + "s" * (kind == "preferences")
    }
    assert learnt(tokenizer, rows_of(kind, tokenizer, LearntEnds(tokenizer, {0}, "keep"))).endswith("good###\n")


def test_chatml_markers_that_the_tokenizer_does_not_know_are_refused() -> None:
    tokenizer = tokenizer_for(CHATML.replace("im_end", "turn_end").replace("im_start", "turn_start"))
    with pytest.raises(ConfigError, match="without one token at which the model can stop"):
        rows_of("sft", tokenizer, LearntEnds(tokenizer, {0}))


def test_an_added_token_that_is_not_special_may_be_the_end() -> None:
    tokenizer = tokenizer_for(CHATML.replace("im_end", "turn_end"), AddedToken("<|turn_end|>", special=False))
    ends = LearntEnds(tokenizer, {0})
    rows_of("sft", tokenizer, ends)
    assert ends.new == {number(tokenizer, "<|turn_end|>")}


@pytest.mark.parametrize(
    "row", [{"prompt": "a", "response": "b"}, {"text": "a"}, {"prompt": "a", "chosen": "b", "rejected": "c"}]
)
def test_raw_texts_end_with_the_tokenizers_end(row: dict[str, str]) -> None:
    tokenizer = byte_tokenizer()
    ends = LearntEnds(tokenizer, {number(tokenizer, "<|endoftext|>")})
    make = preference_rows if "chosen" in row else sft_rows
    make([row], tokenizer, 100, ends=ends)
    assert ends.new == {tokenizer.eos_token_id}
    assert "'<|im_end|>' added to the model's end tokens ('<|endoftext|>')" in ends.describe(ends.new)["end of answers"]


def test_history_that_ends_otherwise_than_generated_answers_makes_no_end() -> None:
    template = CHATML.replace("<|im_end|>", "{{ '<|endoftext|>' if loop.last else '<|im_end|>' }}")
    tokenizer = tokenizer_for(template)
    ends = LearntEnds(tokenizer, {number(tokenizer, "<|endoftext|>")})
    assert learnt(tokenizer, rows_of("sft", tokenizer, ends)) == "b<|im_end|>good<|endoftext|>"
    assert not ends.new
    assert ends.describe(ends.new)["rewritten history"].startswith("50% of 2 learnt turns are never generated so")


def test_a_later_row_brings_no_new_end_after_the_model_is_made() -> None:
    tokenizer = tokenizer_for(CHATML)
    ends = LearntEnds(tokenizer, {number(tokenizer, "<|endoftext|>")})
    ends.is_settled = True
    with pytest.raises(DataError, match=r"answers end with '<\|im_end\|>', no end token of the model"):
        rows_of("sft", tokenizer, ends)
