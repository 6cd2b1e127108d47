"""Evaluations during training: named sets, thresholds, devices of their own, and kill -9 in the middle of one."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rlite
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.errors import ConfigError
from rlite.rollout import RewardFunction, SingleTurnWorkflow
from rlite.trainer.callbacks import Callback
from rlite.trainer.held_out import HeldOutPromptOptions
from rlite.trainer.options import SamplingOptions, SetSamplingOptions, TrainerOptions
from rlite.trainer.ppo import PpoTrainer
from rlite.trainer.rl.device_plan import without_evaluation
from rlite.trainer.rl.options import ActorOptions, PpoConfig, PromptOptions, RolloutOptions
from tests import forked_python
from tests.integration.rewards import digits
from tests.integration.signals import interrupted, terminate
from tests.integration.worlds import MARK, environment, ray_session
from tests.recorded import recorded as rows_of

ROWS = [{"prompt": f"{a}+{b}="} for a in range(6) for b in range(6)]
SAMPLED = SetSamplingOptions(temperature=1.0)
SETS = {
    "math": HeldOutPromptOptions(samples=4, sampling=SAMPLED, every=2, limit=3),
    "code": HeldOutPromptOptions(every=3, first=False),
}
TEST_ROWS = {"math": ROWS[:8], "code": ROWS[8:12]}


@pytest.fixture(scope="module")
def model(models: Mapping[str, Path]) -> str:
    return str(models["qwen3"])


@contextmanager
def session() -> Iterator[None]:
    rlite.init(device="cpu", num_devices=1, num_threads=1)
    yield
    rlite.shutdown()


def trainer(
    model: str,
    folder: Path,
    sets: Mapping[str, HeldOutPromptOptions] = SETS,
    rows: Any = TEST_ROWS,
    callbacks: Sequence[Callback] = (),
    kind: type[SingleTurnWorkflow] = SingleTurnWorkflow,
    cls: type[PpoTrainer] = PpoTrainer,
    **changes: Any,
) -> PpoTrainer:
    sampling = SamplingOptions(max_new_tokens=8)
    options = PpoConfig(
        actor=ActorOptions(model_name=model, lr=3e-3),
        train_data=PromptOptions(prompts_per_rollout=4, responses_per_prompt=4),
        test_data=dict(sets),
        rollout=RolloutOptions(
            train_sampling_params=sampling, max_model_len=64, max_num_seqs=32, deterministic=True, dtype="float32"
        ),
        trainer=TrainerOptions(save_dir=str(folder), **{"total_steps": 4, "save_freq": 2, **changes}),
    )
    training = SingleTurnWorkflow(digits, sampling.gconfig(), byte_tokenizer())
    reward = RewardFunction(first_letter, in_process=True)
    naming = kind(reward, SamplingOptions(temperature=0.0, max_new_tokens=4).gconfig(), byte_tokenizer())
    return cls(options, training, ROWS, rows, {"math": naming} if "math" in rows else None, callbacks)


def first_letter(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **row: Any) -> dict[str, Any]:
    """Reward a digit at the beginning, and name it as the answer."""
    return {"score": float(completions[:1].isdigit()), "answer": completions[:1]}


def logged(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def evaluations(folder: Path, name: str) -> dict[int, dict[str, float]]:
    """The metrics of a set's evaluations, by the step that they are of."""
    found = {}
    for row in logged(folder):
        own = {key.removeprefix(f"{name}/"): value for key, value in row.items() if key.startswith(f"{name}/")}
        if own:
            found[int(row["step"] - own.pop("lag_steps", 0))] = own
    return found


