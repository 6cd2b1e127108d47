"""Options of the trainers that learn from rows, and options that all trainers share. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le
from pydantic import Field, field_validator

import rlite
from rlite.config import Count, FinitePositive, Natural, Options, Positive, Rate, Seed, Share, single_or_named
from rlite.data.source import Source
from rlite.engine.fsdp2.options import BalanceBy
from rlite.errors import ConfigError
from rlite.imports import import_own_code
from rlite.nn.options import LoraOptions, check_liger_installed
from rlite.observability.sinks.base import sink_problems
from rlite.parallel.dims import ParallelDims
from rlite.trainer.callbacks import CALLBACKS
from rlite.trainer.held_out.options import HeldOutOptions, key_of
from rlite.trainer.held_out.prompt_options import GeneratedOptions
from rlite.types import Aggregation, KLEstimator, PreferenceDivergence, Schedule

RESERVED_TEMPLATE_OPTIONS = {
    *("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
    *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
    *("return_assistant_tokens_mask", "rows", "tokenizer", "where", "escape_special_tokens"),
}
"""arguments of `apply_chat_template`, and of rlite's functions around it, that are not the user's"""


OptimizerName = Literal["adamw", "muon"]


class ParameterGroupOptions(Options):
    """Parameters that are trained in another way than the rest."""

    pattern: str
    """regular expression, searched in the names of the parameters; the first group that matches a name has it"""
    lr_factor: Rate = 1.0
    """factor of the learning rate"""
    weight_decay: Rate | None = None
    """weight decay; null is that of the rest"""
    freeze: bool = False
    """do not train these parameters"""

    def problems(self) -> Iterator[str]:
        """Yield a message for a pattern that is no regular expression, and for options that freezing leaves unused."""
        try:
            re.compile(self.pattern)
        except re.error as error:
            yield f"pattern={self.pattern}: no regular expression: {error}"
        if self.freeze and (self.lr_factor != 1 or self.weight_decay is not None):
            yield "freeze=true: lr_factor and weight_decay are of parameters that are trained; leave them out"


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """AdamW or Muon with a schedule over `total_steps` optimizer steps."""

    name: OptimizerName = "adamw"
    lr: float
    weight_decay: float
    scheduler: Schedule
    warmup_steps: int
    total_steps: int
    lr_end: float = 0.0
    """rate at the last step"""
    power: float = 1.0
    """exponent of the schedule "polynomial" """
    parameter_groups: Mapping[str, ParameterGroupOptions] = field(default_factory=dict)


class LayoutOptions(Options):
    """A model and its layout on the devices: world = ddp_size x fsdp x sp_size x tp_size."""

    model_name: str
    """folder or hub name of a Hugging Face checkpoint"""
    ddp_size: Count = 1
    """copies of the model; each is sharded over world / ddp_size devices"""
    tp_size: Count = 1
    """devices that share each matrix (tensor parallel)"""
    sp_size: Count = 1
    """devices that share the tokens of a sequence (context parallel)"""
    max_length_per_device: Count = 16384
    """tokens of one microbatch on a device; the longest sequence is tp_size x sp_size times as long"""


class ModelOptions(LayoutOptions):
    """A model that is trained."""

    balance_by: BalanceBy = "tokens"
    """quantity that devices share evenly: tokens, or estimated operations, in which long sequences count for more"""
    packing_method: Literal["first_fit_decreasing", "karmarkar_karp"] = "first_fit_decreasing"
    """method that packs a device's rows into microbatches: the fewest, each as full as possible, or as many of even
    size, which lowers the peak of memory"""
    use_liger_kernel: bool = False
    """RMSNorm, rotary embedding and SwiGLU as Triton kernels (package liger-kernel); GPUs only"""
    gradient_checkpointing: bool = True
    """recompute activations in the backward pass"""
    offload_optimizer: bool = True
    """keep the optimizer's state in host memory between optimizer steps"""
    avg_level: Aggregation = "token"
    """mean of the loss over: all tokens; sequences' means; tokens divided by a constant length (Dr. GRPO's paper). A
    sequence is a row: a trajectory of several rows has as many means, not one"""
    optimizer: OptimizerName = "adamw"
    """muon orthogonalises the updates of matrices inside of layers, and leaves embeddings, heads, norms and biases to
    AdamW; both take the same learning rate and weight decay"""
    lr: Rate = 5e-6
    """peak learning rate"""
    weight_decay: Rate = 1e-2
    """weight decay"""
    parameter_groups: dict[str, ParameterGroupOptions] = {}
    """parameters to train otherwise, by a name of your own, such as {norms: {pattern: norm, weight_decay: 0}}; keys:
    pattern (a regular expression), lr_factor, weight_decay, freeze"""
    max_grad_norm: Positive = 1.0
    """global norm to which gradients are clipped"""
    scheduler: Schedule = "cosine"
    """schedule of the learning rate after the warm-up"""
    warmup_ratio: Share = 0.1
    """share of all optimizer steps in which the rate rises"""
    lr_end: Rate = 0.0
    """rate at the last step, to which linear, cosine and polynomial fall"""
    power: FinitePositive = 1.0
    """exponent of scheduler=polynomial: the rate falls as (share of steps left)^power"""
    disable_dropout: bool = True
    """train without the dropout of the checkpoint's config, which exports keep; passes that only infer never have it"""
    lora: LoraOptions | None = None
    """train adapters beside the weights, which stay as they are; null trains the weights"""

    def problems(self) -> Iterator[str]:
        """Yield a message for each rule of the kernels and of the schedule that does not hold."""
        if self.use_liger_kernel:
            check_liger_installed()
        yield from schedule_problems(self.scheduler, self.lr, self.lr_end, self.power)

    def optimizer_options(self, total_steps: int) -> OptimizerOptions:
        """Return the optimizer's options for a run of `total_steps` optimizer steps."""
        return OptimizerOptions(
            name=self.optimizer,
            lr=self.lr,
            weight_decay=self.weight_decay,
            scheduler=self.scheduler,
            warmup_steps=round(self.warmup_ratio * total_steps),
            total_steps=total_steps,
            lr_end=self.lr_end,
            power=self.power,
            parameter_groups=self.parameter_groups,
        )

    def build_options(self, world_size: int, seed: int) -> dict[str, Any]:
        """Return the keywords of `RliteTrainEngine.build` for a world of `world_size` devices.

        Raises:
            ConfigError: the sizes do not divide the world; the message names the equation.
        """
        dims = ParallelDims.of_world(world_size, self.ddp_size, self.sp_size, self.tp_size)
        return {
            "tensor_parallel_size": world_size // dims.copies,
            "data_parallel_size": dims.copies,
            "tp_size": self.tp_size,
            "sp_size": self.sp_size,
            "max_tokens_per_microbatch": self.max_length_per_device,
            "balance_by": self.balance_by,
            "packing_method": self.packing_method,
            "max_grad_norm": self.max_grad_norm,
            "gradient_checkpointing": self.gradient_checkpointing,
            "use_liger_kernel": self.use_liger_kernel,
            "offload_optimizer": self.offload_optimizer,
            "seed": seed,
        }


