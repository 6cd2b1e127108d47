"""On-policy distillation: the columns that teachers write into a batch, and what is learnt from them.

A teacher reads the tokens that the student wrote, perhaps behind a prompt of its own, and answers at each of them:

    frozen engine    last hidden states [H] of each token; its output embedding once, which the student's ranks keep
    server           log-probabilities of its k likeliest tokens, or of the sampled token
    the student      as a frozen engine, with its present weights or their moving average, behind another prompt
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlite.algorithms import Mean, PerToken, TokenLogprobs, masked_mean, next_token
from rlite.algorithms.divergence import Divergence, OnDivergence, OnHidden, TaughtLogprobs
from rlite.data.packs import with_keys
from rlite.engine.train import RliteTrainEngine
from rlite.errors import DataError, blamed
from rlite.observability import stats_tracker
from rlite.trainer.rl.distillation_options import DistillationOptions, TeacherOptions, teacher_key
from rlite.trainer.rl.engines import Engines, LogprobPasses
from rlite.trainer.rl.objective import OwnLogprobs, PolicyLoss, predicts_counted
from rlite.trainer.run.training_run import TrainingRun

logger = logging.getLogger(__name__)


# -- what is learnt ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DistillationLoss(PolicyLoss, OnDivergence):
    """A policy loss with the divergence from the teacher as a term; `data` holds the columns of a teacher.

    Tokens that the policy loss rejects or drops keep their divergence.
    """

    divergence: Divergence
    distill_coef: float = 1.0
    """weight of the divergence"""
    learns_rewards: bool = True
    """false leaves the divergence, and the terms of entropy and KL"""

    def __call__(self, tokens: TokenLogprobs, data: Mapping[str, Any]) -> tuple[Tensor, dict[str, Mean | PerToken]]:
        """Return the scalar loss of a pack, and its metrics.

        Args:
            tokens: a `TaughtLogprobs` of the positions that predict the tokens, `[T]`.
            data: the pack's keys.
        """
        assert isinstance(tokens, TaughtLogprobs)
        divergence, mask = tokens.divergence, predicts_counted(data)
        loss, report = super().__call__(TaughtLogprobs.of(tokens, divergence, not self.learns_rewards), data)
        total = loss + self.distill_coef * self._mean(divergence, mask, data)
        return total, {**report, "divergence": Mean.of(divergence, mask)}


@dataclass(frozen=True)
class TaughtAdvantages:
    """Advantages of rewards, of a teacher, or of both."""

    of_rewards: Callable[..., TensorDict]
    coef: float
    """weight of log teacher - log student of the sampled token; 0 if the teacher is a term of the loss"""
    learns_rewards: bool

    def __call__(self, batch: TensorDict, **given: Any) -> TensorDict:
        """Return a batch with `advantages` [N, L]; see `compute_advantages`."""
        made = self.of_rewards(batch, **given)
        advantages = made["advantages"] if self.learns_rewards else torch.zeros_like(made["advantages"])
        if self.coef:
            old = batch["full_old_logprobs" if "full_old_logprobs" in batch else "old_logprobs"]
            is_taught = batch["loss_mask"].bool() & (batch["teacher"].roll(1, dims=1) >= 0)
            gap = torch.where(is_taught, batch["teacher_logprobs"] - old, 0.0)
            stats_tracker.scalar(divergence=masked_mean(-gap, is_taught))
            advantages = advantages + self.coef * gap
        return with_keys(made, advantages=advantages)


# -- what a teacher is shown -------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """An answer of the student."""

    text: str
    reward: float


class View(NamedTuple):
    """Prompt and teacher of one row."""

    teacher: int
    """number of the teacher; -1 is none"""
    prompt: Sequence[int] | None = None
    """tokens in place of the student's prompt; None keeps them"""


OWN_PROMPT = View(0)
"""one teacher reads what the student reads"""


