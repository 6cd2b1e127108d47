"""A run that no longer learns says so, ends with the reason, and its good checkpoints stay."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import rlite
from rlite import RliteInferenceEngine
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.config import load
from rlite.data.sft import preference_rows, sft_rows
from rlite.errors import CheckpointError, DivergedError
from rlite.rollout import SingleTurnWorkflow
from rlite.runtime.cluster.group import apply_on_processes
from rlite.trainer.dpo import DpoTrainer
from rlite.trainer.ppo import PpoTrainer
from rlite.trainer.rl.options import PpoConfig
from rlite.trainer.rm import RmTrainer
from rlite.trainer.sft import SftTrainer
from rlite.trainer.supervised_options import DpoConfig, RmConfig, SftConfig
from rlite.types import GenerationHyperparameters
from tests.integration.rewards import distinct
from tests.tiny import build_model_dir

KINDS = ["sft", "rm", "dpo", "ppo"]
SUPERVISED: dict[str, Any] = {
    "sft": (SftConfig, SftTrainer),
    "rm": (RmConfig, RmTrainer),
    "dpo": (DpoConfig, DpoTrainer),
}
PAIRS = [{"prompt": f"{i}", "chosen": "yes!", "rejected": "no"} for i in range(64)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_dir(tmp_path_factory.mktemp("models") / "qwen2", hidden=32)


@pytest.fixture(scope="module")
def broken(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One weight of the model is NaN."""
    path = build_model_dir(tmp_path_factory.mktemp("models") / "broken", hidden=32)
    weights = load_file(path / "model.safetensors")
    weights["model.norm.weight"][3] = math.nan
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    rlite.init(num_devices=1, num_threads=1)
    yield
    rlite.shutdown()


def trainer(kind: str, model: Path, out: Path, lr: float, *settings: str) -> Any:
    """A run of 12 steps that saves each and keeps one."""
    key = "critic" if kind == "rm" else "actor"
    common = [f"{key}.model_name={model}", f"{key}.lr={lr}", f"trainer.save_dir={out}", "trainer.save_freq=1"]
    common += ["trainer.keep=1", f"{key}.scheduler=constant", f"{key}.warmup_ratio=0", *settings]
    if kind == "ppo":
        common += ["train_data.prompts_per_rollout=4", "train_data.responses_per_prompt=4", "trainer.total_steps=12"]
        options = load(
            PpoConfig, [*common, "rollout.max_model_len=32", "rollout.train_sampling_params.max_new_tokens=6"]
        )
        workflow = SingleTurnWorkflow(distinct, GenerationHyperparameters(max_new_tokens=6), byte_tokenizer())
        return PpoTrainer(options, workflow, [{"prompt": row["prompt"]} for row in PAIRS])
    options = load(SUPERVISED[kind][0], [*common, "data.path=-", "data.batch_size=16", "trainer.n_epochs=3"])
    rows = [{"prompt": row["prompt"], "response": row["chosen"]} for row in PAIRS] if kind == "sft" else PAIRS
    tokenise = sft_rows if kind == "sft" else preference_rows
    return SUPERVISED[kind][1](options, tokenise(rows, byte_tokenizer(), 32))


def logged(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_not_finite_end_every_trainer_at_its_start_by_name(
    kind: str, broken: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=rf"{broken}: the weights are not finite.*model\.norm\.weight holds NaN"):
        trainer(kind, broken, tmp_path / "run", 1e-3).fit()
    assert not (tmp_path / "run").exists()


def test_deterministic_serving_names_the_weights_and_not_the_device(broken: Path) -> None:
    engine = RliteInferenceEngine(broken)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds NaN or infinity"):
        engine.build(max_model_len=32, deterministic=True)


def new_session() -> None:
    rlite.shutdown()
    rlite.init(num_devices=1, num_threads=1)


def names(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "state").iterdir())


HUGE_LR = 1e37
"""one update, and the weights are still finite, but nothing that is computed from them"""


