"""The workload of a simulation: what a run has recorded, or distributions alone, changed as the options say."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from rlite.assembly.simulate.options import SimulateConfig, SimulatedData, SimulatedRollouts
from rlite.assembly.simulate.simulation import Sample, Step, Template, Workload
from rlite.config import Options
from rlite.errors import ConfigError, DataError
from rlite.rollout.collector.lost_groups import NOT_ACCEPTED, kind_of
from rlite.runtime.sandbox.pool import close_shared_pool
from rlite.services.console.sinks import read_metrics
from rlite.services.record.files import TRAIN
from rlite.services.record.reader import RecordReader, read_part_aside
from rlite.yaml_texts import read_saved

WARM_UP = 2
"""first steps of a run whose times are left out, if it has as many more"""
WAITED = 0.01
"""seconds of a wait from which the last answer before a batch tells when the batch was taken"""
MIN_SPREAD = 0.05
"""relative spread of the number of sequences on a replica from which its effect is measured"""
PHASES = ("seconds", "seconds_rollout", "seconds_sync")
NUMBERS = ("reward", "prompt_tokens", "response_tokens", "version_min", "version_max", "ended", "seconds_generate")
RESTS = ("seconds_environment", "seconds_reward")
NUM_DRAWN = 4096
"""groups and steps that are made of distributions"""
Rows = Mapping[str, np.ndarray]


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
    reader = RecordReader(folder, read_part_aside)
    try:
        reader.refresh()
        table = reader.table(TRAIN)
    finally:
        close_shared_pool()
    notes += [f"record/{name} {problem}" for name, problem in reader.problems.items()]
    if not len(table):
        amount = _group(config, "trainer").get("record")
        raise DataError(
            f"{told}: it has no record of its rollouts{': ' if notes else ''}{'; '.join(notes)} (trainer.record="
            f"{amount}; sample, the default, keeps what a simulation needs)"
        )
    rows = {name: table[name].to_numpy() for name in ("step", "group", "status", "reason")}
    rows |= {name: np.nan_to_num(table[name].to_numpy().astype(float)) for name in (*NUMBERS, *RESTS)}
    metrics = [row for row in lines if all(0 <= row.get(name, math.nan) < math.inf for name in PHASES)]
    if not metrics:
        raise DataError(
            f"{told}: no line of metrics.jsonl has the phases {', '.join(PHASES)}, which the trainers write. A trainer "
            'of your own times them with rlite.stats_tracker.record_timing("step"), ("rollout") and ("sync")'
        )
    return config, {n: column[rows["ended"] > 0] for n, column in rows.items()}, metrics[_warm_up(metrics) :]


def _warm_up(metrics: Sequence[object]) -> int:
    return WARM_UP if len(metrics) >= 2 * WARM_UP else 0


def _group(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return found if isinstance(found := config.get(name), dict) else {}


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
    templates, alone, slowdown = [Template([Sample(1.0, 0.0, 1.0)])] * NUM_DRAWN, 1.0, 0.0
    steps = [Step(0.0, 0.0, 0.0, 0.0)] * NUM_DRAWN
    if options.run is not None:
        config, rows, metrics = read_run(Path(options.run).expanduser(), notes)
    own = _group(config, "rollout")
    limits = SimulatedRollouts(**_merged(SimulatedRollouts, own, options.rollout))
    sizes = SimulatedData(**_merged(SimulatedData, _group(config, "train_data"), options.train_data))
    devices = own.get("num_devices") or (config.get("num_devices") or 2 * limits.tp_size) // 2
    if options.run is not None:
        syncing = fmean(row["seconds_sync"] for row in metrics)
        templates, alone, slowdown = recorded_groups(rows, max(1, devices // limits.tp_size), syncing, notes)
        steps = recorded_steps(rows, metrics, notes)
    num_replicas = max(1, round(options.draw("rollout_devices")(rng, devices) / limits.tp_size))
    if (num_lost := round(options.draw("loss_of_replicas")(rng, 0.0) * num_replicas)) >= num_replicas:
        raise ConfigError(f"loss_of_replicas={options.loss_of_replicas}: all {num_replicas} replicas would be lost")
    size, update, sync = sizes.responses_per_prompt, options.draw("seconds_update"), options.draw("seconds_sync")
    return Workload(
        templates=[_changed(template, options, size, alone, rng) for template in templates],
        steps=[each._replace(learn=update(rng, each.learn), sync=sync(rng, each.sync)) for each in steps],
        limits=limits,
        batch_size=sizes.prompts_per_rollout or max(1, len(templates) // len(steps)),
        num_replicas=num_replicas,
        num_lost=num_lost,
        slowdown=slowdown if options.slowdown is None else options.slowdown,
        token_share=share_of_tokens(steps),
        notes=notes,
    )


def _changed(
    template: Template, options: SimulateConfig, size: int | None, alone: float, rng: random.Random
) -> Template:
    """Return a group with another size, other lengths, speeds and failures, as the options say."""
    samples, lengths, speeds = template.samples, options.draw("lengths"), options.draw("seconds_per_token")
    if size is not None and len(samples) != size:
        samples = rng.choices(samples, k=size)
    made = []
    for sample in samples:
        tokens = lengths(rng, own := sample.work / alone)
        made.append(Sample(tokens * speeds(rng, alone), sample.rest, max(0.0, sample.tokens + tokens - own)))
    loss, is_refused = template.loss, template.loss == NOT_ACCEPTED.reason
    chance = options.draw("failures")(rng, float(bool(loss) and not is_refused))
    return Template(made, loss if is_refused else (loss or "failed") if rng.random() < chance else "")


def recorded_groups(
    rows: Rows, num_replicas: int, syncing: float, notes: list[str]
) -> tuple[list[Template], float, float]:
    """Return the groups with the seconds that they need alone, seconds of a token alone, and the slowdown.

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
    rest, tokens = sum(rows[name] for name in RESTS), rows["response_tokens"]
    ended, seconds = rows["ended"] - rest, rows["seconds_generate"]
    beside = np.maximum(overlaps(ended - seconds, ended) / num_replicas, 1.0)
    seconds = np.maximum(seconds - np.maximum(rows["version_max"] - rows["version_min"], 0) * syncing, 0.1 * seconds)
    alone, slowdown, constant = fit_speed(seconds, tokens, beside, notes)
    rest, works = rest + constant, np.maximum(seconds - constant, 0.0) / (1 + slowdown * (beside - 1))
    groups, whole, cut = defaultdict[int, list[int]](list), list[Template](), list[Template]()
    for place, number in enumerate(rows["group"].tolist()):
        groups[number].append(place)
    for places in groups.values():
        columns = (works[places], rest[places], (tokens + rows["prompt_tokens"])[places])
        samples = [Sample(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]
        status, rewards = rows["status"][places[0]], rows["reward"][places]
        is_refused = "filtered" in rows["status"] and len(places) > 1 and (rewards == rewards[0]).all()
        loss = "" if status in ("trained", "skipped") else f"{status}: {kind_of(rows['reason'][places[0]])}"
        template = Template(samples, NOT_ACCEPTED.reason if is_refused or status == "filtered" else loss)
        (cut if status in ("too_old", "aborted") else whole).append(template)
    if not whole:
        raise DataError("no group of the record has come to its end: let the run make a few steps more")
    whole.sort(key=_longest)
    longest, rng = [_longest(group) for group in whole], random.Random(0)
    first = [min(bisect_left(longest, _longest(group)), len(whole) - 1) for group in cut]
    notes += [f"{len(cut)} of {len(groups)} groups were cut off: others as long took their place"] if cut else []
    return whole + [whole[rng.randrange(place, len(whole))] for place in first], alone, slowdown


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


def fit_speed(
    seconds: np.ndarray, tokens: np.ndarray, beside: np.ndarray, notes: list[str]
) -> tuple[float, float, float]:
    """Return a, b and c by least squares: seconds = a tokens (1 + b (n - 1)) + c for n sequences on the replica.

    Args:
        seconds: of each sequence [N].
        tokens: of each sequence [N].
        beside: mean number of sequences on its replica meanwhile [N].
        notes: takes what could not be measured.
    """
    columns, used = np.stack([tokens, tokens * (beside - 1), np.ones_like(tokens)], 1), [0, 1, 2]
    if beside.std() < MIN_SPREAD * beside.mean():
        told = f"there were always about {beside.mean():.3g} sequences on a replica, so that their effect on each other"
        notes.append(f"{told} is unknown, and taken as none; slowdown=SHARE sets it")
        used.remove(1)
    if tokens.std() < MIN_SPREAD * tokens.mean():
        used.remove(2)
    found, weights = np.zeros(3), 1 / np.sqrt(np.maximum(tokens, 1.0))[:, None]
    while True:
        fitted, *_ = np.linalg.lstsq(columns[:, used] * weights, seconds * weights[:, 0], rcond=None)
        if min(fitted) >= 0 or len(used) == 1:
            break
        del used[int(fitted.argmin())]
    found[used] = np.maximum(fitted, 0.0)
    a, b, c = found.tolist()
    return (a, b / a, c) if a else (b or 1.0, 1.0, c)


def recorded_steps(rows: Rows, metrics: Sequence[Mapping[str, float]], notes: list[str]) -> list[Step]:
    """Return the steps of a run. The time between steps is measured where the trainer waited for two batches.

    Args:
        rows: columns of the record.
        metrics: lines of metrics.jsonl.
        notes: takes what could not be measured.
    """
    steps, taken, waits, gaps = dict[float, Step](), dict[float, float](), dict[float, float](), list[float]()
    is_trained = np.isin(rows["status"].astype(str), ("trained", "skipped"))
    for row in metrics:
        own, step = is_trained & (rows["step"] == row["step"]), row["step"]
        seconds, waits[step], sync = (row[name] for name in PHASES)
        tokens = float((rows["prompt_tokens"] + rows["response_tokens"])[own].sum())
        steps[step] = Step(max(0.0, seconds - waits[step] - sync), sync, 0.0, tokens)
        if waits[step] > WAITED and own.any():
            taken[step] = float(rows["ended"][own].max())
    for step in taken.keys() & {step - 1 for step in taken}:
        gaps.append(taken[step + 1] - taken[step] - waits[step + 1] - steps[step].learn - steps[step].sync)
    notes += [] if gaps else ["the time between steps is unknown, as the trainer never waited twice: taken as 0"]
    return [step._replace(between=max(0.0, median(gaps or [0.0]))) for step in steps.values()]


def share_of_tokens(steps: Sequence[Step]) -> float:
    """Return the share of the learning time that grows with the tokens of a batch, by least squares."""
    tokens, seconds = np.array([step.tokens for step in steps]), np.array([step.learn for step in steps])
    if tokens.std() == 0 or seconds.mean() == 0:
        return 0.0
    return float(np.clip(np.polyfit(tokens, seconds, 1)[0] * tokens.mean() / seconds.mean(), 0.0, 1.0))
