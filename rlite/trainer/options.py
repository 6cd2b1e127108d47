"""Options that all trainers share: tables of rows, runs, launchers and engines that generate. No torch here."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator, field_validator

from rlite import config
from rlite.config import Count, FinitePositive, Natural, Options, Seed
from rlite.data.source import Source
from rlite.errors import did_you_mean
from rlite.generation import LARGEST, SMALLEST, GenerationHyperparameters
from rlite.imports import import_own_code
from rlite.key_value import named
from rlite.trainer.callbacks import CALLBACKS

RESERVED_TEMPLATE_OPTIONS = {
    *("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
    *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
    *("return_assistant_tokens_mask", "rows", "tokenizer", "where", "escape_special_tokens"),
    *("ends", "last_turn_only"),
}
"""arguments of `apply_chat_template`, and of rlite's functions around it, that are not the user's"""


Columns = dict[str, Annotated[str | None, BeforeValidator(lambda own: None if own == "null" else own)]]
"""rlite's name of a column -> the table's; None, on the command line `null`, hides the column"""


class SourceOptions(Options):
    """One of the tables that a run mixes."""

    path: str
    """table, in the form of data.path"""
    weight: FinitePositive | None = None
    """share of the rows of an epoch, relative to the other weights; give it to all sources or to none"""
    columns: Columns | None = None
    """rlite's names of columns and the table's; default: data.columns"""
    map: str | None = None
    """file.py:function of a row of this table; default: data.map"""


class SingleTableOptions(Options):
    """A table of rows, and how its conversations are read."""

    path: str | None = None
    """JSON, JSONL, CSV, Parquet or Arrow file, datasets folder or hub name; optionally split@path:subset"""
    columns: Columns = {}
    """names of columns: rlite's name = the table's, such as {response: answer}; a path reaches into objects,
    {prompt: data.question}; null hides a column"""
    map: str | None = None
    """file.py:function that takes a row as the table has it, and returns the row to read, before columns are renamed"""
    chat_template_path: str | None = None
    """file of a chat template (Jinja) in place of the tokenizer's own; latest/ gets it, too"""
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
        return {name: source.weight for name, source in self.mixture.items() if source.weight is not None} or None

    def sources(self, key: str) -> dict[str, Source]:
        """Return the tables to read by the name of the source; a single table has the name ""."""
        own: Any = {"columns": self.columns, "map": self.map, "system_prompt": self.system_prompt}
        shared = Source(path=self.path or "", key=key, **own)
        if self.path is not None:
            return {"": shared}
        return {
            name: shared._replace(
                path=source.path,
                key=f"{key}.mixture.{name}",
                columns=self.columns if source.columns is None else source.columns,
                map=self.map if source.map is None else source.map,
            )
            for name, source in self.mixture.items()
        }


class AnnouncedOptions(Options):
    """Options of a command that are checked before torch is loaded. It may then print its first line."""

    aliases: ClassVar[Mapping[str, str]] = {}
    """other spellings of keys"""
    without_key: ClassVar[Sequence[str]] = ()
    """keys of the arguments that may be given without a key, in their order"""

    @classmethod
    def arguments(cls, argv: Sequence[str]) -> list[str]:
        """Return the arguments of the command in the form `KEY=VALUE`."""
        return named(argv, cls.without_key)

    def headline(self) -> str:
        """Return in a few words what is trained, on which data, and where the result goes; "" announces nothing."""
        return ""

    def check_complete(self) -> None:
        """Raise ConfigError if a command lacks an option for which a program may give an object instead."""


class ImportOptions(AnnouncedOptions):
    """The user's own code."""

    imports: list[str] = []
    """Python files, or dotted names of modules, that register losses, advantages, rewards, workflows or callbacks; the
    argument --import FILE.py adds one"""

    @field_validator("imports")
    @classmethod
    def _import(cls, names: list[str]) -> list[str]:
        """Return the names after their import. Fields are validated in order: later options know what it registers."""
        for name in names:
            import_own_code(name)
        return names