@dataclass(frozen=True)
class Context:
    """The prompts that teachers see, which functions of the user make."""

    options: DistillationOptions
    functions: Mapping[str, Callable[..., Any]]
    """function of each teacher's `context`, by its name"""
    rows: Callable[[int], Mapping[str, Any]]
    """returns the row of the training data with a key"""
    encode: Callable[[Any], Sequence[int]]
    """tokenises a prompt: a text, or a list of messages"""
    decode: Callable[[Sequence[int]], str]
    """returns the text of tokens"""

    def views(self, batch: TensorDict) -> list[View]:
        """Return what the teacher of each row reads.

        Args:
            batch: has `row_key`.

        Raises:
            DataError: a row names no teacher of the run, or a context is no prompt.
        """
        rows = [self.rows(int(key)) for key in batch["row_key"]]
        names = [self._name(row) for row in rows]
        answers: list[Answer] = []
        if self.functions:
            rewards = batch["rewards"].float()
            rewards = rewards if rewards.dim() == 1 else rewards.sum(1)
            for number, mask in enumerate(batch["loss_mask"].bool()):
                text = self.decode(batch["input_ids"][number][mask].tolist())
                answers.append(Answer(text, float(rewards[number])))
        groups = batch["group_ids"].tolist()
        return [self._view(number, name, rows, answers, groups) for number, name in enumerate(names)]

    def _name(self, row: Mapping[str, Any]) -> str:
        by = self.options.by
        if by is None:
            return next(iter(self.options.teacher))
        if not isinstance(name := row.get(by), str) or name not in self.options.teacher:
            raise DataError(
                f"distill.by={by}: a row has {name!r:.200}; expected one of {', '.join(self.options.teacher)}"
            )
        return name

    def _view(
        self,
        number: int,
        name: str,
        rows: Sequence[Mapping[str, Any]],
        answers: Sequence[Answer],
        groups: Sequence[int],
    ) -> View:
        teacher, function = [*self.options.teacher].index(name), self.functions.get(name)
        if function is None:
            return View(teacher)
        siblings = [answers[n] for n, group in enumerate(groups) if group == groups[number] and n != number]
        what = f"{teacher_key(name)}.context={self.options.teacher[name].context}"
        with blamed(what):
            made = function(dict(rows[number]), answers[number], siblings)
        if made is None:
            return View(-1)
        if not isinstance(made, str | list) or not made:
            raise DataError(f"{what} returned {made!r:.200}; expected a text, a list of messages, or None")
        return View(teacher, self.encode(made))


class Shown(NamedTuple):
    """Rows as a teacher reads them."""

    batch: TensorDict
    shift: Tensor
    """place of a token of the student's row in the teacher's row, less its own place, [n]"""

    @classmethod
    def of(cls, batch: TensorDict, views: Sequence[View]) -> Shown:
        """Return rows with the prompts of their views; every token from the first that the student wrote follows."""
        ids, shifts = [], []
        for row, length, first, view in zip(
            batch["input_ids"], batch["attention_mask"].sum(1), batch["loss_mask"].int().argmax(1), views, strict=True
        ):
            own = row[: int(length)]
            prompt = own[:first] if view.prompt is None else torch.tensor(view.prompt, dtype=own.dtype)
            ids.append(torch.cat([prompt, own[first:]]))
            shifts.append(len(prompt) - int(first))
        mask = [torch.ones_like(row, dtype=torch.bool) for row in ids]
        columns = {"input_ids": pad_sequence(ids, True), "attention_mask": pad_sequence(mask, True)}
        return cls(TensorDict(columns, batch_size=[len(ids)]), torch.tensor(shifts))

    def returned(self, values: Tensor, length: int) -> Tensor:
        """Return values [n, M, ...] at the places of the student's tokens, [n, length, ...]."""
        if values.shape[1] == length and not self.shift.any():
            return values  # hidden states are too many to copy them without need
        place = (torch.arange(length) + self.shift[:, None]).clamp(0, values.shape[1] - 1)
        return values[torch.arange(len(values))[:, None], place]


# -- teachers ----------------------------------------------------------------------------------------------------------


class HiddenStates(OnHidden):
    """A post_hook for `forward` that returns the last hidden states [T, H]."""

    def __call__(self, tokens: Any, data: Mapping[str, Any]) -> Tensor:
        """Return the hidden states."""
        return tokens


class TeacherServer(Protocol):
    """A teacher behind HTTP."""

    def logprobs(self, rows: Sequence[Sequence[int]]) -> tuple[list[Tensor], list[Tensor]]:
        """Return ids and their log-probabilities at each token of each row, both [M, k]."""


