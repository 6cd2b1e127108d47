"""Rewards of a record computed again: the run's own workflow, whose engine says what the record says."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlite.assembly.proof.report import Report
from rlite.assembly.proof.rollouts import place_of
from rlite.assembly.proof.source import Source
from rlite.assembly.proof.trainers import check_rewards
from rlite.assembly.rl import read_prompts
from rlite.assembly.workflows import RunWorkflows
from rlite.data.prompts import item_name
from rlite.errors import RliteError
from rlite.rollout import RolloutWorkflow, ScriptedEngine
from rlite.rollout.rewards.configured_rewards import ChosenRewards
from rlite.types import LLMRequest, LLMResponse, OnChunk, StopReason

CHECK = "rewards"
Place = tuple[int, int]
"""group and sample"""
Sequences = Mapping[Place, Sequence[Mapping[str, Any]]]


class RecordedEngine(ScriptedEngine):
    """Engine that answers with the recorded tokens of one rollout."""

    def __init__(self, sequence: Mapping[str, Any], is_truncated: bool) -> None:
        first = sequence["mask"].index(True)
        super().__init__([sequence["ids"][first:]])
        self.prompt, self.asked = sequence["ids"][:first], list[int]()
        self._reason: StopReason = "length" if is_truncated else "stop"

    async def agenerate(self, request: LLMRequest, on_chunk: OnChunk | None = None) -> LLMResponse:
        """Return the recorded answer."""
        self.asked = list(request.input_ids)
        return replace(await super().agenerate(request, on_chunk), stop_reason=self._reason)


class RewardChecks:
    """Computes the rewards of recorded single-turn rollouts again."""

    def __init__(self, source: Source, code: str, report: Report) -> None:
        self._report = report
        self._workflow: RolloutWorkflow | None = None
        self._items: dict[str, Mapping[str, Any]] = {}
        try:
            options = source.run.options(source.folder, code, asks_rewards=True)
            check_rewards(options, code)
            rows, _ = read_prompts(options.train_data, {})
            make = RunWorkflows(options).maker(ChosenRewards(options.reward, {}), {"train_data": rows})
            self._items = {item_name(row, number): row for number, row in enumerate(rows)}
            self._workflow = make(options.rollout.train_sampling_params)
        except RliteError as error:
            report.note(f"rewards are not computed again: {error}")

    def check(self, sequences: Sequences, rows: Mapping[Place, Mapping[str, Any]]) -> None:
        """Check the rollouts of a step."""
        if self._workflow is not None:
            for place, own in sequences.items():
                self._rollout(self._workflow, own, rows.get(place))

    def _rollout(
        self, workflow: RolloutWorkflow, own: Sequence[Mapping[str, Any]], row: Mapping[str, Any] | None
    ) -> None:
        report, mask = self._report, own[0]["mask"]
        is_single = len(own) == 1 and True in mask and all(mask[mask.index(True) :])
        if row is None or row["reward"] is None or not is_single or row["item"] not in self._items:
            report.note("rewards of several turns, or of rows that the data has no longer, are not computed again")
            return
        engine = RecordedEngine(own[0], bool(row["truncated"]))
        try:
            made = asyncio.run(workflow.arun_episode(engine, dict(self._items[row["item"]])))
        except RliteError as error:
            report.expect(False, CHECK, place_of(row), f"reward {row['reward']:.9g}, and its function raises {error}")
            return
        told = "its prompt is not that of its item in the data"
        report.expect(engine.asked == engine.prompt, "prompts of rollouts", place_of(row), told)
        again = float(made["rewards"][0]) if made is not None else None
        told = f"reward {row['reward']:.9g}, and its function returns {again}"
        report.expect(again is not None and abs(again - row["reward"]) <= 1e-6, CHECK, place_of(row), told)
