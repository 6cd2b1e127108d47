"""Why the log-probabilities of a run's engine and trainer disagree.

    rlite why RUN [step=12 sequences=4 tokens=64]

A side is honest if its record is the reference's up to a tolerance, which is what the dtype of the engine alone does to
these tokens. For a side that is not, the hypotheses are tried alone, and the best of each kind are moved: numbers, and
the parts of the model that deviate. Then pairs are tried, those first whose effects add up to the record. Among those
that explain it up to the tolerance, the one with the fewest deviations is named. The code of this process is a
hypothesis, too: if it computes what was recorded, the first module that differs from the reference is named.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlite import config
from rlite.assembly.launch import session_of
from rlite.assembly.why.evidence import SIDES, Case, open_case
from rlite.assembly.why.hypotheses import Hypothesis, hypotheses, sampled_tokens
from rlite.assembly.why.options import WhyConfig
from rlite.assembly.why.reference import OF_CODE, PENALTIES, SAMPLING, Reference, Setting, label_logprobs, penalised
from rlite.errors import DataError
from rlite.imports import import_module
from rlite.trainer.options import LaunchOptions

LEAST, SPREAD = 1e-4, 2.0
"""mean difference of log-probabilities that is rounding in any dtype; and factor of what the dtype alone does"""
PARTLY = 0.2
"""share of the mismatch that a partial explanation leaves at most"""
of_left = attrgetter("left")
BEST, SAME = 24, 3
"""candidates whose numbers and parts are moved, and those of them with the same causes"""
PAIRS, CAUSES, BEST_PAIRS = 200, 2, 8
"""pairs of kinds that are computed; causes with whose best all others are computed; pairs that are moved"""
SWEEPS, SLOW = 8, 0.9
"""times that all moves are tried, and the share that a sweep leaves at most to be followed by another"""


class Candidate(NamedTuple):
    """Some hypotheses together, and the mean distance of what they compute from the record."""

    parts: tuple[Hypothesis, ...]
    left: float
    logprobs: Tensor

    @property
    def kind(self) -> tuple[Any, ...]:
        """Texts and beginnings of the parts; no move changes them."""
        return tuple((part.text, part.start) for part in self.parts)

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
    alike: dict[str, str] = field(default_factory=dict)
    """other causes, each of which explains the record alone, too"""


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
    """The search for the cause of a side's record."""

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
        logits, pairs = self._last[1]
        if PENALTIES & setting.keys():
            logits = penalised(logits, pairs, setting)
        labels = torch.tensor([token for _, own in pairs for token in own])
        return label_logprobs(logits, labels, {**self._sampling, **setting})

    def score(self, parts: tuple[Hypothesis, ...]) -> Candidate:
        """Return a candidate with what it leaves; code of this process follows few settings."""
        found = Candidate(parts, math.inf, torch.tensor(math.nan))
        if "code" in found.setting and found.setting.keys() - OF_CODE:
            return found
        try:
            logprobs = self._logprobs(found.setting)
        except DataError as error:
            self._case.notes.append(str(error))
            return found
        return Candidate(parts, float((logprobs - self._recorded).abs().nanmean()), logprobs)

    def refined(self, found: Candidate) -> Candidate:
        """Return a candidate after the moves of its parts that bring it nearer to the record."""
        before = math.inf
        for _ in range(SWEEPS):
            if not LEAST < found.left <= SLOW * before:
                break
            before = found.left
            for place, part in enumerate(found.parts):
                for move in part.moves:
                    own, parts = found.parts[place], [*found.parts]
                    parts[place] = own._replace(changes=move(own.changes))
                    if parts[place].changes != own.changes:
                        found = min(found, self.score(tuple(parts)), key=of_left)
        return found

    def best(self, found: Iterable[Candidate], most: int) -> list[Candidate]:
        """Return the best candidates of different kinds after their moves, the best one first."""
        kinds: dict[object, Candidate] = {}
        for each in sorted(found, key=of_left):
            kinds.setdefault(each.kind, each)
        counts, chosen = Counter[object](), list[Candidate]()
        for each in kinds.values():
            counts[causes := frozenset(part.cause for part in each.parts)] += 1
            chosen += [each] if counts[causes] <= SAME and any(part.moves for part in each.parts) else []
        return sorted(map(self.refined, chosen[:most]), key=of_left)

    def crossed(self, singles: Sequence[Candidate]) -> Iterator[Candidate]:
        """Yield, for each kind of other weights, the module whose effects in one layer come nearest to the record."""
        target, likest = (self._recorded - self.honest.logprobs).nan_to_num(0), dict[Any, Candidate]()
        weights = [(each, each.setting["parts"]) for each in singles if "parts" in each.setting]
        modules = [each for each, own in weights if own.layers <= own.chosen and not own.modules <= own.chosen]
        alike = [torch.cosine_similarity(each.logprobs - self.honest.logprobs, target, 0).item() for each in modules]
        for _, each in sorted(zip(alike, modules, strict=True), key=itemgetter(0)):
            likest[each.kind] = each
        for each in likest.values():
            own, [part] = each.setting["parts"], each.parts
            for layer in sorted(own.layers):
                chosen = own._replace(chosen=own.chosen - own.layers | {layer})
                yield self.score((part._replace(changes={**part.changes, "parts": chosen}),))

    def pairs(self, singles: Sequence[Candidate]) -> Iterator[Candidate]:
        """Yield the best pair of two kinds, for the pairs of kinds of which the sums of effects explain the most."""
        honest = self.honest.logprobs
        singles = [each for each in singles if (each.logprobs - honest).abs().mean() > LEAST]
        effects = torch.stack([each.logprobs for each in singles]) - honest
        sums = torch.stack([(self._recorded - honest - own - effects).abs().nanmean(1) for own in effects])
        firsts, seconds = torch.triu_indices(len(singles), len(singles), 1)
        seen = set[object]()
        for place in sums[firsts, seconds].argsort().tolist():
            first, second = singles[firsts[place]], singles[seconds[place]]
            kinds = frozenset((first.kind, second.kind))
            if kinds not in seen and not first.setting.keys() & second.setting.keys():
                seen.add(kinds)
                yield self.score((*first.parts, *second.parts))

    def beside(self, singles: Sequence[Candidate]) -> Iterator[Candidate]:
        """Yield the best hypotheses with each one that is not of one layer: effects of large faults do not add up."""
        best = {each.parts[0].cause: each for each in sorted(singles, key=of_left, reverse=True)}
        for second, first in product(singles, sorted(best.values(), key=of_left)[:CAUSES]):
            if second.parts[0].layer is None and not first.setting.keys() & second.setting.keys():
                yield self.score((*first.parts, *second.parts))

    def candidates(self, coarse: float) -> Iterator[list[Candidate]]:
        """Yield the hypotheses alone, refined, and in pairs."""
        singles = [self.score((each,)) for each in hypotheses(self._case, self._reference, self._side)]
        singles += [*self.crossed(singles)]
        yield singles
        yield (refined := self.best(singles, BEST))
        if self.honest.left > coarse:
            if self._side == "engine":
                yield [self.score((sampled_tokens(self._case, self._reference, self._side),))]
            for pairs in (islice(self.pairs([*refined, *singles]), PAIRS), self.beside(singles)):
                yield (found := [*pairs])
                yield self.best(found, BEST_PAIRS)

    def verdict(self, mismatch: float) -> Verdict:
        """Return the cause.

        `mismatch`: distance of the two records. If it is rounding, there is nothing to explain.
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
        if (best := simplest([each for each in found if len(each.parts) < 2], coarse)) is not None:
            return self._named(best, found, ("precision", "the rest is what bfloat16 rounds"))
        best = min((each for each in found if each.left <= PARTLY * honest.left), key=of_left, default=honest)
        return self._named(best, found, ("unexplained", "no hypothesis explains the rest, alone or in pairs"))

    def _named(self, best: Candidate, found: Sequence[Candidate], *rest: tuple[str, str]) -> Verdict:
        told, module = [(part.cause, part.words) for part in best.parts], None
        layer = next((part.layer for part in best.parts if part.layer is not None), None)
        differences = (self._reference.difference(self._side, best.setting, span) for span in self._case.spans)
        if "code" in best.setting and (first := next(filter(None, differences), None)) is not None:
            layer, module = first.layer, first.module
            text = f"{module} is the first that differs, by {first.size:.1g} of its largest value"
            told = [(first.cause, f"{words}: {text}") if name == "code" else (name, words) for name, words in told]
        told += rest
        others = [x for x in sorted(found, key=of_left, reverse=True) if len(x.parts) == 1]
        named = {*(cause for cause, _ in told), *(part.cause for part in best.parts)}
        least = {x.parts[0].cause: x for x in others if x.parts[0].cause not in named}
        words = {cause: (x.left, f"{x.parts[0].words}: {x.left:.2g} left") for cause, x in least.items()}
        excluded = {cause: text for cause, (left, text) in words.items() if left > self.tolerance}
        alike = {cause: text for cause, (_, text) in words.items() if cause not in excluded}
        causes, text = " + ".join(dict.fromkeys(cause for cause, _ in told)), "; ".join(words for _, words in told)
        return Verdict(self._side, causes, text, self.honest.left, best.left, layer, module, excluded, alike)


def simplest(found: Sequence[Candidate], tolerance: float) -> Candidate | None:
    """Return the candidate with the fewest parts of those within a tolerance; None without one."""
    return min((each for each in found if each.left <= tolerance), key=_rank, default=None)


def _rank(found: Candidate) -> tuple[Any, ...]:
    is_code, is_whole = "code" in found.setting, all(part.layer is None for part in found.parts)
    return len(found.parts), not is_code, round(found.left, 6), is_whole


def report(found: Explanation) -> str:
    """Return an explanation as text."""
    differ = f"the records differ by {found.mismatch:.2g} per token; {found.tolerance:.2g} is rounding"
    lines = [f"step {found.step}: {differ}"]
    for verdict in found.verdicts:
        lines.append(f"{verdict.side}: {verdict.cause}")
        lines.append(f"  {verdict.text}; {verdict.left:.2g} of {verdict.honest:.2g} per token is left")
        lines += [f"  or {cause}: {text}" for cause, text in verdict.alike.items()]
        lines += [f"  not {cause}: {text}" for cause, text in verdict.excluded.items()]
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])
