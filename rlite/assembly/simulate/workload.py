"""The workload of a simulation: what a run has recorded, or distributions alone, changed as the options say."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from rlite.assembly.simulate.options import MAX_SIZE, SimulateConfig, SimulatedData, SimulatedRollouts
from rlite.assembly.simulate.simulation import Sample, Step, Template, Workload
from rlite.config import Options
from rlite.errors import ConfigError, DataError
from rlite.rollout.collector.lost_groups import NOT_ACCEPTED, kind_of
from rlite.services.console.sinks import read_metrics
from rlite.services.record.files import BEYOND, TRAIN
from rlite.services.record.reader import RecordReader, read_part_aside
from rlite.yaml_texts import read_saved, shown

WARM_UP = 3
"""first steps of a run that are left out, if it has as many more"""
MIN_SPREAD = 0.05
"""relative spread of a number from which its effect is measured"""
BETTER = 0.9999
"""squared error of a law of generation, relative to that of a simpler one, below which it is chosen"""
MAX_PAIRED = 1000
"""steps of which all pairs are compared"""
PHASES = ("seconds", "seconds_rollout", "seconds_sync")
NUMBERS = ("reward", "prompt_tokens", "response_tokens", "version_min", "version_max", "ended", "seconds_generate")
RESTS = ("seconds_environment", "seconds_reward")
TRAINED = ("trained", "skipped")
SLOWDOWNS = [0.0, *np.geomspace(0.01, 10, 31).tolist()]
"""slowdowns that are tried; with more, a sequence's time is proportional to the number on its replica"""
NUM_DRAWN = 4096
"""groups and steps that are made of distributions"""
Rows = Mapping[str, np.ndarray]


class Speed(NamedTuple):
    """A sequence takes (token tokens + start) (1 + slowdown (n - 1)) seconds if its replica has n sequences.

    The start grows with n, too: prompts that come together are read together, and a request waits until the steps under
    way have ended.
    """

    token: float = 1.0
    """seconds of a token alone"""
    start: float = 0.0
    """seconds of a request beside its tokens, alone"""
    slowdown: float = 0.0


def read_run(folder: Path, notes: list[str]) -> tuple[dict[str, Any], Rows, list[dict[str, float]]]:
    """Return the config, the recorded rollouts and the metrics of a run. The folder may come from anyone.

    Args:
        folder: the run's folder.
        notes: takes what cannot be read.

    Raises:
        ConfigError: the folder is not of a run that ran ahead of training.
        DataError: the run has no record, or its metrics lack phases.
    """
    told = f"run={folder}"
    try:
        config, lines = read_saved(folder / "config.yaml"), read_metrics(folder / "metrics.jsonl")
    except OSError as error:
        expected = "expected the folder of a run of `rlite ppo` or `rlite grpo`"
        raise ConfigError(f"{told}: {error.strerror or error}: {error.filename}; {expected}") from error
    if not _group(config, "rollout").get("max_head_offpolicyness"):
        raise ConfigError(
            f"{told}: it generated and trained in turns (rollout.max_head_offpolicyness=0), so its record does not say "
            "how long each takes beside the other. Make a few steps with rollout.max_head_offpolicyness=1 "
            "num_devices=2 launcher=ray, or give distributions in place of a run"
        )
    metrics = [row for row in lines if all(0 <= row.get(name, math.nan) < BEYOND for name in PHASES)]
    if not metrics:
        raise DataError(
            f"{told}: no line of metrics.jsonl has the phases {', '.join(PHASES)}, which the trainers write. A trainer "
            'of your own times them with rlite.stats_tracker.record_timing("step"), ("rollout") and ("sync")'
        )
    reader = RecordReader(folder, read_part_aside)
    reader.refresh()
    table = reader.table(TRAIN)
    notes += [f"record/{name} {problem}" for name, problem in reader.problems.items()]
    if not len(table):
        amount = _group(config, "trainer").get("record")
        raise DataError(
            f"{told}: it has no record of its rollouts{': ' if notes else ''}{'; '.join(notes)} (trainer.record="
            f"{amount}; sample, the default, keeps what a simulation needs)"
        )
    rows = {name: table[name].to_numpy() for name in ("step", "group", "status", "reason")}
    rows |= {name: np.nan_to_num(table[name].to_numpy().astype(float)) for name in (*NUMBERS, *RESTS)}
    metrics = metrics[WARM_UP if len(metrics) >= 2 * WARM_UP else 0 :]
    chosen = (rows["ended"] > 0) & (rows["step"] >= metrics[0]["step"])
    return config, {name: column[chosen] for name, column in rows.items()}, metrics


