"""Options of `rlite replay` and `rlite audit`. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from rlite.config import Count, Natural
from rlite.key_value import named, spelled
from rlite.trainer.options import AnnouncedOptions

FLAGS = {"--pdb": "pdb=true", "--with-data": "with_data=true", "--with-weights": "with_weights=true"}


class ProofOptions(AnnouncedOptions):
    """Options of a command that looks at one run."""

    run: str
    """folder of the run, or a bundle of one of its steps; the argument without a key"""
    code: str | None = None
    """Python file of yours that registers losses, advantages or optimizers of the run, or that has its rewards. Without
    it no code of the run is executed; also `--code FILE.py`"""
    variables: list[str] = []
    """variables of the environment that the run's options may read, if it has not kept their values"""
    result: str | None = None
    """file to which the result is written as JSON; also `--result FILE.json`"""

    @classmethod
    def arguments(cls, argv: Sequence[str]) -> list[str]:
        """Return the arguments of the command in the form `KEY=VALUE`."""
        flags = [FLAGS.get(argument, argument) for argument in argv]
        return named(spelled(flags, {name.replace("_", "-"): name for name in cls.model_fields}), ["run"])


class ReplayConfig(ProofOptions):
    """Options of `rlite replay RUN --step N`."""

    help_arguments: ClassVar[str] = "RUN --step N"
    help_example: ClassVar[str] = "runs/grpo --step 12"

    step: Count | None = None
    """step to make again; default: the last one of metrics.jsonl"""
    group: Natural | None = None
    """show the tokens of one group: its number in the record, or of a pair or row in the batch; no update is made"""
    microbatch: Natural | None = None
    """show the tokens of one microbatch, counted from 0; no update is made"""
    pdb: bool = False
    """stop in the loss; also `--pdb`"""
    layout: Literal["one", "own"] = "one"
    """one: one device. own: the launcher and the devices of the run"""
    bundle: str | None = None
    """write what the step needs to one file instead; also `--bundle FILE.zip`"""
    with_data: bool = False
    """the bundle has the tokens of the step, prompts and answers; without them it can be checked, and not be replayed;
    also `--with-data`"""
    weights: str | None = None
    """folder of the run that has the checkpoints, for a bundle without weights"""
    any_versions: bool = False
    """go on although packages have other versions than those that made the step"""
    with_weights: bool = False
    """the bundle has the checkpoint before the step and the model's config and tokenizer; also `--with-weights`"""


class AuditConfig(ProofOptions):
    """Options of `rlite audit RUN`."""

    help_arguments: ClassVar[str] = "RUN"
    help_example: ClassVar[str] = "runs/grpo"

    replay: Literal["checkpoints", "none"] = "checkpoints"
    """checkpoints: make the steps between two checkpoints again, and compare the weights; none: only read"""
    max_problems: Count = 20
    """contradictions that are shown; all of them are counted"""