def assert_same_weights(one: Path, other: Path) -> None:
    ours, theirs = (load_file(folder / "latest/model.safetensors") for folder in (one, other))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_sets_are_evaluated_when_due_with_metrics_of_their_own_and_change_no_training(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with session():
        trainer(model, tmp_path / "plain", sets={}, rows=()).fit()
    with session():
        trainer(model, tmp_path / "run", best_metric="math/pass@4").fit()
    math, code = evaluations(tmp_path / "run", "math"), evaluations(tmp_path / "run", "code")
    assert (sorted(math), sorted(code)) == ([0, 2, 4], [3, 4])
    assert {"accuracy", "standard_error", "num_errors", "truncated", *(f"pass@{k}" for k in range(1, 5))} <= set(
        math[4]
    )
    assert math[4]["pass@4"] >= math[4]["pass@1"]
    assert 0 <= math[4]["majority@4"] <= 1
    assert "pass@2" not in code[4]
    assert {row["step"] for row in logged(tmp_path / "run") if row.get("seconds_evaluate")} == {0, 2, 3, 4}
    told = capsys.readouterr().out
    math = "3 prompts x 4 at temperature 1, at most 4 new tokens, pass@4, before step 1 and every 2 steps, in turns"
    assert re.search(rf"evaluation math +{math} with training\n", told)
    assert re.search(r"math/pass@4 +[\d.]+ at step 0 -> [\d.]+ at step 4", told)
    assert re.search(r"best model .*/best, math/pass@4 [\d.]+ at step [24]\n", told)
    assert (tmp_path / "run/best/model.safetensors").exists()
    assert_same_weights(tmp_path / "run", tmp_path / "plain")
    assert recorded(tmp_path / "run", "math") == {0: 12, 2: 12, 4: 12}
    assert {row["answer"] for row in rows_of(tmp_path / "run", "eval.math")} - {None}


def recorded(folder: Path, name: str) -> dict[int, int]:
    """The number of recorded samples of a set's evaluations, by step."""
    rows = rows_of(folder, f"eval.{name}")
    assert all(row["status"] == "evaluated" for row in rows)
    return dict(sorted(Counter(row["step"] for row in rows).items()))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "num_devices"),
    [("beside", 2), ("snapshot", 1), ("snapshot", 0)],
)
def test_evaluation_beside_training_changes_no_weights(
    where: str, num_devices: int, model: str, tmp_path: Path
) -> None:
    with session():
        trainer(model, tmp_path / "turns", best_metric="math/accuracy").fit()
    with ray_session(num_devices) if num_devices else session():
        trainer(model, tmp_path / "beside", best_metric="math/accuracy", evaluate=where).fit()
    assert_same_weights(tmp_path / "beside", tmp_path / "turns")
    for name in SETS:
        assert evaluations(tmp_path / "beside", name) == evaluations(tmp_path / "turns", name)
    assert recorded(tmp_path / "beside", "math") == recorded(tmp_path / "turns", "math") == {0: 12, 2: 12, 4: 12}
    rows = logged(tmp_path / "beside")
    assert all(row["math/lag_steps"] >= 0 for row in rows if "math/accuracy" in row)
    ours, theirs = (load_file(tmp_path / name / "best/model.safetensors") for name in ("beside", "turns"))
    assert all(torch.equal(ours[key], theirs[key]) for key in ours), "the best is the model that was evaluated"
    assert not (tmp_path / "beside/evaluated").exists()


@pytest.mark.nightly
def test_a_run_stops_at_a_threshold_and_does_not_go_on_until_it_is_raised(model: str, tmp_path: Path) -> None:
    def fit(threshold: float) -> list[float]:
        with session():
            trainer(model, tmp_path, total_steps=6, stop_at={"math/accuracy": threshold}).fit()
        return [row["step"] for row in logged(tmp_path)]

    assert fit(-1.0) == [0, 1, 2], "not before the first step"
    assert (tmp_path / "state/step-2").is_dir()
    assert fit(-1.0)[-1] == 2
    assert fit(2.0)[-1] == 6


def test_a_run_that_a_callback_ends_is_evaluated_at_its_end(model: str, tmp_path: Path) -> None:
    class AtStep3(Callback):
        def on_step(self, run: Any, metrics: Mapping[str, float]) -> None:
            if run.step == 3:
                run.stop("enough")

    sets = {"math": HeldOutPromptOptions(limit=2, every=2), "code": HeldOutPromptOptions(limit=2, every=5)}
    with session():
        trainer(model, tmp_path, sets, total_steps=6, callbacks=[AtStep3()]).fit()
    assert sorted(evaluations(tmp_path, "math")) == [0, 2, 3]
    assert sorted(evaluations(tmp_path, "code")) == [0, 3]


def test_evaluations_that_cannot_be_made_are_refused_before_anything_starts(model: str, tmp_path: Path) -> None:
    greedy = {"code": HeldOutPromptOptions(samples=4)}
    with pytest.raises(
        ConfigError, match=r"test_data\.code\.samples=4: at temperature 0 all responses .* are the same"
    ):
        trainer(model, tmp_path, sets=greedy)
    with pytest.raises(ConfigError, match=r"best_metric=mat/accuracy: expected a metric of the evaluation"):
        trainer(model, tmp_path, best_metric="mat/accuracy")
    with pytest.raises(ConfigError, match=r"stop_at=math/pass@5"):
        trainer(model, tmp_path, stop_at={"math/pass@5": 0.5})
    with pytest.raises(ConfigError, match=r"evaluate=beside: nothing is evaluated"):
        trainer(model, tmp_path, sets={}, rows=(), evaluate="beside")


class NeverEnding(SingleTurnWorkflow):
    """Answers the 12 episodes of the evaluation before the first step. At the next one a SIGTERM arrives, if asked."""

    num_episodes = 0
    is_interrupting = True

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        NeverEnding.num_episodes += 1
        if NeverEnding.num_episodes == 13 and self.is_interrupting:
            terminate()
        if NeverEnding.num_episodes > 12:
            await asyncio.sleep(60)
        return await super().arun_episode(engine, data)


