"""Checks of the record of rollouts: rows against rows, rows against tokens, and tokens against each other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlite.assembly.proof.findings import Findings
from rlite.batch import NAMED_REWARD
from rlite.services.record.batches import read_value
from rlite.services.record.files import STATUSES
from rlite.services.record.recorder import TokenTexts, as_array, segments_of
from rlite.trainer.rl.options import PpoConfig

Row = Mapping[str, Any]
IN_BATCH = ("trained", "skipped")
LEDGER, ROWS, TOKENS = "fates of rollouts", "rows of rollouts", "sequences of tokens"
STALENESS = "staleness of tokens"


def place_of(row: Row) -> str:
    """Return the place of a row in words."""
    return f"record, step {row['step']}, group {row['group']}, sample {row['sample']}"


class RolloutChecks:
    """Checks rows of the record of training, step by step.

    Args:
        findings: takes contradictions.
        options: the options of the run.
        weights: weights of the parts of the reward by name; {} if they are not known.
        max_staleness: the bound on the age of tokens, in updates.
    """

    def __init__(
        self,
        findings: Findings,
        options: PpoConfig,
        weights: Mapping[str, float],
        max_staleness: int,
    ) -> None:
        self._findings, self._options, self._weights = findings, options, weights
        self._max_staleness = max_staleness
        self._step_of: dict[tuple[int, int], int] = {}

    def rows(self, step: int, rows: Sequence[Row]) -> None:
        """Check the rows of one step: each rollout has one fate, and whole groups were trained on."""
        expect, samples = self._findings.expect, Counter(row["group"] for row in rows)
        for row in rows:
            place, key = place_of(row), (row["group"], row["sample"])
            before = self._step_of.setdefault(key, step) if key not in self._step_of else self._step_of[key]
            is_first = key not in self._step_of or before == step
            expect(is_first, LEDGER, place, f"the same rollout has a row in step {before}: it was consumed twice")
            expect(row["status"] in STATUSES, LEDGER, place, f"status {row['status']!r} is none of the fates")
            is_in_batch = row["status"] in IN_BATCH
            expect(not (row["status"] == "trained" and row["reason"]), LEDGER, place, "trained, and not, with a reason")
            has_advantage = row["advantage"] is not None
            expect(is_in_batch or not has_advantage, LEDGER, place, f"{row['status']}, and it has an advantage")
            expect(not is_in_batch or row["reward"] is not None, ROWS, place, "in the batch without a reward")
            self._version(step, row, place, is_in_batch)
            self._reward(row, place)
        counts = Counter((row["group"], row["sample"]) for row in rows)
        for key, count in counts.items():
            expect(count == 1, LEDGER, f"record, step {step}", f"group {key[0]}, sample {key[1]} has {count} rows")
        size = self._options.responses_per_prompt
        trained = {row["group"] for row in rows if row["status"] in IN_BATCH}
        for group, count in samples.items():
            place = f"record, step {step}, group {group}"
            expect(count == size, LEDGER, place, f"it has {count} rollouts, and a group has {size}")
            fates = {row["status"] in IN_BATCH for row in rows if row["group"] == group}
            expect(
                len(fates) == 1, LEDGER, place, "a part of the group was trained on; groups are whole or dropped whole"
            )
        for group in {row["group"] for row in rows if row["status"] == "filtered"}:
            rewards = {row["reward"] for row in rows if row["group"] == group}
            told = f"filtered, because all rewards of the group are equal, and they are {sorted(map(str, rewards))}"
            expect(len(rewards) == 1, LEDGER, f"record, step {step}, group {group}", told)
        most = self._options.train_data.prompts_per_rollout
        expect(len(trained) <= most, LEDGER, f"record, step {step}", f"{len(trained)} groups in a batch of {most}")
        if trained and len(trained) < most:
            lost = [row for row in rows if row["status"] not in IN_BATCH]
            told = (
                f"{len(trained)} groups were trained on, a batch has {most}, and no row says what became of the others"
            )
            expect(bool(lost), LEDGER, f"record, step {step}", told)

    def _version(self, step: int, row: Row, place: str, is_in_batch: bool) -> None:
        oldest, newest = row["version_min"], row["version_max"]
        if oldest is None or newest is None:
            return
        expect = self._findings.expect
        expect(oldest <= newest, STALENESS, place, f"oldest policy version {oldest}, newest {newest}")
        expect(newest < step, STALENESS, place, f"policy version {newest} in step {step}, which made version {step}")
        if is_in_batch:
            age = step - 1 - oldest
            expect(
                age <= self._max_staleness, STALENESS, place, f"{age} updates old; the bound is {self._max_staleness}"
            )

    def _reward(self, row: Row, place: str) -> None:
        parts = dict(row["reward_parts"] or ())
        if not parts or row["reward"] is None or set(parts) - set(self._weights):
            return
        total = sum(self._weights[name] * value for name, value in parts.items())
        is_sum = math.isclose(total, row["reward"], rel_tol=1e-5, abs_tol=1e-5)
        told = f"reward {row['reward']:.9g}, and the weighted sum of its parts is {total:.9g}"
        self._findings.expect(is_sum, "parts of rewards", place, told)


class SequenceChecks:
    """Checks recorded sequences against each other, and against the rows of their rollouts.

    Args:
        findings: takes contradictions.
        texts: decodes tokens; None if there is no tokenizer.
    """

    def __init__(self, findings: Findings, texts: TokenTexts | None) -> None:
        self._findings, self._texts = findings, texts

    def tokens(self, row: Row, sequences: Sequence[Row]) -> None:
        """Check the sequences of one rollout against its row, and against each other."""
        if not sequences:
            return
        expect, place = self._findings.expect, place_of(row)
        numbers = [sequence["sequence"] for sequence in sequences]
        expect(numbers == list(range(len(numbers))), TOKENS, place, f"its sequences have the numbers {numbers}")
        for sequence in sequences:
            self._columns(sequence, f"{place}, sequence {sequence['sequence']}")
        masks = [np.asarray(sequence["mask"], dtype=bool) for sequence in sequences]
        versions = np.concatenate([np.asarray(sequence["versions"] or [], dtype=np.int64) for sequence in sequences])
        made = versions[versions >= 0]
        implied: dict[str, Any] = {
            "response_tokens": int(sum(mask.sum() for mask in masks)),
            "prompt_tokens": int(masks[0].argmax()) if masks[0].any() else len(masks[0]),
            "version_min": int(made.min()) if len(made) else None,
            "version_max": int(made.max()) if len(made) else None,
        }
        for name, value in implied.items():
            expect(row[name] == value, ROWS, place, f"{name} is {row[name]}, and its tokens imply {value}")
        self._of_batch(row, sequences, masks, place)
        if self._texts is not None and row["segments"] is not None:
            told = "its texts are not those of its tokens"
            expect(row["segments"] == segments_of(sequences), ROWS, place, told)

    def _columns(self, sequence: Row, place: str) -> None:
        expect, length = self._findings.expect, len(sequence["ids"])
        lists = {name: value for name, value in sequence.items() if isinstance(value, list) and name != "others"}
        odd = {name: len(value) for name, value in lists.items() if len(value) != length}
        expect(not odd, TOKENS, place, f"{length} tokens, and values of {odd}")
        if odd:
            return
        mask = np.asarray(sequence["mask"], dtype=bool)
        versions = np.asarray(sequence["versions"], dtype=np.int64)
        expect(bool((versions[mask] >= 0).all()), TOKENS, place, "a token to train on has no policy version")
        if sequence["logprobs"] is not None:
            logprobs = np.asarray(sequence["logprobs"], dtype=np.float64)
            expect(bool((logprobs <= 1e-4).all()), TOKENS, place, "the engine's log-probability of a token is above 0")
            told = "a token that the model has not written has a log-probability of the engine"
            expect(not logprobs[~mask & (versions < 0)].any(), TOKENS, place, told)
        if self._texts is not None:
            text, offsets = self._texts.decode(sequence["ids"])
            expect(text == sequence["text"], TOKENS, place, "its text is not that of its tokens")
            expect(offsets == sequence["offsets"], TOKENS, place, "places of its tokens are not those in its text")

    def _of_batch(self, row: Row, sequences: Sequence[Row], masks: Sequence[np.ndarray], place: str) -> None:
        """Check a row against what the batch that was trained on held."""
        others = [values_of(sequence) for sequence in sequences]
        if not others[0]:
            return
        expect = self._findings.expect
        rewards = others[0].get("rewards")
        if rewards is not None and row["reward"] is not None:
            total = float(rewards.sum(dtype=np.float64))
            told = f"reward {row['reward']:.9g}, and the batch has {total:.9g}"
            expect(math.isclose(total, row["reward"], rel_tol=1e-9, abs_tol=1e-12), ROWS, place, told)
        for name, value in row["reward_parts"] or ():
            found = others[0].get(f"{NAMED_REWARD}{name}")
            if found is not None:
                same = math.isclose(float(found.flatten()[0]), value, rel_tol=1e-9, abs_tol=1e-12)
                expect(same, ROWS, place, f"part {name} of the reward is {value:.9g}, and the batch has {found}")
        for key, name in (("scores", "score"), ("num_turns", "turns"), ("num_tool_calls", "tool_calls")):
            if key in others[0]:
                value = float(others[0][key].flatten()[0])
                expect(value == row[name], ROWS, place, f"{name} is {row[name]}, and the batch has {value:g}")
        if "truncated" in others[0]:
            is_cut = any(bool(own["truncated"].any()) for own in others)
            expect(
                is_cut == row["truncated"], ROWS, place, f"truncated is {row['truncated']}, and the batch has {is_cut}"
            )
        groups = {int(own["group_ids"]) for own in others}
        expect(groups == {row["group"]}, ROWS, place, f"its rows in the batch are of the groups {sorted(groups)}")
        known = [sequence["advantages"] for sequence in sequences]
        if all(each is not None for each in known) and any(mask.any() for mask in masks):
            pairs = zip(known, masks, strict=True)
            values = np.concatenate([np.asarray(each, dtype=np.float32)[mask] for each, mask in pairs])
            mean, told = float(values.mean()), row["advantage"]
            same = told is not None and math.isclose(mean, told, rel_tol=1e-5, abs_tol=1e-6)
            expect(same, ROWS, place, f"advantage {told}, and the mean over its tokens is {mean:.9g}")


def values_of(sequence: Row) -> dict[str, np.ndarray]:
    """Return the other keys of a recorded row of a batch."""
    return {key: as_array(read_value(key, stored)) for key, stored in sequence.get("others") or ()}
