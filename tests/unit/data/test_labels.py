"""Labelled answers to token rows, and the prompts with answers to other prompts."""

from __future__ import annotations

from typing import Any

import pytest

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.data.sft import labelled_rows, mismatched
from rlite.errors import DataError

TOKENIZER = byte_tokenizer()
CHAT = [{"role": "user", "content": "q"}]


def texts(batch: Any) -> list[tuple[str, str]]:
    """The prompt and the answer of each row."""
    decode, found = TOKENIZER.decode, []
    for row in batch:
        ids, learnt = row["input_ids"], row["loss_mask"]
        found.append((decode(ids[row["attention_mask"] & ~learnt]), decode(ids[learnt])))
    return found


@pytest.mark.parametrize("prompt", [{"prompt": "p: "}, {"messages": CHAT}], ids=["raw", "messages"])
def test_an_answer_is_learnt_with_its_end_and_has_its_label(prompt: dict[str, Any]) -> None:
    rows = [{**prompt, "completion": "yes", "label": True}, {**prompt, "completion": "n", "label": False}]
    batch = labelled_rows(rows, TOKENIZER, 64).batch([1, 0])
    assert batch["is_desirable"].tolist() == [False, True]
    expected = prompt.get("prompt") or TOKENIZER.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert texts(batch) == [(expected, "n<|im_end|>"), (expected, "yes<|im_end|>")]


def batch_of(*pairs: tuple[str, str], max_length: int = 64) -> Any:
    rows = [{"prompt": prompt, "completion": answer, "label": True} for prompt, answer in pairs]
    return labelled_rows(rows, TOKENIZER, max_length).batch(range(len(pairs)))


def test_each_prompt_gets_the_answer_of_the_next_row() -> None:
    found = mismatched(batch_of(("a", "1"), ("bb", "2222"), ("c", "33")), 64)
    assert texts(found) == [("a", "2222<|im_end|>"), ("bb", "33<|im_end|>"), ("c", "1<|im_end|>")]


def test_no_prompt_gets_an_answer_of_its_own() -> None:
    found = mismatched(batch_of(("a", "1"), ("a", "2"), ("b", "3"), ("b", "4"), ("c", "5")), 64)
    assert [(prompt, answer[0]) for prompt, answer in texts(found)] == [
        *(("a", "3"), ("a", "4"), ("b", "5"), ("b", "1"), ("c", "2")),
    ]


def test_rows_without_an_answer_to_another_prompt_are_left_out() -> None:
    found = mismatched(batch_of(("a", "1"), ("a", "2"), ("b", "3")), 64)
    assert [(prompt, answer[0]) for prompt, answer in texts(found)] == [("a", "3"), ("b", "2")]
    assert mismatched(batch_of(("a", "1"), ("a", "2")), 64) is None
    assert mismatched(batch_of(("a", "1")), 64) is None


def test_a_row_that_becomes_too_long_is_cut() -> None:
    found = mismatched(batch_of(("a" * 6, "1"), ("b", "2" * 6)), 8)
    assert texts(found) == [("a" * 6, "22"), ("b", "1<|im_end|>")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "completion": "b"}, "row index 0: no 'label'"),
        ({"prompt": "a", "completion": "b", "label": 1}, "row index 0: 'label' is int 1; expected true or false"),
        ({"prompt": "a", "completion": True, "label": True}, "row index 0: 'completion' is bool True; expected a text"),
        (
            {"messages": [*CHAT, {"role": "assistant", "content": "a"}], "completion": "b", "label": True},
            "row index 0: 'messages' ends with the assistant; .* completion is the answer",
        ),
    ],
)
def test_a_row_of_another_form_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"data.path=x.json, {message}"):
        labelled_rows([row], TOKENIZER, 64, "data.path=x.json")


def test_results_of_tools_in_an_answer_stay_unlearnt_beside_another_prompt() -> None:
    said = [{"role": "assistant", "content": text} for text in ("call", "done")]
    rows = [
        {"messages": CHAT, "completion": [said[0], {"role": "tool", "content": "4"}, said[1]], "label": True},
        {"messages": [{"role": "user", "content": "r"}], "completion": "no", "label": False},
    ]
    found = mismatched(labelled_rows(rows, TOKENIZER, 256).batch([0, 1]), 256)
    assert found is not None
    learnt = [TOKENIZER.decode(row["input_ids"][row["loss_mask"]]) for row in found]
    assert learnt == ["no<|im_end|>", "call<|im_end|>done<|im_end|>"]
    assert "tool\n4" in TOKENIZER.decode(found["input_ids"][1])
