"""How well `rlite simulate` predicts real runs from the record of a run with other settings.

    python -m benchmarks.simulator [--steps 60] [--grpo-steps 30] [--repeats 3] [--without-grpo]

Two kinds of runs are made, each with a record, metrics and a config as the trainers write them:

- *scripted*: the real collector, router and record. Replicas sleep for each part of an answer, longer if they have more
  sequences, and the trainer sleeps for a constant and for each token of its batch. Two cores can do this in real time.
- *grpo*: `rlite grpo` under torchrun with a tiny model, whose answers end at random. Generation and training have a
  core each.

Of each kind, one run is the source. All others differ from it in staleness, concurrency, replicas, lengths, batch or
on_stale, and are predicted from the source's folder alone. Printed are steps per hour (after WARM_UP steps) and shares
of staleness, measured and predicted, and how much repeated real runs of the same settings differ. The exit status is 1
if the median error of steps per hour is above 5 %, the largest above 15 %, or a share is off by more than 2 points.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from benchmarks.model import build_model
from rlite import config
from rlite.assembly.observers import RunRecord
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.assembly.simulate.options import SimulateConfig
from rlite.assembly.simulate.simulation import Simulation
from rlite.assembly.simulate.workload import make_workload
from rlite.observability import stats_tracker
from rlite.rollout import (
    CollectorOptions,
    GenerationHyperparameters,
    LLMRequest,
    RolloutCollector,
    RolloutWorkflow,
    trajectory,
)
from rlite.runtime.replicas.replica import InFlightRequest, InFlightTable
from rlite.runtime.replicas.router import Router
from rlite.runtime.replicas.serving import complete
from rlite.trainer.options import RecordOptions
from rlite.types import LLMResponse, SequenceRequest, TokenChunk
from tests.recorded import recorded

WARM_UP = 3
"""first steps that are not measured"""
SEEDS = 20
"""simulations whose mean is compared"""
MAX_MEDIAN, MAX_ERROR, MAX_POINTS = 0.05, 0.15, 0.02
SECONDS_PER_TOKEN, SLOWDOWN = 0.004, 0.06
"""of the scripted replicas"""
LEARN, LEARN_PER_TOKEN, SYNC = 0.10, 0.00015, 0.03
"""seconds of the scripted trainer"""
NUM_PARTS = 7
"""parts of a scripted answer, each with one sleep"""

SCRIPTED: Mapping[str, tuple[dict[str, Any], list[str]]] = {
    "source": ({}, []),
    "staleness 2": ({"eta": 2}, ["rollout.max_head_offpolicyness=2"]),
    "staleness 4, 20 groups": (
        {"eta": 4, "concurrent": 20},
        ["rollout.max_head_offpolicyness=4", "rollout.max_concurrent_rollouts=20"],
    ),
    "staleness 2, 16 groups": (
        {"eta": 2, "concurrent": 16},
        ["rollout.max_head_offpolicyness=2", "rollout.max_concurrent_rollouts=16"],
    ),
    "4 groups": ({"concurrent": 4}, ["rollout.max_concurrent_rollouts=4"]),
    "1 replica": ({"replicas": 1}, ["rollout_devices=0.5x"]),
    "4 replicas": ({"replicas": 4}, ["rollout_devices=2x"]),
    "4 replicas, staleness 3, 24 groups": (
        {"replicas": 4, "eta": 3, "concurrent": 24},
        ["rollout_devices=2x", "rollout.max_head_offpolicyness=3", "rollout.max_concurrent_rollouts=24"],
    ),
    "lengths 2x": ({"lengths": 2.0}, ["lengths=2x"]),
    "lengths 0.5x": ({"lengths": 0.5}, ["lengths=0.5x"]),
    "batches of 4": ({"size": 4}, ["train_data.prompts_per_rollout=4"]),
    "on_stale=drop": ({"on_stale": "drop"}, ["rollout.on_stale=drop"]),
}
"""settings of the scripted runs, and the options that ask for them"""
GRPO: Mapping[str, tuple[list[str], list[str]]] = {
    "source": ([], []),
    "staleness 3, 12 groups": (
        ["rollout.max_head_offpolicyness=3", "rollout.max_concurrent_rollouts=12"],
        ["rollout.max_head_offpolicyness=3", "rollout.max_concurrent_rollouts=12"],
    ),
    "lengths 2x": (["actor.model_name={0}/longer", "rollout.train_sampling_params.max_new_tokens=192"], ["lengths=2x"]),
    "batches of 4": (["train_data.prompts_per_rollout=4"], ["train_data.prompts_per_rollout=4"]),
    "2 groups": (["rollout.max_concurrent_rollouts=2"], ["rollout.max_concurrent_rollouts=2"]),
}
"""options of the runs of `rlite grpo`, in which {0} is the folder of the models, and those of the simulation"""
STOP = 0.03
"""chance that an answer of the runs of `rlite grpo` ends at a token. The record of a run whose answers had one length,
and which always had the same number of them in flight, would not say what fewer at once would gain."""
OWN_CODE = """
import time
from rlite.trainer.callbacks import Callback, register_callback