def _group(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return found if isinstance(found := config.get(name), dict) else {}


def _devices(config: Mapping[str, Any], name: str) -> int | None:
    found = config.get("num_devices")
    if found is not None and (type(found) is not int or not 0 < found <= MAX_SIZE):
        raise ConfigError(f"config.yaml of the run: {name}={shown(found)}; expected up to {MAX_SIZE:,} devices")
    return found


def _merged(kind: type[Options], own: Mapping[str, Any], given: Options | None) -> dict[str, Any]:
    """Return the options of a run that a simulation knows, and in their place those that are given."""
    known = {name: value for name, value in own.items() if name in kind.model_fields and value is not None}
    return known | ({} if given is None else given.model_dump(include=given.model_fields_set))


def make_workload(options: SimulateConfig) -> Workload:
    """Return what a simulation with these options simulates.

    Raises:
        ConfigError: the run did not run ahead of training, or all replicas would be lost.
        DataError: the run's record or its metrics lack what a simulation needs.
    """
    rng, notes = random.Random(options.seed), list[str]()
    config: dict[str, Any] = {}
    templates, speed = [Template([Sample(1.0, 0.0, 1.0)])] * NUM_DRAWN, Speed()
    steps = [Step(0.0, 0.0, 0.0, 0.0)] * NUM_DRAWN
    if options.run is not None:
        config, rows, metrics = read_run(Path(options.run).expanduser(), notes)
    own = _group(config, "rollout")
    limits = SimulatedRollouts(**_merged(SimulatedRollouts, own, options.rollout))
    sizes = SimulatedData(**_merged(SimulatedData, _group(config, "train_data"), options.train_data))
    devices = _devices(own, "rollout.num_devices") or (_devices(config, "num_devices") or 2 * limits.tp_size) // 2
    if options.run is not None:
        syncing = fmean(row["seconds_sync"] for row in metrics)
        templates, speed = recorded_groups(rows, max(1, devices // limits.tp_size), syncing, notes)
        steps = recorded_steps(rows, metrics, notes)
    num_replicas = max(1, round(options.draw("rollout_devices")(rng, devices) / limits.tp_size))
    if num_replicas > MAX_SIZE:
        raise ConfigError(f"rollout_devices={options.rollout_devices}: expected up to {MAX_SIZE:,} replicas")
    if (num_lost := round(options.draw("loss_of_replicas")(rng, 0.0) * num_replicas)) >= num_replicas:
        raise ConfigError(f"loss_of_replicas={options.loss_of_replicas}: all {num_replicas} replicas would be lost")
    size, update, sync = sizes.responses_per_prompt, options.draw("seconds_update"), options.draw("seconds_sync")
    return Workload(
        templates=[_changed(template, options, size, speed, rng) for template in templates],
        steps=[each._replace(learn=update(rng, each.learn), sync=sync(rng, each.sync)) for each in steps],
        limits=limits,
        batch_size=sizes.prompts_per_rollout or max(1, len(templates) // len(steps)),
        num_replicas=num_replicas,
        num_lost=num_lost,
        slowdown=speed.slowdown if options.slowdown is None else options.slowdown,
        token_share=share_of_tokens(steps),
        notes=notes,
    )


def _changed(
    template: Template, options: SimulateConfig, size: int | None, speed: Speed, rng: random.Random
) -> Template:
    """Return a group with another size, other lengths, speeds and failures, as the options say."""
    samples, lengths, speeds = template.samples, options.draw("lengths"), options.draw("seconds_per_token")
    if size is not None and len(samples) != size:
        samples = rng.choices(samples, k=size)
    made = []
    for sample in samples:
        own = max(0.0, sample.work - speed.start) / speed.token
        tokens = lengths(rng, own)
        work = tokens * speeds(rng, speed.token) + speed.start
        made.append(Sample(work, sample.rest, max(0.0, sample.tokens + tokens - own)))
    loss, is_refused = template.loss, template.loss == NOT_ACCEPTED.reason
    chance = options.draw("failures")(rng, float(bool(loss) and not is_refused))
    return Template(made, loss if is_refused else (loss or "failed") if rng.random() < chance else "")


def recorded_groups(rows: Rows, num_replicas: int, syncing: float, notes: list[str]) -> tuple[list[Template], Speed]:
    """Return the groups with the seconds that they need alone, and the speed of their replicas.

    A group that was too old, or under way at the end, has not shown how long it takes. A group that took at least as
    long as it takes its place (the estimator of Kaplan and Meier).

    Args:
        rows: columns of the record.
        num_replicas: replicas on which the run generated.
        syncing: mean seconds of a weight sync, in which generation rests.
        notes: takes what could not be measured.

    Raises:
        DataError: no group has come to its end.
    """
    rest, tokens = rows[RESTS[0]] + rows[RESTS[1]], rows["response_tokens"]
    ended, seconds = rows["ended"] - rest, rows["seconds_generate"]
    beside = np.maximum(overlaps(ended - seconds, ended) / num_replicas, 1.0)
    seconds = np.maximum(seconds - np.maximum(rows["version_max"] - rows["version_min"], 0) * syncing, 0.1 * seconds)
    speed = fit_speed(seconds, tokens, beside, notes)
    works = seconds / (1 + speed.slowdown * (beside - 1))
    groups, found, cut = defaultdict[int, list[int]](list), list[Template](), list[int]()
    for place, number in enumerate(rows["group"].tolist()):
        groups[number].append(place)
    for _, places in sorted(groups.items()):  # in the order of their submission
        columns = (works[places], rest[places], (tokens + rows["prompt_tokens"])[places])
        samples = [Sample(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]
        status, rewards = rows["status"][places[0]], rows["reward"][places]
        is_refused = "filtered" in rows["status"] and len(places) > 1 and (rewards == rewards[0]).all()
        loss = "" if status in TRAINED else f"{status}: {kind_of(rows['reason'][places[0]])}"
        cut += [len(found)] if status in ("too_old", "aborted") else []
        found.append(Template(samples, NOT_ACCEPTED.reason if is_refused or status == "filtered" else loss))
    whole = sorted((found[n] for n in set(range(len(found))) - set(cut)), key=_longest)
    if not whole:
        raise DataError("no group of the record has come to its end: let the run make a few steps more")
    longest, rng = [_longest(group) for group in whole], random.Random(0)
    for place in cut:
        first = min(bisect_left(longest, _longest(found[place])), len(whole) - 1)
        found[place] = whole[rng.randrange(first, len(whole))]
    notes += [f"{len(cut)} of {len(found)} groups were cut off: others as long took their place"] if cut else []
    return found, speed


def _longest(group: Template) -> float:
    return max(sample.work + sample.rest for sample in group.samples)


def overlaps(began: np.ndarray, ended: np.ndarray) -> np.ndarray:
    """Return the mean number of spans that are open during each span, itself included.

    Args:
        began: begin of each span [N].
        ended: end of each span [N].
    """
    edges = [(np.sort(each), np.concatenate([[0.0], np.cumsum(np.sort(each))])) for each in (began, ended)]

    def opened(at: np.ndarray) -> np.ndarray:
        """Return the seconds in which spans were open before a time."""
        before = [(np.searchsorted(times, at), sums) for times, sums in edges]
        (num_began, begins), (num_ended, ends) = before
        return (num_began * at - begins[num_began]) - (num_ended * at - ends[num_ended])

    return (opened(ended) - opened(began)) / np.maximum(ended - began, 1e-9)


def fit_speed(seconds: np.ndarray, tokens: np.ndarray, beside: np.ndarray, notes: list[str]) -> Speed:
    """Return the speed of replicas by least squares: the simplest law that explains as much as the others.

    Args:
        seconds: of each sequence [N].
        tokens: of each sequence [N].
        beside: mean number of sequences on its replica meanwhile [N].
        notes: takes what could not be measured.
    """
    best, chosen, rounding = math.inf, Speed(), 1e-9 * float((seconds**2).sum())
    for slowdown in SLOWDOWNS:
        shares = 1 + slowdown * (beside - 1)
        columns = np.stack([tokens * shares, shares], 1)
        for used in (columns[:, :1], columns):
            found, *_ = np.linalg.lstsq(used, seconds, rcond=None)
            left = max(float(((seconds - used @ found) ** 2).sum()), rounding)
            if found[0] > 0 and min(found) >= 0 and left < BETTER * best:
                best, chosen = left, Speed(float(found[0]), float(found[1:].sum()), slowdown)
    if beside.std() < MIN_SPREAD * beside.mean():
        told = f"there were always about {beside.mean():.3g} sequences on a replica, so that their effect on each other"
        notes.append(f"{told} is not known well; slowdown=SHARE sets it")
    return chosen


def recorded_steps(rows: Rows, metrics: Sequence[Mapping[str, float]], notes: list[str]) -> list[Step]:
    """Return the steps of a run.

    The time between steps is in no metric. The first start of a group with version V is close to the end of step V.
    From one such time near the beginning to another one near the end, the steps take what their metrics say. The rest
    is between them.

    Args:
        rows: columns of the record.
        metrics: lines of metrics.jsonl.
        notes: takes what could not be measured.
    """
    starts, by_step = rows["ended"] - rows["seconds_generate"] - sum(rows[name] for name in RESTS), dict[int, Step]()
    tokens, is_trained = rows["prompt_tokens"] + rows["response_tokens"], np.isin(rows["status"].astype(str), TRAINED)
    for row in metrics:
        seconds, wait, sync = (row[name] for name in PHASES)
        own = float(tokens[is_trained & (rows["step"] == row["step"])].sum())
        by_step[int(row["step"])] = Step(max(0.0, seconds - wait - sync), sync, 0.0, own)
    ends = {version: starts[rows["version_min"] == version].min() for version in {*rows["version_min"]} & {*by_step}}
    between = 0.0
    if len(ends) > 1:
        first, last = min(ends), max(ends)
        inside = [row["seconds"] + row.get("seconds_evaluate", 0.0) for row in metrics if first < row["step"] <= last]
        between = max(0.0, float(ends[last] - ends[first] - sum(inside)) / (last - first))
    else:
        notes.append("the time between steps is unknown, and taken as 0")
    return [step._replace(between=between) for step in by_step.values()]


def share_of_tokens(steps: Sequence[Step]) -> float:
    """Return the share of the learning time that grows with the tokens of a batch; 0 if all batches have as many.

    It is the median slope of all pairs of steps (Theil and Sen): a step that other programs slow down does not turn it.
    """
    some = steps[:: -(-len(steps) // MAX_PAIRED)]
    tokens, seconds = np.array([step.tokens for step in some]), np.array([step.learn for step in some])
    first, second = np.triu_indices(len(some), 1)
    more = tokens[second] - tokens[first]
    apart = abs(more) > MIN_SPREAD * tokens.mean()
    if not apart.any() or np.median(seconds) <= 0:
        return 0.0
    slope = np.median((seconds[second] - seconds[first])[apart] / more[apart])
    return float(np.clip(slope * tokens.mean() / np.median(seconds), 0.0, 1.0))
