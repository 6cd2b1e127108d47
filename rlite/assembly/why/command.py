"""Why the log-probabilities of a run's engine and trainer disagree.

    rlite why RUN [step=12 sequences=4 tokens=64]

A side is honest if its record is the reference's up to a tolerance, which is what the dtype of the engine alone does to
these tokens. For a side that is not, the hypotheses are tried alone, then in pairs. Among those that explain the record
up to the tolerance, the one with the fewest deviations is named. The code of this process is one of them: if it
computes what was recorded, the first module that differs from the reference is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rlite import config
from rlite.assembly.launch import session_of
from rlite.assembly.why.evidence import SIDES, Case, open_case
from rlite.assembly.why.hypotheses import Hypothesis, hypotheses, sampled_tokens
from rlite.assembly.why.options import WhyConfig
from rlite.assembly.why.reference import OF_CODE, SAMPLING, Reference, Setting, label_logprobs
from rlite.errors import DataError
from rlite.imports import import_module
from rlite.trainer.options import LaunchOptions

LEAST, SPREAD = 1e-4, 2.0
"""mean difference of log-probabilities that is rounding in any dtype; and factor of what the dtype alone does"""
PARTLY = 0.2
"""share of the mismatch that a partial explanation leaves at most"""
TOP = 5
"""hypotheses that are refined, and then combined with all others"""


class Candidate(NamedTuple):
    """Some hypotheses together."""

    parts: tuple[Hypothesis, ...]
    left: float
    """mean distance of what they compute from the record"""

    @property
    def setting(self) -> dict[str, object]:
        """Setting of all parts."""
        return {name: value for part in self.parts for name, value in part.changes.items()}


@dataclass
class Verdict:
    """The cause of what a side has recorded."""

    side: str
    cause: str
    """rounding, unexplained, or causes joined by " + " """
    text: str
    honest: float
    """mean distance of the record from the honest computation"""
    left: float
    """mean distance of the record from the explanation"""
    layer: int | None = None
    module: str | None = None
    excluded: dict[str, str] = field(default_factory=dict)
    """other causes, and the least that they leave"""


@dataclass
class Explanation:
    """Why the recorded log-probabilities of engine and trainer disagree."""

    step: int
    mismatch: float
    """mean distance of the two records; NaN if one is missing"""
    tolerance: float
    """distance that is rounding"""
    verdicts: list[Verdict]
    notes: list[str]
    """what was assumed, left out or could not be checked, and why"""

    @property
    def cause(self) -> str:
        """Causes of both sides; rounding if there is no other."""
        return " + ".join(x.cause for x in self.verdicts if x.cause != "rounding") or "rounding"


def main(argv: Sequence[str]) -> None:
    """Print why the records of a run disagree."""
    options = config.load(WhyConfig, WhyConfig.arguments(argv))
    if options.code is not None:
        import_module(options.code, f"code={options.code}")
    print(report(explain_mismatch(options.run, options.step, options.sequences, options.tokens)))


def explain_mismatch(run: str | Path, step: int | None = None, sequences: int = 4, tokens: int = 64) -> Explanation:
    """Return why the log-probabilities that a run has recorded of its engine and its trainer disagree.

    Args:
        run: folder of the run.
        step: step whose rows are explained; None takes the newest whose weights are there.
        sequences: recorded sequences that are scored again.
        tokens: tokens of the model that are scored again.

    Raises:
        ConfigError: the folder is no run with rollouts, or its model is gone.
        DataError: the run has recorded no tokens.
        CheckpointError: no weights of the run can be read.
    """
    with session_of(LaunchOptions(launcher="inprocess", num_devices=1)):
        case = open_case(Path(run), step, sequences, tokens)
        case.load_all()
        reference, verdicts = Reference(case), []
        mismatch = float((case.recorded("engine") - case.recorded("trainer")).abs().nanmean())
        for side in SIDES:
            search = Search(case, reference, side)
            if math.isnan(search.honest.left):
                case.notes.append(f"the record has no log-probabilities of the {side}, which is not checked")
            else:
                verdicts.append(search.verdict(mismatch))
        return Explanation(case.step, mismatch, search.tolerance, verdicts, case.notes)


class Search:
    """The search for the cause of a side's record.

    Args:
        case: the case.
        reference: its reference.
        side: the side.
    """

    def __init__(self, case: Case, reference: Reference, side: str) -> None:
        self._case, self._reference, self._side = case, reference, side
        self._recorded, self._sampling = case.recorded(side), case.sampling(side)
        self._logits: tuple[Setting, tuple[Tensor, Tensor]] = {}, (torch.empty(0), torch.empty(0))
        reference.exact = case.exact(side)
        self.honest = self.score(())
        self.tolerance = self.rounding(case.dtype)

    def rounding(self, dtype: torch.dtype) -> float:
        """Return the distance from the record that a computation in a dtype may have."""
        exact, coarse = (self._logprobs({"dtype": each}) for each in (torch.float32, dtype))
        return max(LEAST, SPREAD * float((exact - coarse).abs().mean()))

    def _logprobs(self, setting: Setting) -> Tensor:
        key = {name: value for name, value in setting.items() if name not in SAMPLING}
        if self._logits[0] != key or not key:
            self._logits = key, self._reference.logits(key, self._case.spans)
        return label_logprobs(*self._logits[1], {**self._sampling, **setting})

    def score(self, parts: tuple[Hypothesis, ...]) -> Candidate:
        """Return a candidate with what it leaves; code of this process follows few settings."""
        found = Candidate(parts, math.inf)
        if "code" in found.setting and found.setting.keys() - OF_CODE:
            return found
        try:
            return found._replace(left=float((self._logprobs(found.setting) - self._recorded).abs().nanmean()))
        except DataError as error:
            self._case.notes.append(str(error))
            return found

    def refined(self, found: Candidate) -> Candidate:
        """Return a candidate with its numbers searched beside the grid, one after the other."""
        for place in [*range(len(found.parts))] * (2 if len(found.parts) > 1 else 1):
            part = found.parts[place]
            if part.number is None or found.left <= LEAST:
                continue

            def scored(x: float, parts: tuple[Hypothesis, ...] = found.parts, place: int = place) -> Candidate:
                moved = parts[place]._replace(changes={**parts[place].changes, str(parts[place].number): x})
                return self.score((*parts[:place], moved, *parts[place + 1 :]))

            found = min(found, minimised(scored, part.changes[part.number]), key=of_left)
        return found

    def verdict(self, mismatch: float) -> Verdict:
        """Return the cause.

        Args:
            mismatch: distance of the two records. If it is rounding, there is nothing to explain.
        """
        honest, tolerance = self.honest, self.tolerance
        if min(honest.left, mismatch) <= tolerance:
            text = "the two records agree; the weights at hand are not theirs"
            if honest.left <= tolerance:
                text = f"as computed anew in float32, up to what {str(self._case.dtype)[6:]} rounds"
            return Verdict(self._side, "rounding", text, honest.left, honest.left)
        known = [*hypotheses(self._case, self._reference, self._side)]
        singles = sorted((self.score((each,)) for each in known), key=of_left)
        kinds = {(x.parts[0].cause, *x.setting, x.setting.get("layer")): x for x in reversed(singles)}
        refined = [self.refined(each) for each in sorted(kinds.values(), key=of_left)[: 2 * TOP]]
        found = [honest, *singles, *refined]
        best, extra = simplest(found, tolerance), ""
        if best is None and (extra := self._coarser(honest)):
            best = honest
        if best is None and self._side == "engine":
            found.append(self.score((sampled_tokens(self._case, self._reference, self._side),)))
            best = simplest(found, tolerance)
        if best is None:
            heads = {each.parts[0].cause: each for each in sorted(refined, key=of_left, reverse=True)}
            firsts = sorted(heads.values(), key=of_left)[:TOP]
            pairs = [
                self.score((*first.parts, second))
                for first in firsts
                for second in known
                if not first.setting.keys() & second.changes.keys()
            ]
            found += [self.refined(each) for each in sorted(pairs, key=of_left)[: 2 * TOP]]
            best = simplest(found, tolerance)
        if best is None and (extra := self._coarser(min(found, key=of_left))):
            best = simplest(found, self.rounding(torch.bfloat16))
        if best is None and (nearest := min(found, key=of_left)).left <= PARTLY * honest.left:
            best, extra = nearest, "unexplained"
        return self._named(best or honest, extra if best else "unexplained", singles)

    def _coarser(self, found: Candidate) -> str:
        """Return "precision" if a candidate leaves no more than bfloat16 rounds, though float32 was to compute."""
        is_coarse = self._case.dtype == torch.float32 and found.left <= self.rounding(torch.bfloat16)
        return "precision" if is_coarse else ""

    def _named(self, best: Candidate, extra: str, singles: Sequence[Candidate]) -> Verdict:
        causes, texts, difference = [], [], None
        layer = best.setting.get("layer")
        for part in best.parts:
            cause, text = part.cause, part.text.format(part.changes.get(part.number or ""))
            text += f", in layer {part.changes['layer']} alone" if part.changes.get("layer") is not None else ""
            if cause == "code":
                found = (self._reference.difference(self._side, best.setting, span) for span in self._case.spans)
                if (difference := next(filter(None, found), None)) is not None:
                    cause, layer = difference.cause, difference.layer
                    where = f"{difference.module} is the first that differs beyond rounding"
                    text = f"by {text}: {where}, by {difference.size:.1g} of its largest value"
            causes, texts = [*causes, cause], [*texts, text]
        if extra:
            causes.append(extra)
            texts.append("the rest is what bfloat16 rounds" if extra == "precision" else "the rest is not explained")
        excluded = {
            x.parts[
                0
            ].cause: f"{x.parts[0].text.format(x.parts[0].changes.get(x.parts[0].number or ''))}: {x.left:.2g} left"
            for x in reversed(singles)
            if x.parts[0].cause not in {*causes, *(part.cause for part in best.parts)}
        }
        module = None if difference is None else difference.module
        names = " + ".join(dict.fromkeys(causes))
        left, honest = best.left, self.honest.left
        return Verdict(self._side, names, "; ".join(texts), honest, left, layer, module, excluded)


of_left = attrgetter("left")


def simplest(found: Sequence[Candidate], tolerance: float) -> Candidate | None:
    """Return the candidate with the fewest parts of those within a tolerance; None without one."""
    good = [each for each in found if each.left <= tolerance]
    return min(good, key=lambda x: (len(x.parts), "code" not in x.setting, x.left), default=None)


def minimised(scored: Callable[[float], Candidate], start: float) -> Candidate:
    """Return the best candidate of numbers between a third and three times the start: a golden-section search."""
    low, high, found = math.log(start / 3), math.log(start * 3), []
    for _ in range(24):
        points = [high - (high - low) / 1.618, low + (high - low) / 1.618]
        left, right = (scored(math.exp(point)) for point in points)
        low, high = (low, points[1]) if left.left < right.left else (points[0], high)
        found += [left, right]
    return min(found, key=of_left)


def report(found: Explanation) -> str:
    """Return an explanation as text."""
    lines = [
        f"step {found.step}: the records differ by {found.mismatch:.2g} per token; {found.tolerance:.2g} is rounding"
    ]
    for verdict in found.verdicts:
        lines.append(f"{verdict.side}: {verdict.cause}")
        lines.append(f"  {verdict.text}; {verdict.left:.2g} of {verdict.honest:.2g} per token is left")
        lines += [f"  not {cause}: {text}" for cause, text in verdict.excluded.items()]
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])
