"""Options of on-policy distillation: teachers, and what is learnt from them. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from annotated_types import Gt, Lt
from pydantic import Field

from rlite.config import Count, Options, Rate, Share
from rlite.help import single_or_named
from rlite.trainer.rl.model_options import ReferenceOptions

DECAY, BETA, K = 0.99, 0.5, 64
"""defaults of options that only some choices read"""
Support = Literal["full", "student_topk", "teacher_topk", "union", "sampled"]
"""tokens of the vocabulary that a divergence tells apart"""
SERVED = ("teacher_topk", "sampled")
"""supports for which servers return log-probabilities"""


def teacher_key(name: str) -> str:
    """Return the key of a teacher's options, for messages; a single teacher may have no name."""
    return f"distill.teacher.{name}" if name else "distill.teacher"


class TeacherOptions(ReferenceOptions):
    """A model that judges the student's tokens; options that are not set are the actor's."""

    model_name: str | None = None
    """folder or hub name of the teacher's checkpoint, or with url the name of the model on the server"""
    weights: Literal["frozen", "current", "average"] = "frozen"
    """frozen: those of model_name; current: the student's own, at each step; average: a moving average of the
    student's. The last two teach by what they are shown (context)"""
    decay: Share = DECAY
    """share of the moving average that stays at each step"""
    context: str | None = None
    """file.py:function of (row, answer, siblings) that returns the prompt that the teacher sees in place of the
    student's: a text, a list of messages, or None if the answer has no teacher"""
    url: str | None = None
    """address of a server with the teacher: vLLM, SGLang, or another one with OpenAI's completions"""
    key_env: str | None = None
    """environment variable with the server's key"""
    key_file: str | None = None
    """file with the server's key, which its owner alone may read"""
    max_concurrent: Count = 32
    """requests to the server at the same time"""

    def problems(self) -> Iterator[str]:
        """Yield a message for each rule between the teacher's place, weights and context that does not hold."""
        yield from super().problems()
        if self.weights == "frozen" and self.model_name is None:
            yield "model_name: a teacher with weights=frozen needs a checkpoint, or url with the name of its model"
        if self.weights != "frozen" and (self.model_name or self.url):
            yield f"weights={self.weights}: they are the student's; leave model_name and url out"
        if self.weights == "current" and self.context is None:
            yield "weights=current: without a context the teacher is the student, from which nothing is learnt"
        if self.weights != "average" and self.decay != DECAY:
            yield f"decay={self.decay} is an option of weights=average"
        if self.url is None and (self.key_env or self.key_file):
            yield "key_env and key_file are options of a server (url)"
        if self.key_env and self.key_file:
            yield "key_env and key_file: give one of them"

    @property
    def has_engine(self) -> bool:
        """True if the teacher is an engine of its own in the run."""
        return self.weights == "frozen" and self.url is None


class DistillationOptions(Options):
    """On-policy distillation: the student learns its teacher's distribution of each token that it writes itself."""

    teacher: Annotated[dict[str, TeacherOptions], Field(json_schema_extra=single_or_named)] = {}
    """the teacher: distill.teacher.model_name=..., or distill.teacher.NAME.model_name=... for several, one for each row
    (by)"""
    by: str | None = None
    """column of the training data with the name of the row's teacher"""
    direction: Literal["reverse", "forward", "jsd"] = "reverse"
    """reverse: KL(student || teacher), which settles on what the teacher finds likely; forward: KL(teacher || student),
    which covers all of it; jsd: generalised Jensen-Shannon divergence between them"""
    beta: Annotated[float, Gt(0), Lt(1)] = BETA
    """mixture of jsd: near 0 it resembles forward, near 1 reverse"""
    support: Support = "full"
    """tokens that are told apart at each place: the whole vocabulary; the k likeliest of the student, of the teacher or
    of both; or the sampled token alone. The rest of the vocabulary counts as one token"""
    k: Count = K
    """likeliest tokens of each model, for supports of that kind"""
    coef: Rate = 1.0
    """weight of the divergence in the loss or in the advantages"""
    use_as: Literal["loss", "advantage"] = "loss"
    """loss: the divergence is minimised; advantage: log teacher - log student of the sampled token is added to its
    advantage, for the policy loss"""
    task_rewards: bool = True
    """learn from rewards as well"""

    def problems(self) -> Iterator[str]:
        """Yield a message for each rule between teachers, direction and support that does not hold."""
        if not self.teacher:
            return
        if self.use_as == "advantage" and (self.support, self.direction) != ("sampled", "reverse"):
            why = "an advantage is of the sampled token, and its mean is the reverse KL"
            yield f"use_as=advantage: {why}; set support=sampled and direction=reverse"
        if self.beta != BETA and self.direction != "jsd":
            yield f"beta={self.beta} is an option of direction=jsd"
        if self.k != K and self.support in ("full", "sampled"):
            yield f"k={self.k}: support={self.support} has no likeliest tokens"
        if served := [name for name, own in self.teacher.items() if own.url is not None]:
            if self.support not in SERVED:
                told = "a server returns log-probabilities of its own likeliest tokens or of given ones"
                yield f"support={self.support}: {told}; use {' or '.join(SERVED)} with url"
            elif len(served) < len(self.teacher) and self.support != "sampled":
                yield "teacher: with teachers on servers and in the run, use support=sampled"
        if len(self.teacher) > 1 and self.by is None:
            yield f"teacher: {', '.join(self.teacher)} are given; by=COLUMN names the teacher of each row"
        if self.by is not None and len(self.teacher) == 1:
            yield f"by={self.by} chooses among several teachers, and there is one"

    @property
    def divergence_beta(self) -> float:
        """The direction as `Divergence.beta`."""
        return {"forward": 0.0, "reverse": 1.0, "jsd": self.beta}[self.direction]

    @property
    def needs_hidden(self) -> bool:
        """True if teachers send hidden states."""
        return self.support != "sampled" and all(own.url is None for own in self.teacher.values())

    @property
    def is_without_rewards(self) -> bool:
        """True if only teachers teach."""
        return bool(self.teacher) and not self.task_rewards
