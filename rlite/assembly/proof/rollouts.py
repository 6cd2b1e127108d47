"""Checks of the record of rollouts: rows against rows, rows against tokens, and tokens against each other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlite.assembly.proof.report import Report
from rlite.batch import NAMED_REWARD
from rlite.services.record.batches import read_value
from rlite.services.record.files import STATUSES
from rlite.services.record.recorder import TokenTexts, as_array, segments_of
from rlite.trainer.rl.options import PpoConfig
from rlite.trainer.rl.rollouts import SAID_ONCE

Row = Mapping[str, Any]
Check = tuple[str, bool, str]
"""name of a check, True if it holds, and a text about the contradiction if it does not"""
IN_BATCH = ("trained", "skipped")
LEDGER, ROWS, TOKENS = "fates of rollouts", "rows of rollouts", "sequences of tokens"
STALENESS = "staleness of tokens"


def place_of(row: Row) -> str:
    """Return the place of a row in words."""
    return f"record, step {row['step']}, group {row['group']}, sample {row['sample']}"


class RolloutChecks:
    """Checks recorded rollouts: rows of training step by step, and sequences of tokens.

    `texts`: decodes tokens; None if there is no tokenizer. `vocabulary`: size of the model's vocabulary; None if it is
    not known.
    """

    def __init__(self, report: Report, texts: TokenTexts | None, vocabulary: int | None) -> None:
        self._report, self._texts, self._vocabulary = report, texts, vocabulary
        self._step_of: dict[tuple[int, int], int] = {}

    def rows(self, step: int, rows: Sequence[Row], options: PpoConfig, max_staleness: int) -> None:
        """Check the rows of one step: each rollout has one fate, and whole groups were trained on."""
        weights = {name or "reward": reward.weight for name, reward in options.reward.items()}
        groups: dict[int, list[Row]] = {}
        for row in rows:
            groups.setdefault(row["group"], []).append(row)
            self._take(place_of(row), self._of_row(step, row, max_staleness))
            self._take(place_of(row), _of_parts(row, weights if len(weights) > 1 else {}))
        for group, own in groups.items():
            self._take(f"record, step {step}, group {group}", _of_group(own, options.responses_per_prompt))
        self._take(f"record, step {step}", _of_step(rows, options.train_data.prompts_per_rollout))

    def tokens(self, row: Row, sequences: Sequence[Row]) -> None:
        """Check the sequences of one rollout against its row, and against each other."""
        if sequences := sorted(sequences, key=lambda sequence: sequence["sequence"]):
            for sequence in sequences:
                self._take(f"{place_of(row)}, sequence {sequence['sequence']}", self._of_sequence(sequence))
            self._take(place_of(row), self._of_sequences(row, sequences))

    def _take(self, place: str, checks: Iterator[Check]) -> None:
        for check, holds, told in checks:
            self._report.expect(holds, check, place, told)

    def _of_row(self, step: int, row: Row, max_staleness: int) -> Iterator[Check]:
        before, status = self._step_of.setdefault((row["group"], row["sample"]), step), row["status"]
        is_in_batch, oldest, newest = status in IN_BATCH, row["version_min"], row["version_max"]
        yield LEDGER, before == step, f"the same rollout has a row in step {before}: it was consumed twice"
        yield LEDGER, status in STATUSES, f"status {status!r} is none of the fates"
        yield LEDGER, not (status == "trained" and row["reason"]), "trained, and not, with a reason"
        yield LEDGER, is_in_batch or row["advantage"] is None, f"{status}, and it has an advantage"
        yield ROWS, not is_in_batch or row["reward"] is not None, "in the batch without a reward"
        if oldest is not None and newest is not None:
            age = step - 1 - oldest
            yield STALENESS, oldest <= newest, f"oldest policy version {oldest}, newest {newest}"
            yield STALENESS, newest < step, f"policy version {newest} in step {step}, which made version {step}"
            is_fresh = not is_in_batch or age <= max_staleness
            yield STALENESS, is_fresh, f"{age} updates old; the bound is {max_staleness}"

    def _of_sequence(self, sequence: Row) -> Iterator[Check]:
        ids = sequence["ids"]
        lists = {name: value for name, value in sequence.items() if isinstance(value, list) and name != "others"}
        odd = {name: len(value) for name, value in lists.items() if len(value) != len(ids)}
        yield TOKENS, not odd, f"{len(ids)} tokens, and values of {odd}"
        beyond = [place for place, token in enumerate(ids) if not 0 <= token < (self._vocabulary or math.inf)]
        yield TOKENS, not beyond, f"tokens {beyond[:5]} have ids that are not in the vocabulary of {self._vocabulary}"
        if odd or beyond:
            return
        mask, versions = np.asarray(sequence["mask"], dtype=bool), np.asarray(sequence["versions"], dtype=np.int64)
        yield TOKENS, bool((versions[mask] >= 0).all()), "a token to train on has no policy version"
        if sequence["logprobs"] is not None:
            logprobs = np.asarray(sequence["logprobs"], dtype=np.float64)
            yield TOKENS, bool((logprobs <= 1e-4).all()), "the engine's log-probability of a token is above 0"
            is_unread = not logprobs[~mask & (versions < 0)].any()
            yield TOKENS, is_unread, "a token that the model has not written has a log-probability of the engine"
        if self._texts is not None:
            text, offsets = self._texts.decode(ids)
            yield TOKENS, text == sequence["text"], "its text is not that of its tokens"
            yield TOKENS, offsets == sequence["offsets"], "places of its tokens are not those in its text"

    def _of_sequences(self, row: Row, sequences: Sequence[Row]) -> Iterator[Check]:
        numbers = [sequence["sequence"] for sequence in sequences]
        yield TOKENS, numbers == list(range(len(numbers))), f"its sequences have the numbers {numbers}"
        masks = [np.asarray(sequence["mask"], dtype=bool) for sequence in sequences]
        versions = [version for sequence in sequences for version in sequence["versions"] or () if version >= 0]
        implied = {
            "response_tokens": sum(int(mask.sum()) for mask in masks),
            "prompt_tokens": int(masks[0].argmax()) if masks[0].any() else len(masks[0]),
            "version_min": min(versions, default=None),
            "version_max": max(versions, default=None),
        }
        for name, value in implied.items():
            yield ROWS, row[name] == value, f"{name} is {row[name]}, and its tokens imply {value}"
        if self._texts is not None and row["segments"] is not None:
            yield ROWS, row["segments"] == segments_of(sequences), "its texts are not those of its tokens"
        if (others := [values_of(sequence) for sequence in sequences])[0]:
            yield from _of_batch(row, others)
            known = [sequence["advantages"] for sequence in sequences]
            if None not in known and any(mask.any() for mask in masks):
                pairs = zip(known, masks, strict=True)
                mean = float(np.concatenate([np.asarray(each, dtype=np.float32)[mask] for each, mask in pairs]).mean())
                same = row["advantage"] is not None and math.isclose(mean, row["advantage"], rel_tol=1e-5, abs_tol=1e-6)
                yield ROWS, same, f"advantage {row['advantage']}, and the mean over its tokens is {mean:.9g}"


def _of_parts(row: Row, weights: Mapping[str, float]) -> Iterator[Check]:
    parts = dict(row["reward_parts"] or ())
    if parts and row["reward"] is not None and parts.keys() <= weights.keys():
        total = sum(weights[name] * value for name, value in parts.items())
        is_sum = math.isclose(total, row["reward"], rel_tol=1e-5, abs_tol=1e-5)
        told = f"reward {row['reward']:.9g}, and the weighted sum of its parts is {total:.9g}"
        yield "parts of rewards", is_sum, told


def _of_group(rows: Sequence[Row], size: int) -> Iterator[Check]:
    for sample, count in Counter(row["sample"] for row in rows).items():
        yield LEDGER, count == 1, f"sample {sample} has {count} rows"
    yield LEDGER, len(rows) == size, f"it has {len(rows)} rollouts, and a group has {size}"
    is_whole = len({row["status"] in IN_BATCH for row in rows}) == 1
    yield LEDGER, is_whole, "a part of the group was trained on; groups are whole or dropped whole"
    if any(row["status"] == "filtered" for row in rows):
        rewards = {row["reward"] for row in rows}
        told = f"filtered, because all rewards of the group are equal, and they are {sorted(map(str, rewards))}"
        yield LEDGER, len(rewards) == 1, told


def _of_step(rows: Sequence[Row], size: int) -> Iterator[Check]:
    trained = len({row["group"] for row in rows if row["status"] in IN_BATCH})
    yield LEDGER, trained <= size, f"{trained} groups in a batch of {size}"
    has_lost = any(row["status"] not in IN_BATCH for row in rows)
    told = f"{trained} groups were trained on, a batch has {size}, and no row says what became of the others"
    yield LEDGER, not trained or trained >= size or has_lost, told


def _of_batch(row: Row, others: Sequence[Mapping[str, np.ndarray]]) -> Iterator[Check]:
    """Yield checks of a row against what the batch that was trained on held."""
    parts = dict(row["reward_parts"] or ())
    columns = {key: row[name] for key, name in IN_ROWS.items()}
    for key, values in others[0].items():
        if key in columns or key.startswith(NAMED_REWARD):
            value = columns.get(key, parts.get(key.removeprefix(NAMED_REWARD)))
            value = math.nan if value is None else value  # a part that does not count
            held = float(values.sum(dtype=np.float64))
            same = math.isclose(held, value, rel_tol=1e-9, abs_tol=1e-12) or (math.isnan(held) and math.isnan(value))
            yield ROWS, same, f"{key} is {value:.9g}, and the batch has {held:.9g}"
    if "truncated" in others[0]:
        is_cut = any(bool(own["truncated"].any()) for own in others)
        yield ROWS, is_cut == row["truncated"], f"truncated is {row['truncated']}, and the batch has {is_cut}"
    groups = {int(own["group_ids"]) for own in others}
    yield ROWS, groups == {row["group"]}, f"its rows in the batch are of the groups {sorted(groups)}"


IN_ROWS = {"rewards": "reward", **SAID_ONCE}
"""columns of rows by the keys of a batch whose value of the whole trajectory they have"""


def values_of(sequence: Row) -> dict[str, np.ndarray]:
    """Return the other keys of a recorded row of a batch."""
    return {key: as_array(read_value(key, stored)) for key, stored in sequence.get("others") or ()}