@pytest.mark.parametrize("kind", ["sft", "rm", "dpo"])
def test_a_run_that_diverges_says_so_at_once_and_ends_with_the_reason(
    kind: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    with pytest.raises(
        DivergedError, match=r"diverged at step 4: the loss or the gradients are not finite.*3 in a row"
    ):
        trainer(kind, model, out, HUGE_LR, "trainer.max_skipped_steps=3").fit()
    said = capsys.readouterr().out
    assert said.index("ALARM at step 2: an update was skipped") < said.index("step 3/12")
    assert said.count("ALARM") == 1
    assert [row["step"] for row in logged(out)] == [1, 2, 3, 4]
    assert names(out) == ["diverged-1"], "written before anybody could know"


@pytest.mark.nightly
def test_reinforcement_learning_that_diverges_says_so_and_ends_with_the_reason(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DivergedError, match=r"Bad steps: 3 in a row"):
        trainer("ppo", model, tmp_path, 1e3, "trainer.max_skipped_steps=3").fit()
    last = logged(tmp_path)[-1]["step"]
    assert f"ALARM at step {last - 2}: an update was skipped" in capsys.readouterr().out
    assert names(tmp_path) == [f"diverged-{last - 3}", f"step-{last - 4}"]


@pytest.mark.nightly
def test_policy_that_generates_nothing_finite_ends_the_run_and_sets_its_checkpoint_aside(
    model: Path, tmp_path: Path
) -> None:
    stop_after(trainer("ppo", model, tmp_path, 1e-4, "trainer.save_async=false"), 3)
    new_session()
    resume = f"trainer.load_ckpt_from={tmp_path}/state/step-3"
    words = r"at step 4: .*not finite.*policy version 4\).*diverged-4 is set aside.*load_ckpt_from=\S*state/step-3 "
    with pytest.raises(DivergedError, match=words):
        trainer("ppo", model, tmp_path, HUGE_LR, resume).fit()
    assert names(tmp_path) == ["diverged-4", "step-3"]


def fill_with_nan(worker: Any) -> None:
    with torch.no_grad():
        for shard in worker.parameter_shards().values():
            shard.tensor.fill_(math.nan)


def break_weights_in_step(learner: Any, step: int) -> None:
    update = learner.update

    def update_and_break(batch: Any) -> Any:
        batch = update(batch)
        if learner.run.step + 1 == step:
            actor = learner.engines.actor.group
            apply_on_processes([(actor, 0, (actor.key(0),), ())], fill_with_nan, [actor], "break weights", 60)
        return batch

    learner.update = update_and_break


def test_weights_that_became_nan_are_named_by_the_generation_that_they_spoil(model: Path, tmp_path: Path) -> None:
    learner = trainer("ppo", model, tmp_path, 1e-4, "trainer.save_freq=2")
    break_weights_in_step(learner, 3)
    with pytest.raises(DivergedError, match=r"at step 3: the served weights of policy version 3 hold NaN.*step-2 "):
        learner.fit()
    assert names(tmp_path) == ["step-2"]


def test_weights_that_are_not_finite_are_never_saved(model: Path, tmp_path: Path) -> None:
    learner = trainer("ppo", model, tmp_path, 1e-4)
    break_weights_in_step(learner, 3)
    with pytest.raises(DivergedError, match="diverged at step 3: weights hold NaN or infinity: model "):
        learner.fit()
    assert names(tmp_path) == ["step-2"]
    assert all(tensor.isfinite().all() for tensor in load_file(tmp_path / "latest" / "model.safetensors").values())


@pytest.mark.nightly
def test_a_diverged_run_displaces_no_good_checkpoint(model: Path, tmp_path: Path) -> None:
    stop_after(trainer("sft", model, tmp_path, 1e-4, "trainer.save_async=false"), 3)
    assert names(tmp_path) == ["step-3"]
    new_session()
    resume = f"trainer.load_ckpt_from={tmp_path}/state/step-3"
    with pytest.raises(DivergedError, match=r"Resume with trainer\.load_ckpt_from=\S*state/step-3 .*with a lower lr"):
        trainer("sft", model, tmp_path, HUGE_LR, "trainer.max_skipped_steps=2", resume).fit()
    assert names(tmp_path) == ["diverged-4", "step-3"]
    new_session()
    trainer("sft", model, tmp_path, 1e-4, "trainer.load_ckpt_from=latest").fit()
    assert [row["step"] for row in logged(tmp_path)] == list(range(1, 13))
    assert {row["lr"] for row in logged(tmp_path)} == {1e-4}
    assert names(tmp_path) == ["diverged-4", "step-12"]


@pytest.mark.nightly
def test_a_loss_that_explodes_and_stays_finite_displaces_no_good_checkpoint(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop_after(trainer("sft", model, tmp_path, 1e-4, "trainer.save_async=false"), 3)
    new_session()
    options = ("trainer.max_skipped_steps=3", f"trainer.load_ckpt_from={tmp_path}/state/step-3")
    with pytest.raises(DivergedError, match=r"the loss is more than 10 times|the gradient is 0"):
        trainer("sft", model, tmp_path, 1e3, *options).fit()
    assert all(math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]) for row in logged(tmp_path))
    assert "training diverges" in capsys.readouterr().out
    assert names(tmp_path) == ["diverged-4", "step-3"]


def test_a_run_whose_last_updates_were_skipped_ends_with_an_error(model: Path, tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match="the last steps were bad: the loss or the gradients"):
        trainer("sft", model, tmp_path, HUGE_LR, "trainer.max_skipped_steps=99").fit()
    assert names(tmp_path) == ["diverged-1", "diverged-12"]


def stop_after(learner: Any, step: int) -> None:
    """Interrupt a run at the end of the step after this one, before that one is saved."""
    run = learner.run
    log = run.log_step

    def log_and_stop(metrics: Any) -> None:
        log(metrics)
        if run.step == step + 1:
            raise KeyboardInterrupt

    run.log_step = log_and_stop
    with pytest.raises(KeyboardInterrupt):
        learner.fit()