def even(prompt, completions, prompt_ids, completion_ids, **row):
    return sum(token % 2 == 0 for token in completion_ids) / max(len(completion_ids), 1)

@register_callback("clock")
class Clock(Callback):
    def on_step(self, run, metrics):
        with open(run.folder / "clock.txt", "a") as file:
            file.write(f"{time.monotonic()}\\n")
"""


# -- scripted runs ---------------------------------------------------------------------------------------------------


class SleepingReplica:
    """Sleeps for the parts of each answer: the longer, the more sequences it has."""

    def __init__(self, index: int, engine: SleepingEngine) -> None:
        self.workers, self._engine, self._table = SimpleNamespace(index=index), engine, InFlightTable()
        self.failure = None

    def check(self) -> None:
        """Nothing fails."""

    def submit(self, requests: Sequence[InFlightRequest]) -> bool:
        """Start requests."""
        self._table.add(requests)
        for request in requests:
            self._engine.tasks.add(task := asyncio.get_running_loop().create_task(self._make(request)))
            task.add_done_callback(self._engine.tasks.discard)
        return True

    def cancel(self, numbers: Any) -> None:
        """End requests at their next part."""
        self._table.cancel(numbers)

    async def _make(self, request: InFlightRequest) -> None:
        number, num_tokens = request.request.request_id, request.request.gconfig.max_new_tokens
        # the first token is a part of its own, because the version of a group is that of its first token
        parts = min(NUM_PARTS, num_tokens)
        for part in range(parts):
            bounds = [(num_tokens - 1) * place // max(parts - 1, 1) for place in (part - 1, part)]
            count = bounds[1] - bounds[0] if part else 1
            left = count * SECONDS_PER_TOKEN
            while left > 0:
                began = time.monotonic()
                slowdown = 1 + SLOWDOWN * (len(self._table) - 1)
                await asyncio.sleep(left * slowdown)
                rested = self._engine.rested_since(began)
                left -= (time.monotonic() - began - rested) / slowdown if rested else left
            reason = "abort" if request.is_cancelled else "stop" if part == parts - 1 else None
            logprobs = [-1.0] * count
            chunk = TokenChunk(
                request_id=number,
                version=self._engine.get_version(),
                token_ids=[5] * count,
                logprobs=logprobs,
                sampling_logprobs=logprobs,
                finish_reason=reason,
            )
            self._table.take([chunk])
            if reason is not None:
                return


class SleepingEngine:
    """The production router over sleeping replicas."""

    seed = None

    def __init__(self, num_replicas: int) -> None:
        self.router, self._version, self._number = Router("sleeping"), 0, 0
        self._replicas: Any = SimpleNamespace(name="sleeping", router=self.router, note_truncation=lambda each: None)
        self.tokenizer = byte_tokenizer()
        self.tasks: set[asyncio.Task[None]] = set()
        self._rests: list[tuple[float, float]] = []
        self.collector: Any = None
        for index in range(num_replicas):
            replica: Any = SleepingReplica(index, self)
            self.router.add(replica)

    async def agenerate(self, request: LLMRequest, on_chunk: Any = None) -> LLMResponse:
        """Complete a request as the engines do."""
        self._number += 1
        asked = SequenceRequest(
            request_id=self._number, input_ids=request.input_ids, gconfig=request.gconfig, seed=0, extras=()
        )
        flight = InFlightRequest(asked, on_chunk)
        await complete(self._replicas, flight, request.rid)
        return flight.response(request)

    def rested_since(self, moment: float) -> float:
        """Seconds of rest after a time."""
        return sum(max(0.0, end - max(begin, moment)) for begin, end in self._rests[-4:])

    def get_version(self) -> int:
        """Return the policy version."""
        return self._version

    def sync(self, seconds: float) -> None:
        """Rest, and get the next version."""
        began = time.monotonic()
        self._rests.append((began, began + seconds))
        time.sleep(seconds)
        self._version += 1
        self.collector.version_changed()

    def pause(self) -> None:
        """Never called here."""

    resume = pause


class OneAnswer(RolloutWorkflow):
    """Asks once, for as many tokens as the item's sample gets."""

    def __init__(self, lengths: float) -> None:
        self._lengths, self._draw = lengths, random.Random(0)

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        num = max(1, round(self._lengths * min(self._draw.lognormvariate(3.4, 0.5), 200.0)))
        gconfig = GenerationHyperparameters(max_new_tokens=num)
        return trajectory(await engine.agenerate(LLMRequest(input_ids=[1, 2, 3], gconfig=gconfig)), reward=1.0)


