"""Tables of the supervised trainers: mixtures with columns of their own, and options that belong together."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from rlite.assembly.quickstart.run import CHATML, byte_tokenizer
from rlite.assembly.supervised import read_tokens
from rlite.config import load
from rlite.data.readers.streaming import WINDOW
from rlite.data.sft import labelled_rows, preference_rows, sft_rows
from rlite.data.tokens import StreamLoader
from rlite.errors import ConfigError, StreamedDataError, UnknownOptionError
from rlite.trainer.supervised_options import DpoConfig, KtoConfig, SftConfig
from tests.agents import tokenizer_with

TOKENIZER = byte_tokenizer()


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def save(tokenizer: Any, path: Path) -> None:
    """Write what a trainer reads of a checkpoint before its weights."""
    tokenizer.save_pretrained(path)
    AutoConfig.for_model("qwen2").save_pretrained(path)


def test_every_source_of_a_mixture_has_its_own_format_and_columns(tmp_path: Path) -> None:
    save(TOKENIZER, tmp_path / "model")
    raw = write(tmp_path / "raw.jsonl", [{"question": "q", "answer": str(n)} for n in range(2)])
    chat = write(tmp_path / "chat.jsonl", [{"instruction": "q", "output": "a"} for _ in range(6)])
    options = load(
        SftConfig,
        [
            *(f"actor.model_name={tmp_path / 'model'}", f"test_data.path={raw}"),
            *(f"data.mixture.raw.path={raw}", "data.mixture.raw.columns.prompt=question"),
            *("data.mixture.raw.columns.response=answer", "data.mixture.raw.weight=1"),
            *(f"data.mixture.chat.path={chat}", "data.mixture.chat.weight=1"),
            *("test_data.columns.prompt=question", "test_data.columns.response=answer"),
        ],
    )
    rows, test_rows = read_tokens(options.data, options.test_data, str(tmp_path / "model"), sft_rows, "demonstrations")
    texts = [TOKENIZER.decode(rows.batch([item])["input_ids"][0]) for item in range(len(rows))]
    assert texts[:2] == ["q0<|im_end|>", "q1<|im_end|>"]
    assert texts[2].startswith("<|im_start|>user\nq<|im_end|>")
    assert rows.mixture is not None
    assert rows.mixture.counts == {"raw": 4, "chat": 4}
    assert rows.form.startswith("a mixture of raw 50.0%, chat 50.0%: raw raw prompts and responses (prompt, response)")
    assert {name: len(table) for name, table in test_rows.items()} == {"": 2}


def test_template_options_reach_demonstrations(tmp_path: Path) -> None:
    save(tokenizer_with(CHATML + "{% if loud %}!{% endif %}"), tmp_path / "model")
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path = write(tmp_path / "rows.jsonl", [{"messages": talk}])
    given = [f"actor.model_name={tmp_path / 'model'}", f"data.path={path}"]
    options = load(SftConfig, [*given, "data.chat_template_options.loud=true"])
    rows, _ = read_tokens(options.data, options.test_data, str(tmp_path / "model"), sft_rows, "demonstrations")
    assert TOKENIZER.decode(rows.input_ids).endswith("a<|im_end|>\n!")
    options = load(SftConfig, [*given, "data.chat_template_options={lout: true}"])
    with pytest.raises(ConfigError, match=r"data\.chat_template_options\.lout: .* or did you mean 'loud'"):
        read_tokens(options.data, options.test_data, str(tmp_path / "model"), sft_rows, "demonstrations")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "data.path: required and not set (or data.mixture.NAME.path"),
        (["data.path=x", "data.mixture.a.path=y"], "data.mixture: path and mixture are given; expected one of them"),
        (
            ["data.mixture.a.path=x", "data.mixture.b.path=y", "data.mixture.b.weight=2"],
            "data.mixture.a.weight: missing, and other sources have one",
        ),
        (["data.mixture.a.path=x", "data.mixture.a.weight=0"], "data.mixture.a.weight=0.0: expected"),
        (["data.mixture.a.weight=1"], "required and not set: data.mixture.a.path"),
        (["data.mixture.a.paht=1"], "did you mean 'data.mixture.a.path'"),
        (["data.path=x", "data.columns.prompt=4"], "data.columns={'prompt': 4}: expected a string"),
        (
            ["data.path=x", "data.chat_template_options.tools=[]"],
            "data.chat_template_options.tools: rlite sets tools itself",
        ),
    ],
)  # fmt: skip
def test_options_of_data_that_do_not_fit_are_named(given: list[str], message: str) -> None:
    for options in (SftConfig, DpoConfig):
        with pytest.raises((ConfigError, UnknownOptionError), match=re.escape(message)):
            load(options, ["actor.model_name=x", *given])


ANSWER: dict[str, Any] = {"prompt": "q"}
STREAMED: dict[str, tuple[Any, Any, Any]] = {
    "demonstrations": (SftConfig, sft_rows, lambda n: {**ANSWER, "response": f"{n}"}),
    "preferences": (DpoConfig, preference_rows, lambda n: {**ANSWER, "chosen": f"{n}", "rejected": "", "margin": n}),
    "unpaired": (KtoConfig, labelled_rows, lambda n: {**ANSWER, "completion": f"{n}", "label": n % 2 == 0}),
}


@pytest.mark.parametrize("kind", STREAMED)
def test_streamed_rows_are_the_rows_of_the_table(kind: Any, tmp_path: Path) -> None:
    save(TOKENIZER, tmp_path / "model")
    config, tokenise, row = STREAMED[kind]
    too_long = {**row(0), "prompt": "q" * 30}  # nothing is left to learn
    path = write(tmp_path / "x.jsonl", [too_long, *(row(n) for n in range(WINDOW + 20)), too_long])
    options = [f"actor.model_name={tmp_path / 'model'}", f"data.path={path}", "data.max_length=16"]
    loaded = load(config, options)
    whole, _ = read_tokens(loaded.data, loaded.test_data, str(tmp_path / "model"), tokenise, kind)
    streaming = load(config, [*options, "data.streaming=true", "trainer.total_steps=9", "data.shuffle_buffer=1"])
    rows, _ = read_tokens(streaming.data, streaming.test_data, str(tmp_path / "model"), tokenise, kind)
    assert rows.stream is not None
    assert rows.form == whole.form
    [*batches] = StreamLoader(rows.stream, batch_size=1000, seed=0, num_batches=5)
    expected = [whole.batch(range(start, min(start + 1000, len(whole)))) for start in range(0, 5000, 1000)]
    for found, wanted in zip(batches, expected, strict=True):
        assert found.keys() == wanted.keys()
        if kind == "preferences":
            wanted["pair_ids"] -= wanted["pair_ids"].min()  # they count from the batch's first pair
        assert all(torch.equal(found[key], wanted[key]) for key in wanted.keys())  # noqa: SIM118 - not a dict


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.streaming=true", "data.path=x.jsonl"], "trainer.total_steps: required with data.streaming=true"),
        (["data.path=x.jsonl", "trainer.total_steps=3"], "trainer.total_steps is an option of data.streaming=true"),
        (
            ["data.streaming=true", "data.path=x.jsonl", "trainer.total_steps=3", "trainer.n_epochs=2"],
            "trainer.n_epochs=2: data.streaming=true ends after trainer.total_steps steps",
        ),
        (
            ["data.streaming=true", "data.mixture.a.path=x.jsonl", "trainer.total_steps=3"],
            "data.streaming=true streams one table; mix the rows beforehand",
        ),
    ],
)
def test_options_that_streaming_needs_or_excludes(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(SftConfig, ["actor.model_name=x", *settings])


def test_a_streamed_row_that_does_not_fit_a_device_is_named(tmp_path: Path) -> None:
    save(TOKENIZER, tmp_path / "model")
    path = write(tmp_path / "x.jsonl", [{"text": "a"}] * (WINDOW + 3) + [{"text": "a" * 12}])
    settings = [f"actor.model_name={tmp_path}", f"data.path={path}", "data.streaming=true", "trainer.total_steps=9"]
    loaded = load(SftConfig, settings)
    rows, _ = read_tokens(loaded.data, loaded.test_data, str(tmp_path / "model"), sft_rows, "demonstrations")
    assert rows.stream is not None
    rows.stream.check("capacity", lambda window: window.check_capacity(12, "the capacity"))
    with pytest.raises(StreamedDataError, match=rf"x\.jsonl, line {WINDOW + 4} has 13 tokens and the capacity is 12"):
        next(iter(StreamLoader(rows.stream, batch_size=WINDOW + 4, seed=0, num_batches=1)))