@dataclass(frozen=True)
class Teachers:
    """Writes what the teachers say of a batch into it."""

    options: DistillationOptions
    engines: Engines
    """take turns on the device; one of them is the student"""
    temperature: float
    """divides the logits"""
    limits: Sequence[int]
    """most tokens of a row of each teacher"""
    longest: Sequence[int | None]
    """tokens of one microbatch of each teacher; None is the engine's default"""
    context: Context | None
    """prompts that teachers are shown; None: all rows have one teacher, which reads the student's prompt"""
    servers: Mapping[int, TeacherServer]
    """teachers on servers, by their number"""
    run: TrainingRun
    """counts the steps"""

    @stats_tracker.record_timing("teacher")
    def with_columns(self, batch: TensorDict) -> TensorDict:
        """Return a batch with `teacher` [N, L], and with the hidden states or the log-probabilities of the teachers."""
        views = [OWN_PROMPT] * len(batch) if self.context is None else self.context.views(batch)
        numbers = torch.tensor([view.teacher for view in views])
        is_next = next_token_mask(batch["loss_mask"])
        columns: dict[str, Tensor] = {"teacher": torch.where(is_next, numbers[:, None], -1).short()}
        if any(view.prompt is not None for view in views):
            columns["teacher_view"] = torch.where(is_next, torch.arange(1, len(batch) + 1)[:, None], 0).int()
        said = {}
        for number, (name, own) in enumerate(self.options.teacher.items()):
            rows = (numbers == number).nonzero()[:, 0]
            if len(rows):
                shown = Shown.of(batch[rows], [views[row] for row in rows.tolist()])
                self._check_length(shown.batch, number, name)
                answer = self._ask(number, own, shown)
                if own.weights == "frozen":
                    _check_finite(answer, name)
                said[number] = rows, {key: shown.returned(x, is_next.shape[1]) for key, x in answer.items()}
        if self.options.needs_hidden:
            self._give_heads()
        columns |= {key: _joined(key, said, is_next.shape) for key in {key for _, own in said.values() for key in own}}
        stats_tracker.scalar(taught_tokens=float((columns["teacher"] >= 0).sum() / is_next.sum().clamp(min=1)))
        return with_keys(batch, **columns)

    def _check_length(self, batch: TensorDict, number: int, name: str) -> None:
        if (longest := batch["input_ids"].shape[1]) > self.limits[number]:
            told = f"its prompt and an answer have {longest} tokens, and it reads at most {self.limits[number]}"
            raise DataError(f"{teacher_key(name)}: {told}; raise max_length_per_device, or show it less")

    def _ask(self, number: int, own: TeacherOptions, shown: Shown) -> dict[str, Tensor]:
        """Return what a teacher says of rows, by column, [n, M, ...]."""
        if number in self.servers:
            return self._served(self.servers[number], shown)
        engine = self.engines.teachers.get(number, self.engines.actor)
        self.engines.move_to_device(engine)
        if own.weights != "average":
            return self._said(number, own, engine, shown)
        if self.run.step and not all(engine.has_average()):
            logger.warning("distill: there is no moving average of the student's weights: it begins with this step's")
        engine.average_weights(own.decay)
        engine.exchange_average()
        try:
            return self._said(number, own, engine, shown)
        finally:
            engine.exchange_average()

    def _said(self, number: int, own: TeacherOptions, engine: RliteTrainEngine, shown: Shown) -> dict[str, Tensor]:
        if not self.options.needs_hidden:
            hook = OwnLogprobs(temperature=self.temperature, is_full=True)
            return {"teacher_logprobs": engine.forward(shown.batch, hook, self.longest[number])}
        if own.weights != "frozen":
            engine.keep_own_head(number)
        return {"teacher_hidden": engine.forward(shown.batch, HiddenStates(), self.longest[number])}

    def _give_heads(self) -> None:
        """Give the student's workers the heads of frozen teachers that they do not have: of all, after a restart."""
        engines = self.engines
        engines.move_to_device(engines.actor)
        known = set.intersection(*map(set, engines.actor.heads_of_teachers()))
        for number in engines.teachers.keys() - known:
            engines.move_to_device(engines.teachers[number])
            [head] = [found for found in engines.teachers[number].output_head() if found is not None]
            engines.move_to_device(engines.actor)
            engines.actor.put_teacher_head(number, *head)

    def _served(self, server: TeacherServer, shown: Shown) -> dict[str, Tensor]:
        lengths = shown.batch["attention_mask"].sum(1).tolist()
        rows = [row[:length].tolist() for row, length in zip(shown.batch["input_ids"], lengths, strict=True)]
        ids, logprobs = server.logprobs(rows)
        if self.options.support == "sampled":
            return {"teacher_logprobs": pad_sequence(logprobs, True)[..., 0]}
        return {"teacher_ids": pad_sequence(ids, True, -1).int(), "teacher_logprobs": pad_sequence(logprobs, True)}


def _check_finite(answer: Mapping[str, Tensor], name: str) -> None:
    if wrong := [key for key, x in answer.items() if not all(row.isfinite().all() for row in x)]:
        raise DataError(f"{teacher_key(name)}: its {wrong[0]} hold NaN or infinity; check its weights and its dtype")


def next_token_mask(loss_mask: Tensor) -> Tensor:
    """Return the positions [N, L] that predict a token that counts."""
    return next_token(loss_mask.bool())


def _joined(key: str, said: Mapping[int, tuple[Tensor, Mapping[str, Tensor]]], shape: Sequence[int]) -> Tensor:
    """Return a column [N, L, ...] of the rows of all teachers; narrower hidden states fill the first places."""
    parts = [(rows, columns[key]) for rows, columns in said.values()]
    if len(parts[0][0]) == shape[0]:
        return parts[0][1]
    like = max((values for _, values in parts), key=lambda values: values.shape[-1])
    joined = like.new_zeros(*shape, *like.shape[2:])
    for rows, values in parts:
        if values.dim() > 2:
            values = F.pad(values, (0, like.shape[-1] - values.shape[-1]))
        joined[rows] = values.to(like.dtype)
    return joined


@dataclass(frozen=True, kw_only=True)
class TaughtPasses(LogprobPasses):
    """The forward passes of a run with teachers."""

    teachers: Teachers

    def with_reference(self, batch: TensorDict) -> TensorDict:
        """Return a batch with the reference's log-probabilities, if it has one, and with the columns of teachers."""
        return self.teachers.with_columns(super().with_reference(batch))
