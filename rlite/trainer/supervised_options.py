"""Options of the trainers that learn from rows. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge
from pydantic import Field

import rlite
from rlite.config import Count, FinitePositive, Options, Rate, changed
from rlite.help import single_or_named
from rlite.registry import algorithms
from rlite.trainer.held_out import GeneratedOptions, HeldOutOptions, key_of
from rlite.trainer.model.options import FrozenModelOptions, LayoutOptions, ModelOptions
from rlite.trainer.options import LaunchOptions, RecordOptions, RunOptions, ServingOptions, TableOptions
from rlite.trainer.run.best import check_evaluated
from rlite.types import PreferenceDivergence


class DataOptions(TableOptions):
    """Rows to learn from."""

    max_length: Annotated[int, Ge(2)] = 4096
    """longest row in tokens; a longer one is cut at its end, and counted"""
    batch_size: Count = 128
    """rows (of preferences: pairs) in one optimizer step"""
    escape_special_tokens: bool = False
    """special tokens in messages, but for the assistant's, are plain text"""
    end_token: Literal["keep", "append"] | None = None
    """end of learnt answers. Default: the template's end becomes an end token of the model; an answer without any is
    refused. append puts the tokenizer's end token there; keep learns what the template writes, and changes no model"""
    last_turn_only: bool = False
    """sft: of each conversation, learn the last answer alone"""


class EpochOptions(RunOptions):
    """A run of a number of epochs."""

    save_dir: str = "runs/supervised"
    """folder of the run: metrics.jsonl, latest/ (Hugging Face), state/ (to resume from), config.yaml"""
    n_epochs: Count = 1
    """passes over the data"""
    total_steps: Count | None = None
    """optimizer steps of a run with data.streaming=true, in place of n_epochs"""
    save_freq: Count = 100
    """steps between two checkpoints"""
    test_freq: Count = 100
    """steps between two evaluations on test_data, if there is some"""

    @property
    def limit_key(self) -> str:
        """The option that says how long the run is."""
        return "trainer.n_epochs" if self.total_steps is None else "trainer.total_steps"


class AnsweringOptions(RecordOptions, EpochOptions):
    """A run of a number of epochs, whose evaluations may have answers."""


class SupervisedConfig(LaunchOptions):
    """Options of every trainer that learns from rows."""

    help_first: ClassVar[tuple[str, ...]] = (
        *("data.path", "test_data.path", "data.max_length", "data.batch_size"),
        *("trainer.n_epochs", "trainer.save_dir", "trainer.console", "launcher", "num_devices"),
    )

    learns_turns: ClassVar[bool] = False
    """true if several answers of a conversation may be learnt"""

    data: DataOptions = DataOptions()
    test_data: dict[str, HeldOutOptions] = Field(default={}, json_schema_extra=single_or_named)
    """rows to evaluate on: test_data.path=... of one set, or test_data.NAME.path=... of several, whose metrics are
    NAME/test_loss, ..."""
    trainer: EpochOptions = EpochOptions()

    def problems(self) -> Iterator[str]:
        """Yield a message for missing data."""
        if self.data.path is None and not self.data.mixture:
            yield "data.path: required and not set (or data.mixture.NAME.path of several tables)"
        if self.data.streaming and self.trainer.total_steps is None:
            yield "trainer.total_steps: required with data.streaming=true, which does not know how long an epoch is"
        if self.data.streaming and self.trainer.n_epochs > 1:
            yield f"trainer.n_epochs={self.trainer.n_epochs}: data.streaming=true ends after trainer.total_steps steps"
        if self.trainer.total_steps is not None and not self.data.streaming:
            yield "trainer.total_steps is an option of data.streaming=true; use trainer.n_epochs"
        if self.data.last_turn_only and not self.learns_turns:
            yield "data.last_turn_only is an option of sft; here only the answers are learnt"

    def check_complete(self) -> None:
        """Check that a run that chooses by evaluations has data for them."""
        if not self.test_data:
            check_evaluated(self.trainer, ())

    def headline(self) -> str:
        """Return in a few words what is trained, on which data, and where the result goes."""
        model = next(group.model_name for _, group in self if isinstance(group, LayoutOptions))
        return f"{model} on {self.data.paths}, into {self.trainer.save_dir}"