class InterruptedInStep3(PpoTrainer):
    """A SIGTERM arrives in step 3, while the evaluation of step 2 is under way and that of another set is due."""

    def update(self, batch: Any) -> Any:
        if self.run.step == 2:
            terminate()
        return super().update(batch)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_signal_in_an_evaluation_saves_at_once_and_the_run_that_resumes_makes_it(model: str, tmp_path: Path) -> None:
    sets = {**SETS, "code": HeldOutPromptOptions(every=2)}
    for name in ("run", "calm"):
        NeverEnding.num_episodes = 0
        if name == "run":
            with session():
                begun = time.monotonic()
                interrupted(
                    trainer(
                        model, tmp_path / "run", sets, best_metric="math/accuracy", save_freq=9, kind=NeverEnding
                    ).fit
                )
                assert time.monotonic() - begun < 50, "it has not waited for the evaluation"
            assert [path.name for path in (tmp_path / "run/state").iterdir()] == ["step-2"]
            assert sorted(evaluations(tmp_path / "run", "math")) == [0]
        with session():
            trainer(model, tmp_path / name, sets, best_metric="math/accuracy", save_freq=9).fit()
    assert_same_evaluations(tmp_path / "run", tmp_path / "calm")
    assert_same_weights(tmp_path / "run", tmp_path / "calm")
    groups = [{row["group"] for row in rows_of(tmp_path / name, "train")} for name in ("run", "calm")]
    assert groups[0] == groups[1], "an interrupted evaluation moves no number"


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("best_metric", ["math/accuracy", None])
def test_a_signal_while_an_earlier_step_is_evaluated_keeps_its_model_if_the_best_is_kept(
    best_metric: str | None, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"best_metric": best_metric, "save_freq": 9, "total_steps": 5}
    monkeypatch.setattr(NeverEnding, "num_episodes", 0)
    monkeypatch.setattr(NeverEnding, "is_interrupting", False)
    with session():
        begun = time.monotonic()
        interrupted(
            trainer(
                model, tmp_path / "run", kind=NeverEnding, cls=InterruptedInStep3, evaluate="snapshot", **options
            ).fit
        )
    assert time.monotonic() - begun < 50, "it has not waited for the evaluation"
    assert [path.name for path in (tmp_path / "run/state").iterdir()] == ["step-3"]
    for name, where in (("run", "snapshot"), ("calm", "in_turns")):
        with session():
            trainer(model, tmp_path / name, evaluate=where, **options).fit()
    assert_same_weights(tmp_path / "run", tmp_path / "calm")
    found = {name: sorted(evaluations(tmp_path / "run", name)) for name in SETS}
    if best_metric is None:
        assert found == {"math": [0, 3, 4, 5], "code": [3, 5]}, "of the weights that are there"
    else:
        assert found == {"math": [0, 2, 4, 5], "code": [3, 5]}
        assert_same_evaluations(tmp_path / "run", tmp_path / "calm")


def assert_same_evaluations(one: Path, other: Path) -> None:
    for name in SETS:
        assert evaluations(one, name) == evaluations(other, name)
        assert recorded(one, name) == recorded(other, name)
    ours, theirs = (load_file(folder / "best/model.safetensors") for folder in (one, other))
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    facts = [json.loads((folder / "best/evaluation.json").read_text()) for folder in (one, other)]
    assert facts[0] == facts[1]


def test_devices_for_evaluation_are_apart_from_the_others() -> None:
    def divided(world: int, tp_size: int = 1, **given: Any) -> tuple[int, int]:
        options = PpoConfig(
            actor=ActorOptions(model_name="x"),
            rollout=RolloutOptions(tp_size=tp_size),
            trainer=TrainerOptions(**given),
        )
        return without_evaluation(world, options.trainer, tp_size)

    assert divided(8) == (8, 0)
    assert divided(8, evaluate="beside") == (7, 1)
    assert divided(8, tp_size=2, evaluate="beside", evaluation_devices=4) == (4, 4)
    with pytest.raises(ConfigError, match="need devices of their own, 1 of them, and there are 1 in all"):
        divided(1, evaluate="beside")
    with pytest.raises(ConfigError, match=r"evaluation_devices=3: rollout\.tp_size=2 does not divide it"):
        divided(8, tp_size=2, evaluate="beside", evaluation_devices=3)


