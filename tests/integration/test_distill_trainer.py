"""Runs of `rlite distill`: every kind of teacher, what is learnt, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDict

import rlite
from rlite.assembly.presets import DistillConfig
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.errors import ConfigError, DataError
from rlite.rollout import SingleTurnWorkflow
from rlite.trainer.distill import DistillTrainer
from rlite.trainer.options import SamplingOptions
from tests.integration.rewards import digits
from tests.prompt_server import prompt_server
from tests.tiny import build_model_dir

ROWS = [
    {"messages": [{"role": "user", "content": f"{a}+{b}="}], "kind": "ab"[a % 2]} for a in range(4) for b in range(3)
]
NIGHTLY = pytest.mark.nightly
SAMPLING = SamplingOptions(max_new_tokens=6)
SMALL: dict[str, Any] = {
    "train_data": {"prompts_per_rollout": 4, "responses_per_prompt": 2},
    "rollout": {"max_model_len": 96, "train_sampling_params": {"max_new_tokens": 6}},
}


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    rlite.init(num_devices=1, num_threads=1)
    yield
    rlite.shutdown()


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another width than the students'."""
    return build_model_dir(tmp_path_factory.mktemp("teachers") / "wide", "qwen3", hidden=96)


def trainer(model: Path, folder: Path, distill: dict[str, Any], steps: int = 2, **options: Any) -> DistillTrainer:
    run = {"save_dir": str(folder), "total_steps": steps, "save_freq": 1000, "record": "none"}
    actor = {"model_name": str(model), "lr": 3e-3, "weight_decay": 0.0, **options.pop("actor", {})}
    config = DistillConfig(actor=actor, distill={"task_rewards": False, **distill}, trainer=run, **{**SMALL, **options})
    return DistillTrainer(config, SingleTurnWorkflow(digits, SAMPLING.gconfig(), byte_tokenizer()), ROWS)


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def fit(run: DistillTrainer, folder: Path) -> list[dict[str, float]]:
    try:
        run.fit()
    finally:
        for engine in (run.engines.rollout, *run.engines.workers):
            engine.release()
    return metrics(folder)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"direction": "forward"}, marks=NIGHTLY),
        pytest.param({"direction": "jsd", "beta": 0.3, "support": "union", "k": 16}, marks=NIGHTLY),
        pytest.param({"support": "sampled"}, marks=NIGHTLY),
    ],
)
def test_a_student_comes_nearer_to_its_teacher(
    models: dict[str, Path], teacher: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    run = trainer(models["llama"], tmp_path, {"teacher": {"model_name": str(teacher)}, **options}, steps=10)
    rows = fit(run, tmp_path)
    assert all(row["taught_tokens"] == 1 for row in rows)
    assert rows[-1]["divergence"] < 0.8 * rows[0]["divergence"]


def test_a_student_learns_from_advantages_of_its_teacher(
    models: dict[str, Path], teacher: Path, tmp_path: Path
) -> None:
    own = {"teacher": {"model_name": str(teacher)}, "support": "sampled", "use_as": "advantage"}
    rows = fit(trainer(models["llama"], tmp_path, own, steps=12, actor={"lr": 2e-3}), tmp_path)
    assert rows[-1]["divergence"] < 0.9 * rows[0]["divergence"]
    assert all(row["grad_norm"] > 0 for row in rows)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"direction": "forward"}, marks=NIGHTLY),
        pytest.param({"support": "student_topk", "k": 8}, marks=NIGHTLY),
    ],
)
def test_a_run_whose_teacher_is_the_student_changes_nothing(
    models: dict[str, Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    rows = fit(
        trainer(models["qwen2"], tmp_path, {"teacher": {"model_name": str(models["qwen2"])}, **options}), tmp_path
    )
    assert [row["divergence"] for row in rows] == [0, 0]
    assert [row["grad_norm"] for row in rows] == [0, 0]


def test_each_row_has_the_teacher_that_its_column_names(models: dict[str, Path], teacher: Path, tmp_path: Path) -> None:
    own = {"by": "kind", "teacher": {"a": {"model_name": str(teacher)}, "b": {"model_name": str(models["llama"])}}}
    run = trainer(models["llama"], tmp_path / "run", own)
    seen: list[TensorDict] = []
    update = run.update
    run.update = lambda batch: update(seen.append(batch) or batch)  # type: ignore[func-returns-value,method-assign]
    rows = fit(run, tmp_path / "run")
    for batch in seen:
        answered = batch["loss_mask"].bool()
        for ids, numbers, mask in zip(batch["input_ids"], batch["teacher"], answered, strict=True):
            text = byte_tokenizer().decode(ids)
            first = next(int(character) for character in text if character.isdigit())
            assert (numbers[mask.roll(-1)] == first % 2).all()
            assert numbers.eq(-1).sum() == len(ids) - mask.sum()
    assert rows[0]["divergence"] > 0
    wrong = trainer(models["llama"], tmp_path / "wrong", {**own, "by": "messages"})
    with pytest.raises(DataError, match=r"distill\.by=messages: a row has .* expected one of a, b"):
        fit(wrong, tmp_path / "wrong")


CONTEXTS = """
def same(row, answer, siblings):
    return row["messages"]

def told(row, answer, siblings):
    assert isinstance(answer.text, str) and len(siblings) == 1
    return [{"role": "user", "content": row["messages"][0]["content"] + " the answer is " + siblings[0].text}]

def sometimes(row, answer, siblings):
    return row["messages"] if row["kind"] == "a" else None

def wrong(row, answer, siblings):
    return 7
"""


@pytest.fixture
def contexts(tmp_path: Path) -> Path:
    (tmp_path / "contexts.py").write_text(CONTEXTS)
    return tmp_path / "contexts.py"


@pytest.mark.parametrize("weights", ["current", pytest.param("average", marks=NIGHTLY)])
def test_a_student_that_is_shown_its_own_prompt_teaches_itself_nothing(
    models: dict[str, Path], tmp_path: Path, contexts: Path, weights: str
) -> None:
    own = {"teacher": {"weights": weights, "context": f"{contexts}:same"}}
    rows = fit(trainer(models["qwen2"], tmp_path / "run", own), tmp_path / "run")
    assert [row["divergence"] for row in rows] == pytest.approx([0, 0], abs=1e-6)


def test_a_student_that_is_shown_more_teaches_itself(models: dict[str, Path], tmp_path: Path, contexts: Path) -> None:
    own = {"teacher": {"weights": "average", "decay": 0.5, "context": f"{contexts}:told"}}
    rows = fit(trainer(models["qwen2"], tmp_path / "run", own, steps=3), tmp_path / "run")
    assert all(row["divergence"] > 1e-3 for row in rows)
    assert all(row["taught_tokens"] == 1 for row in rows)


@pytest.mark.nightly
def test_answers_that_begin_alike_share_only_what_their_teachers_see_alike(
    models: dict[str, Path], tmp_path: Path, contexts: Path
) -> None:
    own = {"teacher": {"weights": "current", "context": f"{contexts}:told"}}
    found = []
    for is_shared in (True, False):
        folder = tmp_path / str(is_shared)
        found += fit(trainer(models["qwen2"], folder, own, steps=1, actor={"share_prefixes": is_shared}), folder)
    assert found[0]["shared_tokens"] > 0.2
    for name in ("divergence", "grad_norm"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-4), name


@pytest.mark.nightly
def test_adapters_learn_from_a_teacher(models: dict[str, Path], teacher: Path, tmp_path: Path) -> None:
    own = {"teacher": {"model_name": str(teacher)}}
    actor = {"lr": 1e-2, "lora": {"rank": 8}}
    rows = fit(trainer(models["llama"], tmp_path, own, steps=8, actor=actor), tmp_path)
    assert rows[-1]["divergence"] < 0.9 * rows[0]["divergence"]


def test_rows_without_a_context_have_no_teacher(models: dict[str, Path], tmp_path: Path, contexts: Path) -> None:
    own = {"teacher": {"weights": "current", "context": f"{contexts}:sometimes"}, "support": "sampled"}
    rows = fit(trainer(models["qwen2"], tmp_path / "run", own, steps=3), tmp_path / "run")
    assert 0 < sum(row["taught_tokens"] for row in rows) < 3
    wrong = trainer(
        models["qwen2"], tmp_path / "wrong", {"teacher": {"weights": "current", "context": f"{contexts}:wrong"}}
    )
    with pytest.raises(DataError, match="returned 7; expected a text, a list of messages, or None"):
        fit(wrong, tmp_path / "wrong")


@pytest.mark.parametrize("kind", ["vLLM", *(pytest.param(kind, marks=NIGHTLY) for kind in ("SGLang", "OpenAI"))])
@pytest.mark.parametrize("support", [pytest.param("sampled", marks=NIGHTLY), "teacher_topk"])
def test_a_teacher_on_a_server_says_what_a_teacher_in_the_run_says(
    models: dict[str, Path], teacher: Path, tmp_path: Path, kind: str, support: str
) -> None:
    def first(place: dict[str, Any], name: str) -> dict[str, float]:
        own = {"teacher": place, "support": support, **({"k": 8} if support == "teacher_topk" else {})}
        return fit(trainer(models["llama"], tmp_path / name, own, steps=1), tmp_path / name)[0]

    with prompt_server(teacher, kind) as url:
        served = {"url": url, "model_name": "wide"}
        if (kind, support) == ("OpenAI", "teacher_topk"):
            with pytest.raises(ConfigError, match=r"tell no ids of the likeliest tokens; use distill\.support=sampled"):
                first(served, "served")
            return
        theirs = first(served, "served")
    ours = first({"model_name": str(teacher)}, "own")
    for name in ("divergence", "grad_norm"):
        assert theirs[name] == pytest.approx(ours[name], rel=1e-4), name


def test_a_server_that_cannot_teach_is_refused(models: dict[str, Path], teacher: Path, tmp_path: Path) -> None:
    def refused(match: str, url: str, **options: Any) -> None:
        own = {"teacher": {"url": url, "model_name": "wide"}, **options}
        with pytest.raises(ConfigError, match=match):
            trainer(models["llama"], tmp_path / "run", own)
        assert not (tmp_path / "run").exists()

    other = byte_tokenizer()
    other.backend_tokenizer.normalizer = None
    with prompt_server(teacher) as url:
        refused("as vLLM: Requested prompt logprobs of 21", url, support="teacher_topk", k=21)
        refused("a server returns log-probabilities of its own", url)
    swapped = lambda text: {"input_ids": [*reversed(other(text)["input_ids"])]}  # noqa: E731
    with prompt_server(teacher, "SGLang", swapped) as url:
        refused("cuts a text otherwise than the student's", url, support="sampled")


def test_teachers_that_do_not_fit_are_refused_before_anything_is_built(
    models: dict[str, Path], teacher: Path, tmp_path: Path
) -> None:
    def refused(match: str, distill: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=match):
            trainer(models["llama"], tmp_path / "run", distill)
        assert not (tmp_path / "run").exists()

    foreign = build_model_dir(tmp_path / "foreign", "llama", hidden=64)
    text = (foreign / "tokenizer.json").read_text()
    (foreign / "tokenizer.json").write_text(text.replace('"A": 32', '"A": 33', 1).replace('"B": 33', '"B": 32', 1))
    own = {"model_name": str(teacher)}
    refused("its tokenizer is another one", {"teacher": {"model_name": str(foreign)}})
    refused("set support=sampled and direction=reverse", {"teacher": own, "use_as": "advantage"})
    refused("by=COLUMN names the teacher of each row", {"teacher": {"a": own, "b": own}})
    refused("without a context the teacher is the student", {"teacher": {"weights": "current"}})
    refused("needs a checkpoint", {"teacher": {"weights": "frozen"}})
    refused(r"beta=0\.3 is an option of direction=jsd", {"teacher": own, "beta": 0.3})
    refused(r"support=full has no likeliest tokens", {"teacher": own, "k": 8})