class LaunchOptions(ImportOptions):
    """The user's own code, and the processes that run the workers."""

    launcher: Literal["inprocess", "torchrun", "ray"] | None = None
    """launcher of the workers; default: torchrun under torchrun, else one process"""
    num_devices: Count | None = None
    """devices to use; default: one on CPU, all GPUs"""


SINKS = ("jsonl", "tensorboard", "wandb", "trackio")
"""names of sinks, and of the packages that all but jsonl need"""


def missing_sink(name: str) -> str:
    """Return that the package of a sink is missing, and how to install it."""
    return f"metric sink {name!r} needs the package {name}: pip install 'rlite[{name}]'"


class RunOptions(Options):
    """The folder of a run, and the files that the run writes there."""

    folder_key: ClassVar[str] = "trainer.save_dir"
    """option that names the folder"""

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
    loss stops the run when it falls to its threshold"""
    load_ckpt_from: str | None = None
    """a folder under some run's state/, or "latest" for the newest of this run ("latest_good": the newest that is not
    damaged; "latest" refuses a damaged one); null goes on with the run in save_dir if its options are the same, and
    starts a new run in a folder without one"""
    overwrite: bool = False
    """start over, and delete the checkpoints and metrics of the run that is in save_dir"""
    sinks: list[str] = ["jsonl"]
    """destinations of metrics besides the console: jsonl, tensorboard, wandb, trackio"""
    use_wandb: bool = False
    """the same as wandb among the sinks"""
    project: str = "rlite"
    """name for wandb and trackio"""
    experiment_name: str | None = None
    """name for wandb and trackio; default: the last two folders of save_dir but for runs: runs/math/ppo is math-ppo"""
    entity: str | None = None
    """user or team of wandb; default: the account's own"""
    group: str | None = None
    """group of runs in wandb and trackio, such as the seeds of one setting"""
    tags: list[str] = []
    """tags of the run in wandb"""
    seed: Seed = 42
    """order of the data, and random numbers"""
    console: Literal["auto", "all"] | list[str] = "auto"
    """metrics in the console's line for each step: auto, all, or a list such as [reward, kl, seconds]"""
    callbacks: list[str] = []
    """names of registered callbacks, which are called at steps and may stop the run; rlite.trainer.callbacks"""
    trace: bool = False
    """draw who waited for whom into trace.json, which ui.perfetto.dev opens"""
    trace_steps: list[int] = []
    """first and last step of the trace; by default all"""

    def problems(self) -> Iterator[str]:
        """Yield a message for unknown callbacks and sinks, labels without a sink, and a range of steps that is none."""
        yield from (f"callbacks: {CALLBACKS.unknown(name)}" for name in self.callbacks if name not in CALLBACKS)
        for name in self.all_sinks:
            key = "sinks" if name in self.sinks else "use_wandb"
            if name not in SINKS:
                yield f"{key}: unknown metric sink {name!r}; {did_you_mean(name, SINKS)}"
            elif name != "jsonl" and importlib.util.find_spec(name) is None:
                yield f"{key}: {missing_sink(name)}"
        labels = {"entity": (self.entity, ["wandb"]), "tags": (self.tags, ["wandb"])}
        for key, (value, takers) in (labels | {"group": (self.group, ["wandb", "trackio"])}).items():
            if value and not {*takers} & {*self.all_sinks}:
                yield f"{key}={value}: no metric sink shows it; add {' or '.join(takers)} to sinks, or leave it out"
        steps = self.trace_steps
        if steps and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
            yield f"trace_steps={steps}: expected two numbers, of the first and of the last step"

    @property
    def limit_key(self) -> str:
        """The option that says how long the run is."""
        return "trainer.total_steps"

    @property
    def run_name(self) -> str:
        """Name of the run for sinks and pictures."""
        parts = [part for part in Path(self.save_dir).expanduser().parts[-2:] if part not in ("/", "runs")]
        return self.experiment_name or "-".join(parts) or "run"

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


PLACED = {
    "tensor_parallel_size": "set tp_size beside executor_options",
    "data_parallel_size": "it follows from the devices and tp_size",
    **dict.fromkeys(
        ("colocate_with", "not_colocate_with", "acceptable_node_ips", "exclusive"), "rlite places the engine"
    ),
}
"""arguments of `build` that are no options of an executor, with what to do instead"""