class GenerationOptions(ServingOptions):
    """The engine that answers the prompts of evaluations. On GPUs the trained model leaves them meanwhile."""

    max_num_seqs: Count = 64
    """sequences that a replica decodes at once"""
    max_new_tokens: Count = 1024
    """longest answer, unless the sampling of a set says otherwise"""


class SftConfig(SupervisedConfig):
    """Options of `rlite sft`."""

    help_example: ClassVar[str] = "actor.model_name=Qwen/Qwen3-0.6B data.path=chats.jsonl"
    help_first: ClassVar[tuple[str, ...]] = ("actor.lr", "actor.lora", *SupervisedConfig.help_first)
    learns_turns: ClassVar[bool] = True

    actor: ModelOptions
    test_data: dict[str, GeneratedOptions] = Field(default={}, json_schema_extra=single_or_named)  # type: ignore[assignment]
    """rows to evaluate on: test_data.path=... of one set, or test_data.NAME.path=... of several, whose metrics are
    NAME/test_loss, ... A set with a reward holds prompts, which the model answers: NAME/accuracy, ..."""
    generation: GenerationOptions = GenerationOptions()
    trainer: AnsweringOptions = AnsweringOptions(save_dir="runs/sft")

    def problems(self) -> Iterator[str]:
        """Yield a message for a mean that this loss does not have, and for options that only answers have."""
        yield from super().problems()
        for name, own in self.test_data.items():
            unread = [option for option in changed(own) if option not in HeldOutOptions.model_fields]
            if unread and not own.is_generated:
                remedy = f"give {key_of(name)}.reward.path as well, or leave it out"
                yield f"{key_of(name)}.{unread[0]} is an option of answers that the model generates; {remedy}"
        if self.actor.avg_level == "constant":
            yield "actor.avg_level=constant divides by the length of generated answers; use token, sequence"


class PreferenceModelOptions(ModelOptions):
    """A model that learns from preference pairs, or from single answers with a label."""

    def problems(self) -> Iterator[str]:
        """Yield a message for a mean that these losses do not have, after those of every model."""
        yield from super().problems()
        if self.avg_level != "token":
            yield f"avg_level={self.avg_level}: this loss is a mean over pairs or rows; leave it out"


class RewardModelOptions(PreferenceModelOptions):
    """The model that learns to score."""

    lr: Rate = 1e-5
    """peak learning rate"""
    center_coefficient: Rate = 0.0
    """weight of the squared sum of a pair's scores, which keeps scores near 0"""


class RmConfig(SupervisedConfig):
    """Options of `rlite rm`."""

    help_example: ClassVar[str] = "critic.model_name=Qwen/Qwen3-0.6B data.path=pairs.jsonl"
    help_first: ClassVar[tuple[str, ...]] = ("critic.lr", "critic.lora", *SupervisedConfig.help_first)

    critic: RewardModelOptions
    trainer: EpochOptions = EpochOptions(save_dir="runs/rm")