def scripted(
    folder: Path,
    steps: int,
    eta: int = 1,
    concurrent: int = 8,
    replicas: int = 2,
    lengths: float = 1.0,
    size: int = 8,
    on_stale: Any = "wait",
) -> list[float]:
    """Make a scripted run in a folder; returns the time of the end of each step."""
    folder.mkdir(parents=True)
    limits = {"max_head_offpolicyness": eta, "max_concurrent_rollouts": concurrent, "on_stale": on_stale}
    rollout = {**limits, "num_devices": replicas, "tp_size": 1}
    sizes = {"prompts_per_rollout": size, "responses_per_prompt": 2}
    saved = {"rollout": rollout, "train_data": sizes, "trainer": {"record": "sample"}, "num_devices": replicas + 1}
    (folder / "config.yaml").write_text(yaml.safe_dump(saved))
    engine: Any = SleepingEngine(replicas)
    engine.collector = collector = RolloutCollector(engine, CollectorOptions(**limits, keep_ended=True))
    run: Any = SimpleNamespace(folder=folder, step=0, is_interrupted=False, console=SimpleNamespace())
    record = RunRecord(RecordOptions(), run, engine, is_filtering=False)
    record.begin()
    workflow, ends = OneAnswer(lengths), []
    items: Iterator[list[dict[str, int]]] = ([{"place": step}] * size for step in range(1 << 30))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            began = time.monotonic()
            batch = collector.prepare_batch(items, workflow, group_size=2)
            taken = time.monotonic()
            time.sleep(LEARN + LEARN_PER_TOKEN * int(batch["attention_mask"].sum()))
            learnt = time.monotonic()
            engine.sync(SYNC)
            synced = time.monotonic()
            seconds = {"seconds": synced - began, "seconds_rollout": taken - began, "seconds_sync": synced - learnt}
            run.step = step
            record.step(batch)
            file.write(json.dumps({"step": step, **seconds, "seconds_update": learnt - taken}) + "\n")
            ends.append(time.monotonic())
    record.close(run, None)
    collector.close()
    stats_tracker.export()
    return ends


# -- runs of rlite grpo ----------------------------------------------------------------------------------------------