def repeated(given: Mapping[str, Any], own: Collection[str]) -> Iterator[str]:
    """Yield a message for each of the further options of an executor that has a place of its own."""
    for name, remedy in (PLACED | {each: f"set {each} beside executor_options" for each in own}).items():
        if name in given:
            yield f"executor_options.{name}: this is no further option of the executor; {remedy}"


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
    """the same tokens bit by bit, independent of other requests; executor torch alone, slower"""
    speculation: Literal["auto"] | bool = False
    """check several tokens at once that earlier texts propose; executor torch on CPU alone"""
    executor_options: dict[str, Any] = {}
    """further options of the executor, such as {addresses: [http://10.0.0.1:8000]} of remote"""

    def problems(self) -> Iterator[str]:
        """Yield a message for executor options that are set elsewhere."""
        yield from super().problems()
        own = ("gpu_memory_utilization", "max_num_seqs", "dtype", "deterministic", "speculation")
        yield from repeated(self.executor_options, (*own, "max_model_len", "seed"))

    def build_options(self, num_devices: int) -> dict[str, Any]:
        """Return keyword arguments of an inference engine's `build` that fills so many devices."""
        assert num_devices % self.tp_size == 0
        return {
            "tensor_parallel_size": self.tp_size,
            "data_parallel_size": num_devices // self.tp_size,
            **{name: getattr(self, name) for name in ("gpu_memory_utilization", "max_num_seqs", "dtype")},
            # other executors do not know these
            **({"deterministic": True} if self.deterministic else {}),
            **({"speculation": self.speculation} if self.speculation else {}),
            **self.executor_options,
        }


SamplingOf = GenerationHyperparameters | Mapping[str, Any]
Temperature = Annotated[float, Ge(0), Le(LARGEST)]
TopP = Annotated[float, Ge(SMALLEST), Le(1)]
TopK = Annotated[int, Ge(-1)]


class SetSamplingOptions(Options):
    """The sampling of responses in a set; options that are not set are those of rollout.test_sampling_params."""

    temperature: Temperature | None = None
    """0 is greedy"""
    max_new_tokens: Count | None = None
    """longest response, in each turn"""
    top_p: TopP | None = None
    """1 is off"""
    top_k: TopK | None = None
    """0 is off"""
    stop: list[str] | None = None
    """texts that end a response; they may be special tokens, such as <|im_end|>"""
    stop_token_ids: list[Annotated[int, Ge(0)]] | None = None
    """tokens that end a response, beside the model's own end tokens"""

    def gconfig(self, base: SamplingOf | None = None, **changes: Any) -> GenerationHyperparameters:
        """Return these options as a request takes them, with changes; parameters that they lack are those of `base`."""
        given = {name: getattr(self, name) for name in SetSamplingOptions.model_fields} | changes
        given = {name: value for name, value in given.items() if value is not None}
        if "temperature" in given:
            given["greedy"] = given["temperature"] == 0
        return GenerationHyperparameters.from_mapping(base).new(**given)

    def completed_by(self, base: SetSamplingOptions) -> SamplingOptions:
        """Return these options, with each that is None taken from `base`."""
        return SamplingOptions(**dict(config.inherit(self, base)))

    def problems(self) -> Iterator[str]:
        """Yield the messages of other options; raise ConfigError for a value that no request may have."""
        self.gconfig()
        yield from super().problems()


class EvaluationSamplingOptions(SetSamplingOptions):
    """The sampling of responses in evaluations; options that are not set are those of training."""

    temperature: Temperature = 0.0
    """0 is greedy"""
    top_p: TopP = 1.0
    """1 is off"""
    top_k: TopK = 0
    """0 is off"""


class SamplingOptions(EvaluationSamplingOptions):
    """The sampling of responses."""

    temperature: Temperature = 1.0
    """0 is greedy"""
    max_new_tokens: Count = 1024
    """longest response, in each turn"""
    stop: list[str] = []
    """texts that end a response; they may be special tokens, such as <|im_end|>"""
    stop_token_ids: list[Annotated[int, Ge(0)]] = []
    """tokens that end a response, beside the model's own end tokens"""