class PreferenceLossOptions(Options):
    """A loss of DPO's family."""

    name: str = "sigmoid"
    """a name of rlite.algorithms.PREFERENCE_LOSSES: sigmoid, robust, hinge, ipo, exo, nca, bco, sppo, apo_zero,
    apo_down, discopop, orpo, simpo"""
    options: dict[str, Any] = {}
    """keyword parameters of the loss, such as {label_smoothing: 0.1}"""
    length_normalised: bool = False
    """log-probabilities are means over the answer's tokens instead of sums"""
    divergence: PreferenceDivergence = "reverse_kl"
    """divergence from the reference; reverse_kl is DPO's"""
    tail_weight: Rate = 1.0
    """weight of the tokens by which the longer answer of a pair exceeds the shorter one (LD-DPO); 1 is DPO"""
    reference_free: bool = False
    """compare log-probabilities themselves, not their ratios to a reference; no reference is then built"""
    nll_weight: Rate = 0.0
    """weight of the negative log-likelihood of the chosen answer, the mean over its tokens, which is added"""

    def problems(self) -> Iterator[str]:
        """Yield a message for a reference that is left out; raise an error for a loss that cannot be called so."""
        algorithms("preference loss").check(self.name, self.options)
        if self.reference_free and self.divergence != "reverse_kl":
            yield f"divergence={self.divergence}: reference_free=true has no reference to diverge from; leave it out"

    def slow_problems(self) -> Iterator[str]:
        """Yield a message for a loss whose reference or lengths are not as it needs them."""
        is_of_means = self.reference_free and self.length_normalised
        if self.name in rlite.algorithms.OF_PROBABILITIES and not is_of_means:
            remedy = "set reference_free=true and length_normalised=true"
            yield f"name={self.name}: this loss compares mean probabilities of answers, without a reference; {remedy}"


class DpoActorOptions(PreferenceModelOptions):
    """The policy that learns to prefer."""

    lr: Rate = 5e-7
    """peak learning rate"""
    beta: FinitePositive = 0.1
    """strength of the regularisation towards the reference"""
    preference_loss: PreferenceLossOptions = Field(default_factory=PreferenceLossOptions)
    """the loss to minimise"""


class DpoConfig(SupervisedConfig):
    """Options of `rlite dpo`."""

    help_example: ClassVar[str] = "actor.model_name=runs/sft/latest data.path=pairs.jsonl"
    help_first: ClassVar[tuple[str, ...]] = ("actor.lr", "actor.beta", "actor.lora", *SupervisedConfig.help_first)

    actor: DpoActorOptions
    ref_actor: FrozenModelOptions = FrozenModelOptions(offload_model=False)
    trainer: EpochOptions = EpochOptions(save_dir="runs/dpo")

    def problems(self) -> Iterator[str]:
        """Yield a message for options of a reference that the loss does not have, after those of the data."""
        yield from super().problems()
        if self.actor.preference_loss.reference_free and self.ref_actor != FrozenModelOptions(offload_model=False):
            yield "ref_actor: actor.preference_loss.reference_free=true has no reference; leave ref_actor out"


class KtoActorOptions(PreferenceModelOptions):
    """The policy that learns from single answers."""

    lr: Rate = 1e-6
    """peak learning rate"""
    beta: FinitePositive = 0.1
    """strength of the regularisation towards the reference"""
    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    """kto measures rewards from an estimate of the KL to the reference, apo_zero_unpaired from 0: it takes two forward
    passes less in each step"""
    desirable_weight: Rate = 1.0
    """weight of the loss of desirable answers"""
    undesirable_weight: Rate = 1.0
    """weight of the loss of undesirable answers"""


class KtoConfig(SupervisedConfig):
    """Options of `rlite kto`."""

    help_example: ClassVar[str] = "actor.model_name=runs/sft/latest data.path=rows.jsonl"

    actor: KtoActorOptions
    ref_actor: FrozenModelOptions = FrozenModelOptions(offload_model=False)
    trainer: EpochOptions = EpochOptions(save_dir="runs/kto")

    def problems(self) -> Iterator[str]:
        """Yield a message for batches of one row, in which no answer belongs to another prompt."""
        yield from super().problems()
        if self.actor.loss_type == "kto" and self.data.batch_size == 1:
            yield (
                "data.batch_size=1: the estimate of the KL pairs each prompt with the answer to another prompt of the "
                "batch; use at least 2, or actor.loss_type=apo_zero_unpaired"
            )
