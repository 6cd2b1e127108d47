"""Why the log-probabilities of a run's engine and trainer disagree.

    rlite why RUN [step=12 sequences=4 tokens=64]

A side is honest if its record is the reference's up to a tolerance, which is what the dtype of the engine alone does to
these tokens. For a side that is not, the hypotheses are tried alone, then in pairs. Among those that explain the record
up to the tolerance, the one with the fewest deviations is named. The code of this process is one of them: if it
computes what was recorded, the first module that differs from the reference is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

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
UNEXPLAINED = "the rest is not explained by any hypothesis, alone or in pairs"
GOLDEN = 0.618034
of_left = attrgetter("left")
WIDE, NARROW = 3.0, 1.1
"""factors between which a number is searched, and a top_p, of which all above 1 are alike"""
TOP = 5
"""hypotheses that are refined, and then combined with all others"""


class Candidate(NamedTuple):
    """Some hypotheses together, and the mean distance of what they compute from the record."""

    parts: tuple[Hypothesis, ...]
    left: float

    @property
    def setting(self) -> dict[str, Any]:
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
    """assumptions, and checks that were left out, with the reason for each"""

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
        self._last: tuple[Setting | None, Any] = None, ()
        reference.exact = case.exact(side)
        self.honest = self.score(())
        self.tolerance = self.rounding(case.dtype)
        if reference.exact != case.version(side) and len(case.states) > 1:  # what training changes between checkpoints
            near = sorted(case.states, key=lambda step: abs(step - case.version(side)))[1]
            self.tolerance += float((self._logprobs({"weights": near}) - self._logprobs({})).abs().mean())

    def rounding(self, dtype: torch.dtype) -> float:
        """Return the distance from the record that a computation in a dtype may have."""
        exact, coarse = (self._logprobs({"dtype": each}) for each in (torch.float32, dtype))
        return max(LEAST, SPREAD * float((exact - coarse).abs().mean()))

    def _logprobs(self, setting: Setting) -> Tensor:
        key = {name: value for name, value in setting.items() if name not in SAMPLING}
        if self._last[0] != key:
            self._last = key, self._reference.logits(key, self._case.spans)
        logits, labels = self._last[1]
        return label_logprobs(logits, labels, {**self._sampling, **setting})

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
        for place in [*range(len(found.parts))] * (3 if len(found.parts) > 1 else 1):
            part = found.parts[place]
            if part.number is None or found.left <= LEAST:
                continue

            def scored(x: float, parts: tuple[Hypothesis, ...] = found.parts, place: int = place) -> Candidate:
                moved = parts[place]._replace(changes={**parts[place].changes, str(parts[place].number): x})
                return self.score((*parts[:place], moved, *parts[place + 1 :]))

            width = NARROW if part.number == "top_p" else WIDE
            found = min(found, minimised(scored, part.changes[part.number], width), key=of_left)
        return found

    def best_of_kinds(self, found: Sequence[Candidate]) -> list[Candidate]:
        """Return the best candidates of different kinds, refined, the best one first."""
        kinds: dict[object, Candidate] = {}
        for each in sorted(found, key=of_left):
            numbers = [part.number for part in each.parts]
            kinds.setdefault((*each.setting, *numbers, each.setting.get("layer")), each)
        return sorted(map(self.refined, [*kinds.values()][: 2 * TOP]), key=of_left)

    def candidates(self, coarse: float) -> Iterator[list[Candidate]]:
        """Yield the hypotheses alone, refined, and in pairs.

        Args:
            coarse: distance below which a smaller dtype explains the record, so that pairs need not be tried.
        """
        known = [*hypotheses(self._case, self._reference, self._side)]
        yield (singles := sorted((self.score((each,)) for each in known), key=of_left))
        yield (refined := self.best_of_kinds(singles))
        if self.honest.left > coarse:
            if self._side == "engine":
                yield [self.score((sampled_tokens(self._case, self._reference, self._side),))]
            firsts = [*{x.parts[0].cause: x for x in reversed(refined)}.values()][::-1][:TOP]
            pairs = [(*x.parts, y) for x, y in product(firsts, known) if not x.setting.keys() & y.changes.keys()]
            yield self.best_of_kinds([*map(self.score, pairs)])

    def verdict(self, mismatch: float) -> Verdict:
        """Return the cause.

        Args:
            mismatch: distance of the two records. If it is rounding, there is nothing to explain.
        """
        honest, dtype, found = self.honest, self._case.dtype, [self.honest]
        if min(honest.left, mismatch) <= self.tolerance:
            anew = f"as computed anew in float32, up to what {str(dtype)[6:]} rounds"
            text = anew if honest.left <= self.tolerance else "the records agree, but not with the weights at hand"
            return Verdict(self._side, "rounding", text, honest.left, honest.left)
        coarse = self.rounding(torch.bfloat16) if dtype == torch.float32 else 0.0
        for more in self.candidates(coarse):
            found += more
            if (best := simplest(found, self.tolerance)) is not None:
                return self._named(best, found)
        if (best := simplest(found, coarse)) is not None:
            return self._named(best, found, ("precision", "the rest is what bfloat16 rounds"))
        best = min(found, key=of_left)
        return self._named(best if best.left <= PARTLY * honest.left else honest, found, ("unexplained", UNEXPLAINED))

    def _named(self, best: Candidate, found: Sequence[Candidate], *rest: tuple[str, str]) -> Verdict:
        told, difference = [(part.cause, part.words) for part in best.parts], None
        if "code" in best.setting:
            differences = (self._reference.difference(self._side, best.setting, span) for span in self._case.spans)
            difference = next(filter(None, differences), None)
        if difference is not None:
            text = f"{difference.module} is the first that differs, by {difference.size:.1g} of its largest value"
            told = [(difference.cause, f"{words}: {text}") if name == "code" else (name, words) for name, words in told]
        told += rest
        others = [x for x in sorted(found, key=of_left, reverse=True) if len(x.parts) == 1]
        excluded = {x.parts[0].cause: f"{x.parts[0].words}: {x.left:.2g} left" for x in others}
        for cause in {*(cause for cause, _ in told), *(part.cause for part in best.parts)}:
            excluded.pop(cause, None)
        causes, text = " + ".join(dict.fromkeys(cause for cause, _ in told)), "; ".join(words for _, words in told)
        layer, module = best.setting.get("layer"), None
        if difference is not None:
            layer, module = difference.layer, difference.module
        return Verdict(self._side, causes, text, self.honest.left, best.left, layer, module, excluded)


def simplest(found: Sequence[Candidate], tolerance: float) -> Candidate | None:
    """Return the candidate with the fewest parts of those within a tolerance; None without one."""
    good = [each for each in found if each.left <= tolerance]
    return min(good, key=_rank, default=None)


def _rank(found: Candidate) -> tuple[Any, ...]:
    setting = found.setting
    return len(found.parts), "code" not in setting, round(found.left, 6), setting.get("layer") is None


def minimised(scored: Callable[[float], Candidate], start: float, width: float) -> Candidate:
    """Return the best candidate by golden-section search.

    Args:
        scored: returns the candidate of a number.
        start: a number near the best one.
        width: the numbers are between `start / width` and `start * width`.
    """
    low, high = math.log(start / width), math.log(start * width)
    left, right = (scored(math.exp(low + share * (high - low))) for share in (1 - GOLDEN, GOLDEN))
    for _ in range(24):
        if left.left < right.left:
            high, right = low + GOLDEN * (high - low), left
            left = scored(math.exp(high - GOLDEN * (high - low)))
        else:
            low, left = high - GOLDEN * (high - low), right
            right = scored(math.exp(low + GOLDEN * (high - low)))
    return min(left, right, key=of_left)


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
