"""Every code block of the README and of docs runs on a tiny model, or says why it does not."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rlite
from rlite.algorithms import ADVANTAGES, POLICY_LOSSES, PREFERENCE_LOSSES
from rlite.algorithms.advantages.credit import CREDITS
from rlite.data.readers.formats import FORMATS
from rlite.rollout.registry import REWARDS, WORKFLOWS
from rlite.trainer.callbacks import CALLBACKS
from rlite.trainer.sampling.sampler import SAMPLERS
from tests.agents import WITH_TOOLS, tokenizer_with
from tests.docs.blocks import LANGUAGES, ROOT, Block, blocks, pages
from tests.docs.running import FUNCTIONS, ROWS, World
from tests.tiny import build_model_dir

BLOCKS = [block for page in pages() for block in blocks(page)]
RUN_HERE = [page for page in pages() if any(block.is_run_here for block in blocks(page))]
QUICK = {"README.md"} | {
    f"docs/{name}.md" for name in ("environments", "executors", "index", "judges", "own-algorithms", "own-code")
}
"""pages whose blocks run in seconds; `make nightly` runs the others"""
TABLES: list[dict[Any, Any]] = [ADVANTAGES, CALLBACKS, CREDITS, FORMATS, POLICY_LOSSES, PREFERENCE_LOSSES, SAMPLERS]
TABLES += [REWARDS, WORKFLOWS]
"""names that programs of pages add to, which other tests must not see"""
MAX_NOT_RUN = 0.2
"""share of the blocks that nothing runs"""


def test_every_block_names_its_language() -> None:
    unknown = [f"{block.place}: {block.language!r}" for block in BLOCKS if block.language not in LANGUAGES]
    assert unknown == [], "output is a block of the language `text`"


def test_at_most_a_fifth_of_the_blocks_is_not_run() -> None:
    silent = [block.place for block in BLOCKS if block.reason is not None]
    assert len(silent) <= MAX_NOT_RUN * len(BLOCKS), silent


def test_tests_that_blocks_name_know_the_page_or_are_what_the_block_runs() -> None:
    for block in BLOCKS:
        if block.test is not None:
            told = (ROOT / block.test).read_text(encoding="utf-8")
            assert block.page.name in told or block.test in block.text, f"{block.place}: {block.test}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what pages name: a model, tables, functions and finished runs."""
    folder = tmp_path_factory.mktemp("pages")
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 16384}
    build_model_dir(folder / "model", "qwen3", hidden=64, **sizes)
    tokenizer_with("{% if enable_thinking %}{% endif %}" + WITH_TOOLS).save_pretrained(folder / "model")
    for name in ("sums", "prompts", "rows", "test", "held_out", "math", "code"):
        write(folder / f"{name}.jsonl", ROWS)
    write(folder / "pairs.jsonl", [{"prompt": row["prompt"], "chosen": "yes", "rejected": "no"} for row in ROWS])
    labels = [{"prompt": row["prompt"], "completion": row["answer"], "label": True} for row in ROWS]
    write(folder / "labels.jsonl", labels)
    (folder / "gsm8k").mkdir()
    graded = [{"data_source": "sums", "prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    truths = [{"reward_model": {"style": "rule", "ground_truth": row["answer"]}} for row in ROWS]
    for name in ("train", "test"):
        table = pa.Table.from_pylist([row | truth for row, truth in zip(graded, truths, strict=True)])
        pq.write_table(table, folder / "gsm8k" / f"{name}.parquet")
    for name in ("my.py", "score.py"):
        (folder / name).write_text(FUNCTIONS, encoding="utf-8")
    for name in ("configs", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    return folder


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def world(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[World]:
    """The folder and the names of one page."""
    own = tmp_path / "page"
    shutil.copytree(folder, own)
    monkeypatch.chdir(own)
    monkeypatch.syspath_prepend(str(own))
    before, registered = set(sys.modules), [dict(table) for table in TABLES]
    yield World(request.node.callspec.params["page"].stem, own / "model", monkeypatch)
    rlite.shutdown()
    for table, entries in zip(TABLES, registered, strict=True):
        table.clear()
        table.update(entries)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(own)):
            del sys.modules[name]


def case(page: Path) -> Any:
    """Return a page as a parameter, for the night unless its blocks run in seconds."""
    name = page.relative_to(ROOT).as_posix()
    return pytest.param(page, marks=() if name in QUICK else pytest.mark.nightly, id=name)


@pytest.mark.parametrize("page", [case(page) for page in RUN_HERE])
def test_the_blocks_of_a_page_run(page: Path, world: World) -> None:
    own = [block for block in blocks(page) if block.is_run_here]
    world.prepare(own)
    for block in own:
        failure = failure_of(block, world)
        assert (block.failure or "") in failure if failure else block.failure is None, f"{block.place}: {failure}"


def failure_of(block: Block, world: World) -> str:
    """Run a block, and return how it failed, or an empty text."""
    try:
        world.run(block)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or block.failure is None:
            raise AssertionError(f"{block.place}: {type(error).__name__}: {error}") from error
        return f"{type(error).__name__}: {error}"
    return ""
