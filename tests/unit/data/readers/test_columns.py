"""Rows of other formats become rows of rlite's form, or an error that names row and column."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pandas
import pytest
from datasets import Dataset, Features, Json, List, Value
from hypothesis import given
from hypothesis import strategies as st

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.data.readers.columns import normalise
from rlite.data.readers.formats import FORMATS, RowKind
from rlite.data.readers.tables import without_nulls
from rlite.data.rows import check_prompts, read_source, streamed_source
from rlite.data.sft import preference_rows, sft_rows
from rlite.data.source import Source
from rlite.errors import ConfigError, DataError

TOKENIZER = byte_tokenizer()
USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
OTHER = {"role": "assistant", "content": "b"}
SYSTEM = {"role": "system", "content": "s"}
HUMAN, GPT = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}
CALL = {"from": "function_call", "value": '{"name": "add", "arguments": {"x": 1}}'}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}],
}
RESULT = {"from": "observation", "value": "2"}


def one(kind: RowKind, row: dict[str, Any], **options: Any) -> dict[str, Any]:
    return normalise([row], kind, Source("x", **options))[0][0]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [USER, ANSWER], "source": "web"}, {"messages": [USER, ANSWER]}),
        ({"messages": [HUMAN, GPT], "text": "t"}, {"messages": [USER, ANSWER]}),
        ({"conversations": [HUMAN, GPT]}, {"messages": [USER, ANSWER]}),
        ({"conversations": [USER, ANSWER]}, {"messages": [USER, ANSWER]}),
        ({"conversations": [{"from": "system", "value": "s"}, HUMAN, GPT]}, {"messages": [SYSTEM, USER, ANSWER]}),
        ({"conversations": [HUMAN, GPT], "system": "s"}, {"messages": [SYSTEM, USER, ANSWER]}),
        ({"conversations": [HUMAN, GPT], "system": "", "tools": ""}, {"messages": [USER, ANSWER]}),
        (
            {"conversations": [HUMAN, CALL, RESULT, GPT], "tools": '[{"name": "add"}]'},
            {"messages": [USER, CALLED, {"role": "tool", "content": "2"}, ANSWER], "tools": [{"name": "add"}]},
        ),
        ({"prompt": "q", "response": "a"}, {"prompt": "q", "response": "a"}),
        ({"prompt": "q", "completion": "a"}, {"prompt": "q", "response": "a"}),
        ({"prompt": [USER], "completion": [ANSWER]}, {"messages": [USER], "completion": [ANSWER]}),
        ({"prompt": [USER], "completion": "a"}, {"messages": [USER], "completion": [ANSWER]}),
        ({"prompt": "q", "completion": [ANSWER]}, {"messages": [USER], "completion": [ANSWER]}),
        ({"prompt": [USER], "response": "a"}, {"messages": [USER], "completion": [ANSWER]}),
        ({"instruction": "q", "output": "a", "text": "both"}, {"messages": [USER, ANSWER]}),
        (
            {"instruction": "q", "input": "x", "output": "a", "system": "s", "history": [["q", "a"]]},
            {"messages": [SYSTEM, USER, ANSWER, {"role": "user", "content": "q\nx"}, ANSWER]},
        ),
        ({"text": "once"}, {"text": "once"}),
    ],
)
def test_demonstrations_are_recognised(row: dict[str, Any], expected: dict[str, Any]) -> None:
    made = one("demonstrations", row)
    assert made == expected
    if "tools" not in row:
        assert sft_rows([made], TOKENIZER, 512).tally.num_kept == 1


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER], "chosen": "a", "rejected": "b"},
        {"messages": [USER], "chosen": [ANSWER], "rejected": OTHER},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]},
        {"prompt": [USER], "chosen": "a", "rejected": "b"},
        {"prompt": "q", "chosen": [ANSWER], "rejected": [OTHER]},
        {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
        {"prompt": "q", "chosen": [USER, ANSWER], "rejected": [USER, OTHER], "messages": [USER, ANSWER]},
        {"prompt": [USER], "chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
        {"chosen": [HUMAN, GPT], "rejected": [HUMAN, {"from": "gpt", "value": "b"}]},
        {"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "b"}},
        {"instruction": "q", "chosen": "a", "rejected": "b"},
    ],
)
def test_preferences_are_recognised(row: dict[str, Any]) -> None:
    made = one("preferences", {**row, "margin": 1.5, "score_chosen": 9.0})
    assert made == {"messages": [USER], "chosen": "a", "rejected": "b", "margin": 1.5}
    assert preference_rows([made], TOKENIZER, 512).tally.num_kept == 1


def test_an_implicit_prompt_is_all_that_both_conversations_begin_with() -> None:
    shared = [SYSTEM, USER, ANSWER, USER]
    made = one("preferences", {"chosen": [*shared, ANSWER], "rejected": [*shared, OTHER]})
    assert made == {"messages": shared, "chosen": "a", "rejected": "b"}
    same = one("preferences", {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]})
    assert same == {"messages": [USER], "chosen": "a", "rejected": "a"}  # dropped and counted with the tokens


CALLED_TWICE = [CALLED, {"role": "tool", "content": "2"}, ANSWER]
THOUGHTFUL = [{**ANSWER, "reasoning_content": "hm", "own": 1}]


@pytest.mark.parametrize("answer", [[CALLED], CALLED_TWICE, THOUGHTFUL], ids=["call", "call and result", "thought"])
@pytest.mark.parametrize("form", ["implicit", "messages", "prompt", "text"])
def test_answers_of_pairs_keep_all_of_their_messages(answer: list[dict[str, Any]], form: str) -> None:
    rows: dict[str, dict[str, Any]] = {
        "implicit": {"chosen": [USER, *answer], "rejected": [USER, OTHER]},
        "messages": {"messages": [USER], "chosen": answer, "rejected": OTHER},
        "prompt": {"prompt": [USER], "chosen": answer, "rejected": "b"},
        "text": {"prompt": "q", "chosen": answer, "rejected": [OTHER]},
    }
    made = one("preferences", {**rows[form], "tools": [{"name": "add"}]})
    assert made == {"messages": [USER], "chosen": answer, "rejected": "b", "tools": [{"name": "add"}]}
    if form in ("messages", "prompt"):
        prompt = {key: value for key, value in rows[form].items() if key in ("messages", "prompt")}
        labelled = one("unpaired", {**prompt, "completion": answer, "label": True})
        assert labelled == {"messages": [USER], "completion": answer, "label": True}


def test_a_call_in_sharegpts_words_begins_an_answer_and_no_conversation() -> None:
    made = one("preferences", {"prompt": [HUMAN], "chosen": [CALL], "rejected": [GPT]})
    assert made == {"messages": [USER], "chosen": [CALLED], "rejected": "a"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "q", "completion": "a", "label": False}, {"prompt": "q", "completion": "a", "label": False}),
        (
            {"messages": [HUMAN], "completion": [GPT], "label": True, "score": 9.0},
            {"messages": [USER], "completion": "a", "label": True},
        ),
        (
            {"prompt": [USER], "completion": [ANSWER], "label": True},
            {"messages": [USER], "completion": "a", "label": True},
        ),
        (
            {"prompt": [USER], "completion": "a", "label": True},
            {"messages": [USER], "completion": "a", "label": True},
        ),
    ],
)
def test_labelled_completions_are_recognised(row: dict[str, Any], expected: dict[str, Any]) -> None:
    assert one("unpaired", row) == expected


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [USER], "answer": 4}, {"messages": [USER], "answer": 4}),
        ({"prompt": [USER], "answer": 4}, {"prompt": [USER], "answer": 4}),
        ({"prompt": "q", "answer": 4}, {"prompt": "q", "answer": 4}),
        ({"input_ids": [1]}, {"input_ids": [1]}),
        ({"conversations": [HUMAN], "answer": 4}, {"messages": [USER], "answer": 4}),
        ({"instruction": "q", "output": "a"}, {"messages": [USER], "instruction": "q", "output": "a"}),
    ],
)
def test_prompts_are_recognised_and_keep_their_columns_for_rewards(
    row: dict[str, Any], expected: dict[str, Any]
) -> None:
    made = one("prompts", row)
    assert made == expected
    check_prompts([made], "x")


def test_rows_without_a_prompt_are_left_to_environments() -> None:
    assert normalise([{"seed": 1}], "prompts", Source("x")) == ([{"seed": 1}], "rows without a prompt")


def test_a_completion_alone_is_learnt_and_a_text_as_a_whole() -> None:
    row = one("demonstrations", {"prompt": [USER, ANSWER, USER], "completion": [OTHER]})
    batch = sft_rows([row], TOKENIZER, 512).batch([0])
    assert TOKENIZER.decode(batch["input_ids"][batch["loss_mask"]]) == "b<|im_end|>"
    whole = sft_rows([{"text": "once upon"}], TOKENIZER, 512).batch([0])
    assert TOKENIZER.decode(whole["input_ids"][0]) == "once upon<|im_end|>"
    assert whole["loss_mask"].tolist() == [[False] + [True] * 9]  # nothing predicts the first token


# -- columns -----------------------------------------------------------------------------------------------------------


def test_columns_are_renamed_and_hidden() -> None:
    row = {"question": "q", "solution": "a", "prompt": [USER], "id": 7}
    columns = {"prompt": "question", "response": "solution"}
    assert one("demonstrations", row, columns=columns) == {"prompt": "q", "response": "a"}
    swapped = one(
        "demonstrations", {"prompt": "a", "response": "q"}, columns={"prompt": "response", "response": "prompt"}
    )
    assert swapped == {"prompt": "q", "response": "a"}
    both = {"messages": [USER], "prompt": "q", "answer": 4}
    assert one("prompts", both, columns={"messages": None, "target": "answer"}) == {"prompt": "q", "target": 4}


@pytest.mark.parametrize(
    ("kind", "columns", "message"),
    [
        (
            "demonstrations",
            {"respons": "b"},
            r"data\.columns\.respons: no such column is read; did you mean 'response'",
        ),
        (
            "demonstrations",
            {"response": "anwser"},
            r"columns\.response=anwser: data\.path=x has no such column; did you mean 'answer'",
        ),
        ("prompts", {"target": "anwser"}, r"columns\.target=anwser: .*did you mean 'answer'"),
    ],
)
def test_an_unknown_column_names_the_nearest(kind: RowKind, columns: dict[str, str | None], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        one(kind, {"prompt": "q", "answer": "a", "b": "c"}, columns=columns)


def test_a_first_row_of_no_known_format_names_the_option_for_its_columns() -> None:
    with pytest.raises(DataError) as error:
        one("demonstrations", {"promt": "q", "answer": "a"})
    told = str(error.value)
    assert told.startswith(
        "data.path=x, row index 0: no 'prompt' and no 'response'; the row has promt, answer. Expected"
    )
    assert told.endswith("data.columns.prompt=promt")
    assert "prompt, response; prompt, completion; instruction, output; text" in told
    with pytest.raises(
        DataError, match=r"no 'messages'; the row has chosen, rejected\. .*: data\.columns\.NAME=COLUMN"
    ):
        one("preferences", {"chosen": "q a", "rejected": "q b"})


# -- disagreement ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "q", "text": "a"},
            "row index 2: is plain texts with prompt, text; row index 0 is raw prompts and resp",
        ),
        (
            {"prompt": "q"},
            "row index 2: no 'response'; the row has prompt; row index 0 is raw prompts and responses with",
        ),
        ({"prompt": [USER], "response": "a"}, "row index 2: is chat prompts and responses with"),
        ({"prompt": "q", "response": "a", "messages": [USER]}, "row index 2: is conversations with"),
        ({}, "row index 2: no 'prompt' and no 'response'; the row has no columns"),
    ],
)
def test_rows_that_disagree_are_named_with_their_columns(row: dict[str, Any], message: str) -> None:
    good = {"prompt": "q", "response": "a", "extra": 1}
    with pytest.raises(DataError, match=f"data.path=x, {message}"):
        normalise([good, good, row], "demonstrations", Source("x"))


# -- the system prompt -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("demonstrations", {"conversations": [HUMAN, GPT]}),
        ("demonstrations", {"prompt": [USER], "completion": [ANSWER]}),
        ("preferences", {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]}),
        ("unpaired", {"prompt": [USER], "completion": "a", "label": True}),
        ("prompts", {"prompt": [USER]}),
        ("prompts", {"messages": [USER]}),
    ],
)
def test_the_system_prompt_begins_conversations_that_have_none(kind: RowKind, row: dict[str, Any]) -> None:
    made = one(kind, row, system_prompt="s")
    assert (made.get("messages") or made["prompt"])[:2] == [SYSTEM, USER]


def test_a_conversation_keeps_its_own_system_message_and_raw_rows_take_none() -> None:
    for role in ("system", "developer"):
        own = {"role": role, "content": "own"}
        assert one("prompts", {"messages": [own, USER]}, system_prompt="s")["messages"] == [own, USER]
    with pytest.raises(ConfigError, match=r"system_prompt begins conversations, and .* holds raw prompts"):
        one("prompts", {"prompt": "q"}, system_prompt="s")


# -- hostile rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        ("demonstrations", {"conversations": "hi"}, "'conversations' is str; expected a list"),
        ("demonstrations", {"conversations": []}, "'conversations' is an empty list"),
        (
            "demonstrations",
            {"conversations": [{"from": "hooman", "value": "q"}]},
            r"conversations\[0\]: 'from' is 'hooman'; did you mean 'human'",
        ),
        ("demonstrations", {"conversations": [{"from": ["human"], "value": "q"}]}, r"'from' is \['human'\]"),
        ("demonstrations", {"conversations": [{"from": "human", "value": 4}]}, r"conversations\[0\]: 'value' is 4"),
        (
            "demonstrations",
            {"conversations": [HUMAN, {"from": "function_call", "value": "{"}]},
            r"\[1\]: 'value': not valid JSON",
        ),
        (
            "demonstrations",
            {"conversations": [HUMAN, {"from": "function_call", "value": "[4]"}]},
            r"\[1\]: 'value' is '.4.'; expected calls",
        ),
        ("demonstrations", {"conversations": [HUMAN, GPT], "tools": "{"}, "'tools': not valid JSON"),
        ("demonstrations", {"conversations": [HUMAN, GPT], "tools": {"a": 1}}, "'tools' is dict; expected a list"),
        ("demonstrations", {"conversations": [HUMAN, GPT], "system": 4}, "'system' is int 4"),
        ("demonstrations", {"prompt": "q", "response": 4}, "'response' is int 4; expected a text"),
        ("demonstrations", {"prompt": "q", "completion": [USER]}, "'completion' has no turn of the assistant"),
        ("demonstrations", {"prompt": {"a": 1}, "completion": "a"}, "'prompt' is dict; expected a list"),
        ("demonstrations", {"instruction": 4, "output": "a"}, "'instruction' is int 4"),
        ("demonstrations", {"instruction": "q", "output": ["a"]}, "'output' is a list"),
        ("demonstrations", {"instruction": "q", "input": 4, "output": "a"}, "'input' is int"),
        ("demonstrations", {"instruction": "q", "output": "a", "history": [["q"]]}, r"history\[0\] is \['q'\]"),
        ("demonstrations", {"text": ["a"]}, "'text' is a list; expected a text"),
        ("demonstrations", {"text": "a\ud83d"}, "'text' holds a lone surrogate"),
        (
            "preferences",
            {"chosen": [USER, ANSWER], "rejected": [SYSTEM, USER, ANSWER]},
            "begin with different messages",
        ),
        (
            "preferences",
            {"chosen": [USER, ANSWER], "rejected": [USER, OTHER, USER, ANSWER]},
            "from message 1 of both on: 'rejected' has messages of the roles assistant, user, assistant",
        ),
        (
            "preferences",
            {"chosen": [USER, ANSWER, USER], "rejected": [USER, OTHER, USER]},
            "'chosen' has messages of the roles assistant, user",
        ),
        ("preferences", {"chosen": [USER, USER], "rejected": [USER, OTHER]}, "'chosen' has messages of the roles user"),
        (
            "preferences",
            {"prompt": "p", "chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
            "'prompt' is 'p', and 'chosen' and",
        ),
        (
            "preferences",
            {"prompt": "p", "chosen": [ANSWER, USER, OTHER], "rejected": [OTHER]},
            "'chosen' has messages of the roles assistant, user, assistant; expected an answer",
        ),
        ("preferences", {"prompt": "p", "chosen": 4, "rejected": [OTHER]}, "'chosen' is int; expected a list"),
        ("unpaired", {"prompt": "q", "completion": "a", "label": 1}, "'label' is 1; expected true or false"),
        ("unpaired", {"prompt": "q", "completion": 4, "label": True}, "'completion' is int; expected a list"),
        ("prompts", {"messages": "hi"}, "'messages' is str; expected a list"),
    ],
)
def test_a_malformed_row_is_named_with_its_column(kind: RowKind, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"data.path=x, row index 0.*{message}"):
        one(kind, row)


LEAVES: st.SearchStrategy[Any] = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3)
KEYS = st.sampled_from(["role", "content", "from", "value"])
OBJECTS = st.dictionaries(KEYS, LEAVES | st.sampled_from(["user", "gpt"]) | st.lists(LEAVES), max_size=3)
VALUES = LEAVES | st.lists(LEAVES | OBJECTS | st.lists(LEAVES, max_size=2), max_size=3) | OBJECTS


@given(st.sampled_from(sorted(FORMATS)), st.data())
def test_any_row_is_converted_or_refused(kind: RowKind, data: st.DataObject) -> None:
    names = sorted({name for entry in FORMATS[kind] for name in entry.known})
    row = data.draw(st.dictionaries(st.sampled_from(names), VALUES, max_size=5))
    try:
        made, form = normalise([row], kind, Source("x", system_prompt=data.draw(st.none() | st.just("s"))))
    except (DataError, ConfigError):
        return
    assert form
    assert len(made) == 1


def test_a_columnar_file_adds_no_keys_to_conversations(tmp_path: Path) -> None:
    rows = [{"dialog": [{**USER, "name": None}, {**CALLED, "name": "x"}]}, {"dialog": [USER, ANSWER]}]
    pandas.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
    found = read_source(Source(str(tmp_path / "rows.parquet"), columns={"messages": "dialog"}), "demonstrations")
    assert found[1] == {"messages": [USER, ANSWER]}
    assert found.form == "conversations (messages)"


def test_csv_cells_hold_conversations_as_json(tmp_path: Path) -> None:
    pandas.DataFrame([{"conversations": json.dumps([HUMAN, GPT])}]).to_csv(tmp_path / "rows.csv", index=False)
    assert read_source(Source(str(tmp_path / "rows.csv")), "demonstrations")[0] == {"messages": [USER, ANSWER]}


# -- columns that are null, and texts of structured columns ------------------------------------------------------------

MISSING = [None, float("nan")]


@pytest.mark.parametrize("null", MISSING, ids=["null", "nan"])
@pytest.mark.parametrize(
    ("kind", "row", "column"),
    [
        ("demonstrations", {"prompt": "q", "response": "a"}, "prompt"),
        ("demonstrations", {"prompt": "q", "response": "a"}, "response"),
        ("demonstrations", {"messages": [USER, ANSWER]}, "messages"),
        ("demonstrations", {"text": "a"}, "text"),
        ("preferences", {"prompt": "q", "chosen": "a", "rejected": "b"}, "chosen"),
        ("preferences", {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]}, "rejected"),
        ("unpaired", {"prompt": "q", "completion": "a", "label": True}, "prompt"),
        ("unpaired", {"messages": [USER], "completion": "a", "label": True}, "label"),
        ("prompts", {"prompt": "q", "answer": "4"}, "prompt"),
        ("prompts", {"messages": [USER]}, "messages"),
    ],
)
def test_a_null_is_called_a_null_in_the_first_row_and_in_others(
    kind: RowKind, row: dict[str, Any], column: str, null: Any
) -> None:
    told = rf"^data\.path=x, row index {{}}: '{column}' is null; drop the row, or fill the column"
    for rows in ([{**row, column: null}, row], [row, row, {**row, column: null}]):
        number = 0 if len(rows) == 2 else 2
        with pytest.raises(DataError, match=told.format(number)) as error:
            check_prompts(normalise(rows, kind, Source("x"))[0], "data.path=x")
        assert "columns." not in str(error.value)


@pytest.mark.parametrize("null", MISSING, ids=["null", "nan"])
def test_optional_columns_may_be_null(null: Any) -> None:
    row = {"instruction": "q", "output": "a", "input": null, "system": null, "history": null}
    assert one("demonstrations", row) == {"messages": [USER, ANSWER]}
    assert one("demonstrations", {"messages": [USER, ANSWER], "tools": null}) == {"messages": [USER, ANSWER]}


def test_messages_and_their_calls_may_be_texts_of_json() -> None:
    calls = json.dumps(CALLED["tool_calls"])
    messages = [USER, {**CALLED, "tool_calls": calls}]
    function = {"name": "add", "parameters": {"type": "object"}}
    tool = {"type": "function", "function": function}
    as_texts = [
        [json.dumps(tool)],
        [{**tool, "function": json.dumps(function)}],
        [{**tool, "function": {**function, "parameters": json.dumps(function["parameters"])}}],
        json.dumps([tool]),
    ]
    for form, tools in product((messages, json.dumps(messages)), as_texts):
        made = one("demonstrations", {"messages": form, "tools": tools})
        assert made == {"messages": [USER, CALLED], "tools": [tool]}
    with pytest.raises(DataError, match=r"row index 0, messages\[1\]: 'tool_calls': not valid JSON"):
        one("demonstrations", {"messages": [USER, {**CALLED, "tool_calls": "["}]})


TEXTS: dict[RowKind, list[dict[str, Any]]] = {
    "demonstrations": [
        {"messages": [USER, ANSWER], "tools": [{"name": "add"}]},
        {"conversations": [HUMAN, GPT]},
        {"prompt": [USER], "response": "a"},
        {"prompt": [USER], "completion": [CALLED]},
        {"prompt": "[1, 2] and {3}", "response": '["a"]'},
        {"instruction": "q", "output": "a", "history": [["q", "a"]]},
    ],
    "preferences": [
        {"chosen": [USER, ANSWER], "rejected": [USER, OTHER], "margin": 1.5},
        {"prompt": [USER], "chosen": [CALLED], "rejected": "b"},
        {"prompt": "q", "chosen": ANSWER, "rejected": OTHER},
        {"conversations": [HUMAN], "chosen": GPT, "rejected": "b"},
        {"prompt": "{q}", "chosen": '{"a": 1}', "rejected": "[]"},
        {"prompt": "parse", "chosen": '{"from": "Bern", "to": "Rome"}', "rejected": '[{"role": "king"}]'},
    ],
    "unpaired": [
        {"prompt": [USER], "completion": [ANSWER], "label": True},
        {"prompt": "q", "completion": "[a", "label": False},
    ],
    "prompts": [
        {"prompt": [USER], "reward_model": {"ground_truth": "4"}, "extra_info": {"index": 1}, "answer": "[4]"},
        {"input_ids": [1, 2]},
    ],
}


@pytest.mark.parametrize(("kind", "row"), [(kind, row) for kind, rows in TEXTS.items() for row in rows])
@pytest.mark.parametrize("is_renamed", [False, True], ids=["own names", "renamed"])
def test_a_csv_file_holds_what_json_holds(kind: RowKind, row: dict[str, Any], is_renamed: bool, tmp_path: Path) -> None:
    names = {name: f"{name} of mine" if is_renamed else name for name in row}
    cells = {
        names[name]: value if isinstance(value, (str, bool, float)) else json.dumps(value)
        for name, value in row.items()
    }
    pandas.DataFrame([cells]).to_csv(tmp_path / "rows.csv", index=False)
    columns: dict[str, str | None] = dict(names) if is_renamed else {}
    [found] = read_source(Source(str(tmp_path / "rows.csv"), columns=columns), kind)
    assert found == one(kind, row)


@pytest.mark.parametrize("column", ["prompt", "chosen", "rejected"])
def test_messages_in_pythons_notation_are_refused(column: str, tmp_path: Path) -> None:
    row = {"prompt": "q", "chosen": "a", "rejected": "b", column: [ANSWER]}
    pandas.DataFrame([row]).to_csv(tmp_path / "rows.csv", index=False)
    with pytest.raises(
        DataError, match=f"row index 0: '{column}' holds messages in Python's notation; write them with"
    ):
        read_source(Source(str(tmp_path / "rows.csv")), "preferences")


# -- columns of JSON in columnar files ---------------------------------------------------------------------------------

TYPED = [
    {
        "messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}],
        "tools": [{"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}],
    }
    for name, arguments, properties in (
        ("add", {"x": 1, "y": None}, {"x": {"type": "integer"}}),
        ("say", {"text": "ü"}, {"text": {"type": "string"}}),
    )
]


@pytest.mark.parametrize(
    "features",
    [
        None,
        {"messages": List(Json()), "tools": Json()},
        {"messages": Json(), "tools": List(Json())},
        {
            "messages": List({"role": Value("string"), "content": Value("string"), "tool_calls": List(Json())}),
            "tools": List({"type": Value("string"), "function": Json()}),
        },
    ],
    ids=["found", "list", "whole", "inside"],
)
@pytest.mark.parametrize("kind", ["parquet", "arrow", "saved", "streamed", "program", "jsonl"])
def test_columns_of_json_are_read_as_json(features: Any, kind: str, tmp_path: Path) -> None:
    if features is None:
        table = Dataset.from_list(TYPED, on_mixed_types="use_json")
    else:
        table = Dataset.from_list(TYPED, features=Features(features))
    path = tmp_path / f"rows.{kind}"
    if kind in ("saved", "arrow"):
        table.save_to_disk(path if kind == "saved" else tmp_path / "folder")
    elif kind != "program":
        (table.to_json if kind == "jsonl" else table.to_parquet)(path)
    if kind == "arrow":
        [path] = (tmp_path / "folder").glob("*.arrow")
    if kind == "streamed":
        path = path.rename(tmp_path / "rows.parquet")
        found = streamed_source(Source(str(path)), "demonstrations", 4)
        assert found.stream is not None
        rows = [dict(row) for row in found.stream.read([(0, 0), (0, 1)]).values()]
    else:
        source = Source("-", rows=table) if kind == "program" else Source(str(path))
        rows = [dict(row) for row in read_source(source, "demonstrations")]
    expected = [one("demonstrations", row) for row in TYPED]
    if kind in ("program", "jsonl"):  # these remove the keys that are null, too, or write them as null
        rows, expected = (without_nulls(value) for value in (rows, expected))
    assert rows == expected