def frozen_build_options(build_options: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Return the build options of a frozen model: parameters are stored in the dtype that it computes in.

    Float32 master weights serve the small steps of an optimizer; without one, nothing reads their low bits.
    """
    return {**build_options, "param_dtype": "bfloat16" if device == "cuda" else "float32"}


def schedule_problems(scheduler: Schedule | None, lr: float, lr_end: float, power: float | None) -> Iterator[str]:
    """Yield a message for each rule of a learning-rate schedule that does not hold.

    Args:
        scheduler: the schedule; None if it is another model's.
        lr: peak rate.
        lr_end: rate at the last step.
        power: exponent of the polynomial schedule; None if it is another model's.
    """
    if scheduler is not None and power not in (None, 1.0) and scheduler != "polynomial":
        yield f"power={power} is of scheduler=polynomial; scheduler={scheduler} has none"
    if lr_end and scheduler == "constant":
        yield f"lr_end={lr_end}: scheduler=constant never falls; use linear, cosine or polynomial"
    elif lr_end and lr_end >= lr:
        yield f"lr_end={lr_end}: expected less than lr={lr}, the peak from which the rate falls"


def check_kl_loss(estimator: KLEstimator) -> None:
    """Check that an estimator of the KL can be a loss.

    Raises:
        ConfigError: its gradient is 0 in expectation.
    """
    if estimator == "k1":
        raise ConfigError(
            "kl.loss_estimator=k1: its gradient is that of log pi, which is 0 in expectation, so that it would add "
            "noise and no penalty. Use k2, whose gradient is that of the KL, or kl.type=reward, where k1 is unbiased"
        )


class FrozenModelOptions(Options):
    """A model beside the actor that is not trained; options that are not set are the actor's."""

    model_name: str | None = None
    """folder or hub name of a Hugging Face checkpoint; default: the actor's, before training. With actor.lora, and if
    nothing else is set here, the actor itself is the reference, with its adapters switched off"""
    use_liger_kernel: bool | None = None
    """RMSNorm, rotary embedding and SwiGLU as Triton kernels (package liger-kernel); GPUs only"""
    offload_model: bool | None = None
    """leave the device to the other models while it is not used"""

    def problems(self) -> Iterator[str]:
        """Yield a message for missing kernels."""
        if self.use_liger_kernel:
            check_liger_installed()
        yield from ()


Columns = dict[str, str | None]


class SourceOptions(Options):
    """One of the tables that a run mixes."""

    path: str
    """table, in the form of data.path"""
    weight: FinitePositive | None = None
    """share of the rows of an epoch, relative to the other weights; give it to all sources or to none"""
    columns: Columns | None = None
    """rlite's names of columns and the table's; default: data.columns"""


class SingleTableOptions(Options):
    """A table of rows, and how its conversations are read."""

    path: str | None = None
    """JSON, JSONL, CSV, Parquet or Arrow file, datasets folder or hub name; optionally split@path:subset"""
    columns: Columns = {}
    """names of columns: rlite's name = the table's, such as {response: answer}; null hides a column"""
    system_prompt: str | None = None
    """system message before conversations that do not begin with one"""
    chat_template_options: dict[str, Any] = {}
    """keyword arguments of the chat template, such as {enable_thinking: false}"""

    def problems(self) -> Iterator[str]:
        """Yield a message for template options that are rlite's own."""
        if own := sorted(RESERVED_TEMPLATE_OPTIONS & self.chat_template_options.keys()):
            yield f"chat_template_options.{own[0]}: rlite sets {', '.join(own)} itself; leave it out"


class TableOptions(SingleTableOptions):
    """The rows that a run learns from."""

    mixture: dict[str, SourceOptions] = {}
    """several tables in place of path, by names of your own, such as {math: {path: m.jsonl, weight: 0.3}, chat: ...};
    keys: path, weight, columns. Without weights every row occurs once in an epoch"""
    system_prompt: str | None = None
    """system message before conversations that do not begin with one, also in test_data"""
    chat_template_options: dict[str, Any] = {}
    """keyword arguments of the chat template, such as {enable_thinking: false}, also for test_data"""
    streaming: bool = False
    """read the rows while training, for data that does not fit in memory: JSON lines, Parquet, folders of these"""
    shuffle_buffer: Count = 10_000
    """streaming: rows in memory among which the next one is chosen at random; 1 keeps their order"""

    def problems(self) -> Iterator[str]:
        """Yield a message for two kinds of sources, for weights of some sources, and for reserved template options."""
        if self.path is not None and self.mixture:
            yield "mixture: path and mixture are given; expected one of them"
        without = [name for name, source in self.mixture.items() if source.weight is None]
        if 0 < len(without) < len(self.mixture):
            yield f"mixture.{without[0]}.weight: missing, and other sources have one; give it to all or to none"
        if self.streaming and self.mixture:
            yield "streaming=true streams one table; mix the rows beforehand, or leave streaming out"
        yield from super().problems()

    @property
    def paths(self) -> str:
        """Paths of the tables, in words."""
        return self.path or ", ".join(source.path for source in self.mixture.values()) or "rows of the program"

    @property
    def weights(self) -> dict[str, float] | None:
        """Weights of the sources of a mixture; None if they have none."""
        given = {name: source.weight for name, source in self.mixture.items() if source.weight is not None}
        return given or None

    def sources(self, key: str) -> dict[str, Source]:
        """Return the tables to read by the name of the source; a single table has the name "".

        Args:
            key: name of this group of options.
        """
        shared = Source(path=self.path or "", key=key, columns=self.columns, system_prompt=self.system_prompt)
        if self.path is not None:
            return {"": shared}
        return {
            name: shared._replace(
                path=source.path,
                key=f"{key}.mixture.{name}",
                columns=self.columns if source.columns is None else source.columns,
            )
            for name, source in self.mixture.items()
        }


class DataOptions(TableOptions):
    """Rows to learn from."""

    max_length: Annotated[int, Ge(2)] = 4096
    """longest row in tokens; a longer one is cut at its end, and counted"""
    batch_size: Count = 128
    """rows (of preferences: pairs) in one optimizer step"""
    escape_special_tokens: bool = False
    """special tokens in messages, but for the assistant's, are plain text"""


class AnnouncedOptions(Options):
    """Options of a command that says what begins before it loads torch."""

    aliases: ClassVar[Mapping[str, str]] = {}
    """other spellings of keys"""

    @classmethod
    def arguments(cls, argv: Sequence[str]) -> list[str]:
        """Return the arguments of the command in the form `KEY=VALUE`."""
        return list(argv)

    def headline(self) -> str:
        """Return in a few words what is trained, on which data, and where the result goes."""
        raise NotImplementedError

    def check_complete(self) -> None:
        """Raise ConfigError if a command lacks an option for which a program may give an object instead."""


class LaunchOptions(AnnouncedOptions):
    """The user's own code, and the processes that run the workers."""

    imports: list[str] = []
    """Python files, or dotted names of modules, that register losses, advantages, rewards, workflows or callbacks; the
    argument --import FILE.py adds one"""
    launcher: Literal["inprocess", "torchrun", "ray"] | None = None
    """launcher of the workers; default: torchrun under torchrun, else one process"""
    num_devices: Count | None = None
    """devices to use; default: one on CPU, all GPUs"""

    @field_validator("imports")
    @classmethod
    def _import(cls, names: list[str]) -> list[str]:
        """Return the names after their import. Fields are validated in order: later options know what it registers."""
        for name in names:
            import_own_code(name)
        return names


class RunOptions(Options):
    """The folder of a run, and the files that the run writes there."""

    save_dir: str
    """holds config.yaml, metrics.jsonl, latest/ (Hugging Face) and state/ (to resume from); ppo, sft: record/, too"""
    save_freq: Count = 20
    """steps between two checkpoints"""
    save_async: bool = True
    """write checkpoints while training goes on, from a copy in host memory"""
    keep: Count = 2
    """checkpoints to keep; an old one is deleted once a step after a newer one was good"""
    max_skipped_steps: Count = 5
    """bad steps in a row after which the run stops. A step is bad if its loss or gradients are not finite, and in
    supervised training if its loss explodes or its gradient vanishes. If half of the last 4 times as many steps were
    bad, the run stops, too"""
    best_metric: str | None = None
    """metric of the evaluation (test_loss; ppo: accuracy; of a named set NAME/test_loss, NAME/accuracy) whose best
    model so far is kept in best/ (Hugging Face)"""
    best_is_highest: bool | None = None
    """true if a higher value of best_metric is better; null: false if the metric is a loss, else true"""
    test_freq: Count = 20
    """steps between two evaluations on test_data, if there is some"""
    stop_at: dict[str, float] = {}
    """metrics of evaluations and their thresholds, such as {NAME/accuracy: 0.9}: the run stops when all are reached. A
    loss is reached from above"""
    load_ckpt_from: str | None = None
    """a folder under some run's state/, or "latest" for the newest of this run ("latest_good": the newest that is not
    damaged; "latest" refuses a damaged one); null goes on with the run in save_dir if its options are the same, and
    starts anew in a folder without one"""
    overwrite: bool = False
    """start anew, and delete the checkpoints and metrics of the run that is in save_dir"""
    sinks: list[str] = ["jsonl"]
    """destinations of metrics besides the console: jsonl, tensorboard, wandb, trackio"""
    use_wandb: bool = False
    """the same as wandb among the sinks"""
    project: str = "rlite"
    """name for wandb and trackio"""
    experiment_name: str = "run"
    """name for wandb and trackio"""
    seed: Seed = 42
    """order of the data, and random numbers"""
    console: Literal["auto", "all"] | list[str] = "auto"
    """metrics in the console's line for each step: auto, all, or a list such as [reward, kl, seconds]"""
    callbacks: list[str] = []
    """names of registered callbacks, which are told of steps and may stop the run; rlite.trainer.callbacks"""
    trace: bool = False
    """draw who waited for whom into trace.json, which ui.perfetto.dev opens"""
    trace_steps: list[int] = []
    """first and last step of the trace; by default all"""

    def problems(self) -> Iterator[str]:
        """Yield a message for an unknown callback or sink, and for steps to trace that are no range."""
        yield from (f"callbacks: {CALLBACKS.unknown(name)}" for name in self.callbacks if name not in CALLBACKS)
        yield from sink_problems(self.all_sinks)
        steps = self.trace_steps
        if steps and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
            yield f"trace_steps={steps}: expected two numbers, of the first and of the last step"

    @property
    def all_sinks(self) -> list[str]:
        """Destinations of metrics, `use_wandb` included."""
        return [*self.sinks, "wandb"] if self.use_wandb and "wandb" not in self.sinks else self.sinks


class RecordOptions(Options):
    """The record of what a model writes in training and evaluations."""

    record: Literal["all", "sample", "none"] = "sample"
    """rollouts and evaluations in record/: all; sample, a row of every sample, and texts and tokens of 2 groups of each
    status in each step, of all groups of steps 1, 11, 21, ..., and of 8 prompts of an evaluation; or none"""
    record_limit: Annotated[float, Gt(0), Le(2**20)] = 4.0
    """GiB that record/ may take; beyond it the texts and tokens of the oldest steps are deleted, then their rows"""


class TrainerOptions(RecordOptions, RunOptions):
    """A run of a number of steps."""

    save_dir: str = "runs/ppo"
    """folder of the run: metrics.jsonl, record/ (rollouts), latest/ (Hugging Face), state/ (to resume from),
    config.yaml"""
    total_steps: Count = 100
    """rollout batches to train on"""
    evaluate: Literal["in_turns", "beside", "snapshot"] = "in_turns"
    """in_turns: training waits for an evaluation. beside: an evaluation has an inference engine and devices of its own,
    with the weights of its step, while training goes on; lag_steps says how many steps later its metrics are logged.
    snapshot: as beside, on the devices of the rollouts, where it keeps half of rollout.gpu_memory_utilization"""
    evaluation_devices: Count | None = None
    """devices that only evaluate, with trainer.evaluate=beside; default: rollout.tp_size"""
    max_recoveries: Natural = 0
    """times in an hour that lost train workers are started again and their step is repeated, under Ray; then each step
    ends with a copy of the training state in host memory outside of the workers"""


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


class AnsweringOptions(RecordOptions, EpochOptions):
    """A run of a number of epochs, whose evaluations may have answers."""


class SupervisedConfig(LaunchOptions):
    """Options of every trainer that learns from rows."""

    help_first: ClassVar[tuple[str, ...]] = (
        *("data.path", "test_data.path", "data.max_length", "data.batch_size"),
        *("trainer.n_epochs", "trainer.save_dir", "trainer.console", "launcher", "num_devices"),
    )

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

    def headline(self) -> str:
        """Return in a few words what is trained, on which data, and where the result goes."""
        model = next(group.model_name for _, group in self if isinstance(group, LayoutOptions))
        return f"{model} on {self.data.paths}, into {self.trainer.save_dir}"


class EngineOptions(Options):
    """The size of an engine that generates."""

    executor: str = "torch"
    """inference executor, such as vllm"""
    tp_size: Count = 1
    """devices that share one replica"""
    dtype: str | None = None
    """type of the served weights; default: the checkpoint's"""
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = 0.6
    """share of a GPU's memory for generation"""
    max_num_seqs: Count = 256
    """sequences that a replica decodes at once"""


class ServingOptions(EngineOptions):
    """An engine that generates."""

    deterministic: bool = False
    """the same tokens bit by bit, whatever else is generated; executor torch alone, slower"""

    def build_options(self, num_devices: int) -> dict[str, Any]:
        """Return keyword arguments of an inference engine's `build` that fills so many devices.

        Args:
            num_devices: a multiple of `tp_size`.
        """
        assert num_devices % self.tp_size == 0
        own: dict[str, Any] = {"deterministic": True} if self.deterministic else {}  # other executors do not know it
        return {
            "tensor_parallel_size": self.tp_size,
            "data_parallel_size": num_devices // self.tp_size,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "max_num_seqs": self.max_num_seqs,
            "dtype": self.dtype,
            **own,
        }


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
            if own.of_answers and not own.is_generated:
                yield (
                    f"{key_of(name)}.{own.of_answers[0]} is of answers that the model generates; give "
                    f"{key_of(name)}.reward.path as well, or leave it out"
                )
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

    def slow_problems(self) -> Iterator[str]:
        """Yield a message for a loss whose reference or lengths are not as it needs them.

        It raises ConfigError or UnknownOptionError for a loss that cannot be called so.
        """
        rlite.algorithms.PREFERENCE_LOSSES.check(self.name, self.options)
        is_of_means = self.reference_free and self.length_normalised
        if self.name in rlite.algorithms.OF_PROBABILITIES and not is_of_means:
            yield (
                f"name={self.name}: this loss compares mean probabilities of answers, without a reference; set "
                "reference_free=true and length_normalised=true"
            )
        if self.reference_free and self.divergence != "reverse_kl":
            yield f"divergence={self.divergence}: reference_free=true has no reference to diverge from; leave it out"


class DpoActorOptions(PreferenceModelOptions):
    """The policy that learns to prefer."""

    lr: Rate = 5e-7
    """peak learning rate"""
    beta: Positive = 0.1
    """strength of the tie to the reference"""
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
    beta: Positive = 0.1
    """strength of the tie to the reference"""
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