JUDGE = """
import os, pathlib, signal, time

def digits(prompt, completions, prompt_ids, completion_ids, **row):
    return sum(character.isdigit() for character in completions) / max(len(completions), 1)

def deadly(prompt, completions, prompt_ids, completion_ids, **row):
    "Kills its process in the evaluation after step 2, as soon as there is the checkpoint that the test waits for."
    home, awaited = pathlib.Path(os.environ["KILL_IN"]), os.environ["KILL_AFTER"]
    calls = int((home / "calls").read_text()) + 1 if (home / "calls").exists() else 1
    (home / "calls").write_text(str(calls))
    if calls == 6:  # 4 of step 0, 2 of step 2
        deadline = time.monotonic() + 60
        while awaited and not (home / "run/state" / awaited).is_dir() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    return digits(prompt, completions, prompt_ids, completion_ids)
"""


def machine(key: str) -> bool:
    """Return True for metrics of the machine or of the moment, which do not depend on the training alone."""
    return any(word in key for word in ("second", "memory", "mfu", "lag_steps"))


def command(model: str, folder: Path, judge: str, *options: str) -> list[str]:
    """Arguments of Python for a run with evaluations by a function of JUDGE, after writing its files into a folder."""
    (folder / "judge.py").write_text(JUDGE)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return [
        *("-m", "rlite.trainer.ppo", f"actor.model_name={model}", "actor.lr=3e-3", *options),
        *("train_data.path=prompts.jsonl", "train_data.prompts_per_rollout=2", "train_data.responses_per_prompt=4"),
        *("reward.path=judge.py:digits", "reward.in_process=true", "rollout.train_sampling_params.max_new_tokens=8"),
        *("rollout.deterministic=true", "rollout.dtype=float32", "rollout.max_num_seqs=8", "rollout.max_model_len=64"),
        *("test_data.math.path=prompts.jsonl", "test_data.math.limit=4", "test_data.math.reward.in_process=true"),
        *(f"test_data.math.reward.path=judge.py:{judge}", "trainer.total_steps=4", "trainer.save_freq=2"),
        *("trainer.test_freq=2", "trainer.best_metric=math/accuracy"),
    ]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(("where", "num_ranks"), [("beside", 2), ("snapshot", 1)])
def test_evaluation_while_training_goes_on_runs_under_torchrun(
    model: str, tmp_path: Path, where: str, num_ranks: int
) -> None:
    """One thread drives the engine that evaluates, another the training."""
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    for name, launch, chosen in (("turns", [], "in_turns"), ("other", ranks, where)):
        options = [f"trainer.evaluate={chosen}", f"trainer.save_dir={name}"]
        program = [forked_python.python(), *launch, *command(model, tmp_path, "digits", *options)]
        done = subprocess.run(program, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-4000:]
    assert_same_weights(tmp_path / "other", tmp_path / "turns")
    measured = evaluations(tmp_path / "other", "math")
    assert sorted(measured) == [0, 2, 4]
    assert measured == evaluations(tmp_path / "turns", "math")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "awaited"),
    [
        ("in_turns", ""),
        pytest.param("beside", "step-2", marks=pytest.mark.nightly),
        pytest.param("snapshot", "step-2", marks=pytest.mark.nightly),
    ],
)
def test_a_kill_during_an_evaluation_loses_nothing(model: str, tmp_path: Path, where: str, awaited: str) -> None:
    """Beside training, the checkpoint of step 2 is written while the evaluation of step 2 is under way."""
    world = ["launcher=ray", "num_devices=2"] if where == "beside" else ["num_devices=1"]
    arguments = command(model, tmp_path, "deadly", *world, f"trainer.evaluate={where}")

    def run(name: str) -> int:
        program = [forked_python.python(), *arguments, f"trainer.save_dir={name}"]
        variables = environment(KILL_IN=str(tmp_path), KILL_AFTER=awaited, **{MARK: "evaluation"})
        return subprocess.run(program, cwd=tmp_path, env=variables, capture_output=True, timeout=280).returncode

    assert run("run") == -signal.SIGKILL
    assert sorted(path.name for path in (tmp_path / "run").glob("state/step-*")) == ([awaited] if awaited else [])
    assert run("run") == 0
    assert run("calm") == 0
    assert_same_weights(tmp_path / "run", tmp_path / "calm")
    assert evaluations(tmp_path / "run", "math") == evaluations(tmp_path / "calm", "math")
    assert sorted(evaluations(tmp_path / "run", "math")) == [0, 2, 4]
    assert recorded(tmp_path / "run", "math") == {0: 4, 2: 4, 4: 4}, "each sample once"
    for row, expected in zip(*(logged(tmp_path / name) for name in ("run", "calm")), strict=where == "in_turns"):
        if where == "in_turns":
            assert {key: row[key] for key in row if not machine(key)} == {
                key: expected[key] for key in expected if not machine(key)
            }
    ours, theirs = (load_file(tmp_path / name / "best/model.safetensors") for name in ("run", "calm"))
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
