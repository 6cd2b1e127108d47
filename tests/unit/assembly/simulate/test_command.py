"""`rlite simulate`: the page's example, runs that can be read, and runs that cannot."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from rlite import config
from rlite.assembly.simulate.command import main, simulate
from rlite.assembly.simulate.options import SimulateConfig, amount
from rlite.assembly.simulate.simulation import Step
from rlite.assembly.simulate.workload import fit_speed, overlaps, share_of_tokens
from rlite.errors import ConfigError, DataError
from tests.recorded_run import Shape, write_run

PAGE = Path(__file__).parents[4] / "docs" / "simulate.md"
DRAWN = ["lengths=constant:100", "seconds_per_token=0.01", "seconds_update=2"]
SIZES = ["train_data.prompts_per_rollout=4", "train_data.responses_per_prompt=2"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", Shape(steps=10, groups=6, samples=2, thoughts=1))


def answer(*arguments: str) -> dict:
    return simulate(config.load(SimulateConfig, [*arguments, "steps=40"]))


def test_example_of_the_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```bash\nrlite simulate (lengths.*?)```", PAGE.read_text(), re.DOTALL)
    assert blocks
    main([*blocks[0].replace("\\\n", " ").split(), f"out={tmp_path / 'answer.json'}"])
    assert "steps per hour" in capsys.readouterr().out
    assert json.loads((tmp_path / "answer.json").read_text())["steps_per_hour"] > 0


def test_trainer_that_is_slower_than_rollouts_never_waits_after_the_first_batch() -> None:
    found = answer(*DRAWN, *SIZES)
    assert found["steps_per_hour"] == pytest.approx(3600 / (2 + 1 / 40))
    assert found["trainer_waits"] == pytest.approx(1 / 81)
    assert found["staleness"] == {"0": 1 / 40, "1": 39 / 40}


def test_lost_replicas_slow_the_second_half() -> None:
    asked = [*DRAWN[:2], "seconds_update=0.1", *SIZES, "rollout_devices=4", "slowdown=1"]
    first, second = answer(*asked, "loss_of_replicas=50%")["steps_per_hour_by_half"]
    assert second < 0.7 * first


def test_failures_and_their_share_are_told() -> None:
    found = answer(*DRAWN, *SIZES, "failures=25%")
    assert found["lost"]["failed"] == pytest.approx(0.25, abs=0.08)


def test_run_is_simulated_with_its_own_settings_and_with_others(run: Path) -> None:
    own, faster = answer(f"run={run}"), answer(f"run={run}", "seconds_update=0.5x", "seconds_per_token=0.5x")
    assert 0 < own["steps_per_hour"] < faster["steps_per_hour"]
    assert set(own["staleness"]) <= {"0", "1"}
    slower = answer(f"run={run}", "rollout.max_head_offpolicyness=3", "seconds_update=2000")
    assert slower["trainer_waits"] < own["trainer_waits"]
    assert slower["rollouts_wait"] > own["rollouts_wait"]


def test_run_without_a_record_is_told_the_option_that_keeps_it(run: Path) -> None:
    shutil.rmtree(run / "record")
    with pytest.raises(DataError, match=r"no record of its rollouts .*sample, the default"):
        answer(f"run={run}")


def test_run_that_took_turns_is_refused(run: Path) -> None:
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["rollout"]["max_head_offpolicyness"] = 0
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    with pytest.raises(ConfigError, match=r"in turns \(rollout.max_head_offpolicyness=0\).*num_devices=2"):
        answer(f"run={run}")


def test_metrics_without_phases_are_refused(run: Path) -> None:
    (run / "metrics.jsonl").write_text('{"step": 1, "seconds": 3.0}\n')
    with pytest.raises(DataError, match="seconds_rollout, seconds_sync"):
        answer(f"run={run}")


def test_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected the folder of a run"):
        answer(f"run={tmp_path}")


def test_damaged_config_is_refused(run: Path) -> None:
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["rollout"]["stale_timeout"] = "soon"
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    with pytest.raises(ConfigError, match="stale_timeout"):
        answer(f"run={run}")


@pytest.mark.parametrize("text", ["two", "x", "lognormal:3", "cauchy:1,2", "-1", "nan", "1,2", ""])
def test_texts_that_mean_no_amount_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"lengths=.*lognormal:MEDIAN,SIGMA"):
        amount(text, "lengths")


def test_missing_distributions_are_named() -> None:
    with pytest.raises(ConfigError, match=r"seconds_update: needed without a run.*\n.*train_data"):
        answer(*DRAWN[:2])
    with pytest.raises(ConfigError, match="all 2 replicas would be lost"):
        answer(*DRAWN, *SIZES, "rollout_devices=2", "loss_of_replicas=90%")
    with pytest.raises(ConfigError, match="at most 100%"):
        answer(*DRAWN, *SIZES, "failures=120%")


def test_speed_of_a_replica_is_found_from_its_sequences() -> None:
    rng = random.Random(0)
    tokens = np.array([rng.lognormvariate(4, 0.7) for _ in range(2000)])
    beside = np.array([rng.uniform(1, 9) for _ in range(2000)])
    for token, start, slowdown in ((0.02, 0.0, 0.06), (0.02, 0.3, 0.06), (0.02, 0.3, 0.0), (0.001, 0.02, 1.0)):
        seconds = (token * tokens + start) * (1 + slowdown * (beside - 1))
        found = fit_speed(seconds, tokens, beside, [])
        many = (found.token * 50 + found.start) * (1 + found.slowdown * 7)
        assert many == pytest.approx((token * 50 + start) * (1 + slowdown * 7), rel=0.01)
        assert found.slowdown == pytest.approx(slowdown, rel=0.15)
        assert found.start == pytest.approx(start, rel=0.15, abs=1e-3)
    notes: list[str] = []
    assert fit_speed(0.02 * tokens, tokens, np.full(2000, 5.0), notes).slowdown == 0
    assert "slowdown=SHARE" in notes[0]


def test_learning_that_grows_with_tokens_is_found_beside_steps_that_others_slowed_down() -> None:
    rng = random.Random(0)
    tokens = [rng.uniform(500, 1500) for _ in range(30_000)]  # not all of their pairs fit into memory
    steps = [Step(1.0 + 0.003 * own + 20.0 * (rng.random() < 0.1), 0.0, 0.0, own) for own in tokens]
    assert share_of_tokens(steps) == pytest.approx(0.75, abs=0.05)
    assert share_of_tokens(steps[:60]) == pytest.approx(0.75, abs=0.05)
    assert share_of_tokens([step._replace(tokens=1000.0) for step in steps]) == 0.0


def test_times_or_lengths_of_zero_give_no_speed_of_zero() -> None:
    some, none = np.linspace(1, 9, 50), np.zeros(50)
    for seconds, tokens in ((none, some), (some, none), (none, none)):
        assert fit_speed(seconds, tokens, some, []).token > 0


def test_overlaps_count_each_span_itself() -> None:
    began, ended = np.array([0.0, 1.0, 4.0]), np.array([2.0, 3.0, 5.0])
    assert overlaps(began, ended) == pytest.approx([1.5, 1.5, 1.0])
