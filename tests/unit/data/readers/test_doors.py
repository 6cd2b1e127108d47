"""Doors for data of any shape: paths in columns, functions of rows, own formats, templates by path."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlite.api import as_rows
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.data.chat.template import ChatTemplate, with_template
from rlite.data.readers import formats
from rlite.data.readers.formats import Format, register_format
from rlite.data.rows import read_source, streamed_source
from rlite.data.source import Source
from rlite.errors import ConfigError, DataError, ImportFailed
from rlite.trainer.options import TableOptions

NESTED = [{"data": {"question": f"q{n}", "turns": [{"text": f"t{n}"}]}, "answer": n} for n in range(3)]


def read(rows: Any, **options: Any) -> Any:
    return list(read_source(Source("memory", rows=rows, **options), "prompts"))


def test_a_column_may_be_a_path_through_objects_and_lists() -> None:
    assert [row["prompt"] for row in read(NESTED, columns={"prompt": "data.question"})] == ["q0", "q1", "q2"]
    assert read(NESTED, columns={"prompt": "data.turns.0.text"})[1]["prompt"] == "t1"
    assert read(NESTED, columns={"prompt": "data.question"})[0]["data"] == NESTED[0]["data"], "others may read it"


def test_a_column_whose_name_holds_a_dot_goes_before_a_path() -> None:
    rows = [{"a.b": "own", "a": {"b": "inner"}}]
    assert read(rows, columns={"prompt": "a.b"})[0]["prompt"] == "own"


@pytest.mark.parametrize("path", ["data.qestion", "data.turns.4.text", "answer.x", "dat"])
def test_a_path_that_leads_nowhere_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="has no such column"):
        read(NESTED, columns={"prompt": path})


def test_a_streamed_table_reads_paths_too(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in NESTED))
    source = Source(str(file), columns={"prompt": "data.question"})
    rows = streamed_source(source, "prompts", 1)
    places = [(0, 0)]
    assert rows.stream is not None
    assert [row["prompt"] for row in rows.stream.read(places).values()] == ["q0"]


def to_row(row: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": row["data"]["question"].upper(), "answer": row["answer"] + 1}


def drops(row: dict[str, Any]) -> Any:
    return None if row["answer"] == 1 else to_row(row)


def raises(row: dict[str, Any]) -> Any:
    raise KeyError("level")


def test_a_function_by_path_makes_the_rows() -> None:
    assert read(NESTED, map=f"{__file__}:to_row")[2] == {"prompt": "Q2", "answer": 3}
    assert "data" in NESTED[2], "the table's own row is unchanged"


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        ("drops", DataError, "row index 1: data.map=.*returned NoneType None; expected"),
        ("raises", DataError, "row index 0: data.map=.*raised KeyError"),
        ("to_rwo", ConfigError, "did you mean 'to_row'"),
    ],
)
def test_a_function_that_cannot_be_used_names_row_and_option(function: str, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        read(NESTED, map=f"{__file__}:{function}")


def test_only_the_users_options_name_code(tmp_path: Path) -> None:
    """A folder with data and a config of its own that names a function runs nothing."""
    (tmp_path / "evil.py").write_text("raise SystemExit('run')")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "map": f"{tmp_path}/evil.py:f"}) + "\n")
    (tmp_path / "config.yaml").write_text(f"data: {{map: '{tmp_path}/evil.py:f'}}")
    [row] = read_source(Source(str(tmp_path / "rows.jsonl")), "prompts")
    assert row["prompt"] == "a"
    with pytest.raises((ImportFailed, SystemExit)):
        read_source(Source(str(tmp_path / "rows.jsonl"), map=f"{tmp_path}/evil.py:f"), "prompts")


def test_options_reach_every_table_of_a_mixture() -> None:
    tables = {"a": {"path": "a.jsonl"}, "b": {"path": "b.jsonl", "map": "own.py:f"}}
    sources = TableOptions(mixture=tables, map="shared.py:f").sources("data")
    assert {name: source.map for name, source in sources.items()} == {"a": "shared.py:f", "b": "own.py:f"}


@pytest.fixture
def own_formats() -> Iterator[None]:
    before = dict(formats.FORMATS)
    yield
    formats.FORMATS.update(before)


@pytest.mark.usefixtures("own_formats")
def test_a_registered_format_goes_before_the_others() -> None:
    def convert(row: dict[str, Any], where: str) -> dict[str, Any]:
        return {"prompt": f"{row['question']} ({where})"}

    register_format("prompts", Format("quiz", "question choices", convert))
    rows = [{"question": "Why?", "choices": ["a"], "prompt": "no"}]
    assert read(rows) == [{"prompt": "Why? (data.path=memory, row index 0)"}]
    with pytest.raises(ConfigError, match="has the name 'quiz'"):
        register_format("prompts", Format("quiz", "question"))
    with pytest.raises(ConfigError, match="did you mean 'prompts'"):
        register_format("prompt", Format("other", "question"))  # type: ignore[arg-type]


def test_a_chat_template_by_path_replaces_the_tokenizers_own(tmp_path: Path) -> None:
    file = tmp_path / "plain.jinja"
    file.write_text("{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}")
    tokenizer = with_template(byte_tokenizer(), str(file), "data.chat_template_path")
    rendered = ChatTemplate(tokenizer, {}).render([{"role": "user", "content": "hi"}], add_generation_prompt=False)
    assert rendered == "[user] hi\n"
    with pytest.raises(ConfigError, match=r"data\.chat_template_path=nowhere\.jinja"):
        with_template(byte_tokenizer(), "nowhere.jinja", "data.chat_template_path")
    file.write_text("a" * (2**20 + 1))
    with pytest.raises(ConfigError, match="more than 1048576 characters"):
        with_template(byte_tokenizer(), str(file), "data.chat_template_path")


def test_columns_of_a_program_are_rows() -> None:
    assert as_rows({"prompt": ["a", "b"], "answer": [1, 2]}) == [
        {"prompt": "a", "answer": 1},
        {"prompt": "b", "answer": 2},
    ]
    named = {"easy": [{"prompt": "a"}], "hard": [{"prompt": "b"}]}
    assert as_rows(named) is named, "sets by name"
    with pytest.raises(DataError, match="equal lengths"):
        as_rows({"prompt": ["a"], "answer": [1, 2]})