def grpo(folder: Path, steps: int, scratch: Path, options: Sequence[str]) -> list[float]:
    """Make a run of `rlite grpo` in a folder; returns the time of the end of each step."""
    given = [
        *("--import", str(scratch / "own_code.py"), "trainer.callbacks=[clock]"),
        *(f"actor.model_name={scratch / 'model'}", "actor.lr=0", f"train_data.path={scratch / 'prompts.jsonl'}"),
        *("train_data.prompts_per_rollout=8", "train_data.responses_per_prompt=2", "reward.in_process=true"),
        *(f"reward.path={scratch / 'own_code.py'}:even", "rollout.max_model_len=256", "rollout.max_num_seqs=64"),
        *("rollout.dynamic_filtering=false", "rollout.train_sampling_params.max_new_tokens=96"),
        *("rollout.max_head_offpolicyness=1", f"trainer.total_steps={steps}", f"trainer.save_freq={10 * steps}"),
        *(f"trainer.save_dir={folder}", *(option.format(scratch) for option in options)),
    ]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "--no-python"]
    done = subprocess.run(
        [*launch, sys.executable, "-m", "rlite.cli", "grpo", *given],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(
            f"rlite grpo {' '.join(given)}: exit status {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        )
    return [float(line) for line in (folder / "clock.txt").read_text().split()]


def prepare(scratch: Path) -> None:
    """Write the models, the prompts and the own code of the runs of `rlite grpo`."""
    model = build_model(scratch / "model", width=128, layers=2, stop_probability=STOP)
    build_model(scratch / "longer", width=128, layers=2, stop_probability=STOP / 2)
    prompts = json.loads((model / "prompts.json").read_text())
    texts = ["".join(chr(33 + token) for token in prompt) for prompt in prompts]
    (scratch / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    (scratch / "own_code.py").write_text(OWN_CODE)


# -- comparison ------------------------------------------------------------------------------------------------------


def measured(folder: Path, ends: Sequence[float]) -> dict[str, Any]:
    """Steps per hour and shares of staleness of a run."""
    rows = [row for row in recorded(folder) if row["status"] == "trained" and row["step"] > WARM_UP]
    ages = Counter(str(row["step"] - 1 - row["version_min"]) for row in rows)
    lost = Counter(row["status"] for row in recorded(folder) if row["status"] not in ("trained", "aborted"))
    rate = 3600 * (len(ends) - WARM_UP) / (ends[-1] - ends[WARM_UP - 1])
    return {
        "steps_per_hour": rate,
        "staleness": {age: number / ages.total() for age, number in sorted(ages.items())},
        "lost": dict(lost),
    }


def predicted(source: Path, asked: Sequence[str], steps: int) -> dict[str, Any]:
    """What `rlite simulate` finds after as many first steps as are left out in the real run, over SEEDS seeds."""
    options = config.load(SimulateConfig, [f"run={source}", *asked])
    workload, seconds, ages = make_workload(options), 0.0, Counter[int]()
    for seed in range(SEEDS):
        made = Simulation(workload, seed)
        made.run(WARM_UP)
        began, before = made.now, made.staleness.copy()
        made.run(steps - WARM_UP)
        seconds += made.now - began
        ages += made.staleness - before
    return {
        "steps_per_hour": 3600 * SEEDS * (steps - WARM_UP) / seconds,
        "staleness": {str(age): number / ages.total() for age, number in sorted(ages.items())},
        "slowdown": workload.slowdown,
        "notes": workload.notes,
    }


def compared(real: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[float, float]:
    """Relative error of steps per hour, and the largest difference of a share of staleness."""
    ages = real["staleness"].keys() | found["staleness"].keys()
    points = max(abs(real["staleness"].get(age, 0.0) - found["staleness"].get(age, 0.0)) for age in ages)
    return found["steps_per_hour"] / real["steps_per_hour"] - 1, points


def quiet() -> None:
    """Wait while another program measures on this machine, if it says so."""
    while (path := os.environ.get("RLITE_QUIET_FILE")) and Path(path).exists():
        time.sleep(5)


def main() -> None:
    """Make the runs, predict them, and print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="of a scripted run")
    parser.add_argument("--grpo-steps", type=int, default=60, help="of a run of rlite grpo")
    parser.add_argument("--repeats", type=int, default=3, help="runs of the source, whose spread is printed")
    parser.add_argument("--without-grpo", action="store_true", help="make scripted runs alone")
    parser.add_argument("--without-scripted", action="store_true", help="make runs of rlite grpo alone")
    args = parser.parse_args()
    errors: list[float] = []
    points: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        at = Path(scratch)
        prepare(at)
        kinds: dict[str, Any] = {} if args.without_scripted else {"scripted": SCRIPTED}
        kinds |= {} if args.without_grpo else {"grpo": GRPO}
        for kind, runs in kinds.items():
            for name, (settings, asked) in runs.items():
                rates = []
                for repeat in range(args.repeats if name == "source" else 1):
                    quiet()
                    folder = at / kind / f"{name.replace(' ', '-').replace(',', '')}-{repeat}"
                    if kind == "scripted":
                        ends = scripted(folder, args.steps, **settings)
                    else:
                        ends = grpo(folder, args.grpo_steps, at, settings)
                    real = measured(folder, ends)
                    rates.append(real["steps_per_hour"])
                if name == "source":
                    source = folder
                    spread = (max(rates) - min(rates)) / statistics.fmean(rates)
                    print(f"{kind}: {len(rates)} runs of the source: spread of steps per hour {spread:.1%}", flush=True)
                found = predicted(source, asked, len(ends))
                error, off = compared(real, found)
                if name != "source":
                    errors.append(error)
                    points.append(off)
                shares = " ".join(
                    f"{a}:{real['staleness'].get(a, 0):.1%}/{s:.1%}" for a, s in found["staleness"].items()
                )
                rate = found["steps_per_hour"]
                print(
                    f"{kind:9} {name:36} {rates[-1]:8.0f} steps/h, simulated {rate:8.0f} "
                    f"({error:+.1%}); staleness {shares} (off by {100 * off:.1f} points); lost {real['lost']}",
                    flush=True,
                )
                if name == "source" or abs(error) > MAX_MEDIAN:
                    print(f"          slowdown {found['slowdown']:.3f}, notes: {found['notes']}", flush=True)
    sizes = sorted(abs(error) for error in errors)
    print(
        f"{len(errors)} runs predicted: median error {statistics.median(sizes):.1%}, largest {sizes[-1]:.1%}; "
        f"staleness off by at most {100 * max(points):.1f} points, "
        f"{sum(each <= MAX_POINTS for each in points)} runs within 2"
    )
    is_right = statistics.median(sizes) <= MAX_MEDIAN and sizes[-1] <= MAX_ERROR and max(points) <= MAX_POINTS
    raise SystemExit(0 if is_right else "not as asked")


if __name__ == "__main__":
    main()
