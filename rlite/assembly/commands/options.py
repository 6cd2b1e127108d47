"""Options of the commands beside the trainers. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from rlite.backends.fsdp2.options import Dtype
from rlite.config import Count, Natural, Positive, Seed
from rlite.rollout.rewards.options import RewardOptions, Rewards
from rlite.services.tinker.options import TinkerLimits
from rlite.trainer.model.options import LayoutOptions, OptimizerName
from rlite.trainer.options import AnnouncedOptions, EngineOptions, SamplingOptions, TrainerOptions, repeated


class GenerateConfig(SamplingOptions, AnnouncedOptions):
    """Options of `rlite generate MODEL "PROMPT"`."""

    without_key: ClassVar[tuple[str, ...]] = ("model", "prompt")
    help_arguments: ClassVar[str] = 'MODEL "PROMPT"'
    help_example: ClassVar[str] = 'runs/sft "What is 2+3?" temperature=0'
    help_first: ClassVar[tuple[str, ...]] = ("prompt", "prompt_file", "chat", "system_prompt", "n")

    model: str
    """folder of a model or of a run (its newest model), or hub name; the first argument without a key"""
    prompt: str = ""
    """the prompt; the second argument without a key"""
    prompt_file: str | None = None
    """text file with one prompt in each line, - is the standard input; in place of prompt"""
    chat: bool | None = None
    """true: the prompt is the user's message in the model's chat template; null: true if the model has a template"""
    system_prompt: str | None = None
    """message of the system before the prompt, in a chat"""
    chat_template_options: dict[str, Any] = {}
    """options of the chat template, such as {enable_thinking: false}"""
    n: Count = 1
    """answers to each prompt"""
    max_new_tokens: Count = 512
    """longest answer in tokens"""
    seed: int | None = None
    """seed of the sampling; null draws one"""
    executor: str = "torch"
    """inference executor"""
    executor_options: dict[str, Any] = {}
    """further options of the executor, such as {addresses: [http://10.0.0.1:8000]} of remote"""
    tp_size: Count = 1
    """devices that share the model"""
    dtype: str | None = None
    """type of the weights; default: the checkpoint's"""
    launcher: Literal["inprocess", "torchrun", "ray"] | None = None
    """launcher of the workers; default: one process"""

    def problems(self) -> Iterator[str]:
        """Yield a message for a prompt that is missing or given twice, and for options of a chat without one."""
        yield from super().problems()
        if bool(self.prompt) == (self.prompt_file is not None):
            yield 'prompt: expected a prompt, as in `rlite generate MODEL "PROMPT"`, or prompt_file=FILE, and not both'
        if self.chat is False and (self.system_prompt is not None or self.chat_template_options):
            yield "chat=false: system_prompt and chat_template_options are options of a chat; leave them or chat out"
        yield from repeated(self.executor_options, ["dtype"])


class ServeConfig(SamplingOptions, AnnouncedOptions):
    """Options of `rlite serve MODEL`."""

    without_key: ClassVar[tuple[str, ...]] = ("model",)
    help_arguments: ClassVar[str] = "MODEL"
    help_example: ClassVar[str] = "runs/grpo port=8000 executor=vllm"
    help_first: ClassVar[tuple[str, ...]] = ("port", "host", "token_file", "name")
    sizes: ClassVar[tuple[str, ...]] = ("dtype", "max_model_len", "max_num_seqs", "gpu_memory_utilization")

    model: str
    """folder of a model or of a run (its newest model), or hub name; the first argument without a key"""
    port: Annotated[int, Ge(0), Le(65535)] = 8000
    """port to listen on; 0 takes a free one"""
    host: str = "127.0.0.1"
    """address to listen on; another one than this machine's own lets other machines connect. Nothing is encrypted"""
    host_names: list[str] = []
    """further names under which clients reach the server, such as that of a proxy"""
    token_file: str = "~/.cache/rlite/serve-token"
    """file with the token that each request needs; made if it does not exist. RLITE_SERVE_TOKEN takes precedence"""
    admin_token_file: str | None = None
    """file of mode 0600 with a token that opens POST /admin/weights, which loads weights; no route without it.
    RLITE_ADMIN_TOKEN takes precedence"""
    name: str | None = None
    """name of the model in requests; default: the last part of its path"""
    max_running: Count = 256
    """requests that are answered at the same time"""
    max_waiting: Natural = 1024
    """requests that may wait; further ones are refused with status 429"""
    max_length: Annotated[int, Ge(2)] | None = None
    """longest prompt and answer together that a request may have, in tokens; default: the engine's limit"""
    max_new_tokens: Count = 4096
    """longest answer of requests that set none, in tokens"""
    chat_template_options: dict[str, Any] = {}
    """options of the chat template, such as {enable_thinking: false}"""
    tool_format: str | None = None
    """format in which the model calls tools, such as hermes; default: the chat template's"""
    executor: str = "torch"
    """inference executor, such as vllm"""
    executor_options: dict[str, Any] = {}
    """further options of the executor, such as {enable_prefix_caching: false} of vllm"""
    tp_size: Count = 1
    """devices that share one replica"""
    num_devices: Count | None = None
    """devices to use, a multiple of tp_size; default: tp_size"""
    dtype: str | None = None
    """type of the weights; default: the checkpoint's"""
    max_model_len: Annotated[int, Ge(2)] | None = None
    """longest prompt and answer together that the engine has memory for; default: the executor's"""
    max_num_seqs: Count | None = None
    """sequences that a replica decodes at once; default: the executor's"""
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] | None = None
    """share of a GPU's memory for the engine; default: the executor's"""
    launcher: Literal["inprocess", "torchrun", "ray"] | None = None
    """launcher of the workers; default: one process"""

    def problems(self) -> Iterator[str]:
        """Yield a message for a replica size that does not divide the devices, and for options that are set twice."""
        yield from super().problems()
        if self.num_devices is not None and self.num_devices % self.tp_size:
            yield f"tp_size={self.tp_size} does not divide num_devices={self.num_devices}"
        yield from repeated(self.executor_options, self.sizes)

    def headline(self) -> str:
        """Return in a few words what is served."""
        return f"serves {self.model} on {self.host}"

    def build_options(self) -> dict[str, Any]:
        """Return keyword arguments of the engine's `build`."""
        sizes = {"tensor_parallel_size": self.tp_size, "data_parallel_size": self.devices // self.tp_size}
        given = {name: value for name in self.sizes if (value := getattr(self, name)) is not None}
        return sizes | given | self.executor_options

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.num_devices or self.tp_size


class TinkerConfig(TinkerLimits, AnnouncedOptions):
    """Options of `rlite tinker --model MODEL`."""

    without_key: ClassVar[tuple[str, ...]] = ("model",)
    help_arguments: ClassVar[str] = "--model MODEL"
    help_example: ClassVar[str] = "--model Qwen/Qwen3-0.6B folder=runs/tinker port=8000"
    help_first: ClassVar[tuple[str, ...]] = ("folder", "port", "host", "token_file", "name")

    model: str
    """folder or hub name of the base model; the first argument without a key, or after --model"""
    folder: str = "runs/tinker"
    """sessions, journals and saved weights; a server that is started again on it goes on where the last one ended"""
    port: Annotated[int, Ge(0), Le(65535)] = 8000
    """port to listen on; 0 takes a free one"""
    host: str = "127.0.0.1"
    """address to listen on; another one than this machine's own lets other machines connect. Nothing is encrypted"""
    host_names: list[str] = []
    """further names under which clients reach the server, such as that of a proxy"""
    token_file: str = "~/.cache/rlite/tinker-token"
    """file with the token that each request needs, or with lines of TENANT TOKEN; made if it does not exist. A token
    begins with tml-. RLITE_TINKER_TOKEN takes precedence"""
    name: str | None = None
    """name of the base model in requests, which clients also load its tokenizer by; default: model"""
    max_tokens_per_microbatch: Count = 8192
    """tokens of one forward and backward pass, and the longest sequence"""
    executor: str = "torch"
    """inference executor"""
    executor_options: dict[str, Any] = {}
    """further options of the inference executor, such as {enable_lora: true, max_lora_rank: 64} of vllm"""
    num_devices: Count | None = None
    """devices, which training and sampling share; default: one on CPU, else all"""
    dtype: Dtype = "float32"
    """type of the trained adapters and of the base in training"""
    deterministic: bool = False
    """results have bits that depend neither on other tenants nor on the batch; slower"""
    max_model_len: Annotated[int, Ge(2)] | None = None
    """longest prompt and answer together that the engine has memory for; default: the executor's"""
    max_num_seqs: Count | None = None
    """sequences that a replica decodes at once; default: the executor's"""
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] | None = None
    """share of a GPU's memory for sampling; default: the executor's"""
    launcher: Literal["inprocess", "torchrun", "ray"] | None = None
    """launcher of the workers; default: one process"""

    sizes: ClassVar[tuple[str, ...]] = ("max_model_len", "max_num_seqs", "gpu_memory_utilization")

    @classmethod
    def arguments(cls, argv: Sequence[str]) -> list[str]:
        """Return the arguments of the command in the form `KEY=VALUE`."""
        return super().arguments([argument for argument in argv if argument != "--model"])

    def problems(self) -> Iterator[str]:
        """Yield a message for bits that the executor cannot promise, and for options that are set twice."""
        yield from super().problems()
        yield from repeated(self.executor_options, self.sizes)  # another dtype serves beside float32 training
        if self.deterministic and self.executor != "torch":
            told = f"executor={self.executor} computes other bits when other requests share a batch"
            yield f"deterministic=true: {told}; leave it out, or take executor=torch"

    def headline(self) -> str:
        """Return in a few words what is served."""
        return f"serves training of {self.model} on {self.host}"

    def train_options(self) -> dict[str, Any]:
        """Return keyword arguments of the train engine's `build`."""
        return {
            "max_tokens_per_microbatch": self.max_tokens_per_microbatch,
            "deterministic": self.deterministic,
            "param_dtype": self.dtype,
            "compute_dtype": self.dtype,
        }

    def serve_options(self) -> dict[str, Any]:
        """Return keyword arguments of the inference engine's `build`."""
        given = {name: value for name in self.sizes if (value := getattr(self, name)) is not None}
        given |= {"dtype": self.dtype}
        exact = {"deterministic": True} if self.deterministic else {}
        return given | exact | self.executor_options


class MergeConfig(AnnouncedOptions):
    """Options of `rlite merge ADAPTER OUT`."""

    without_key: ClassVar[tuple[str, ...]] = ("adapter", "out")
    help_arguments: ClassVar[str] = "ADAPTER OUT"
    help_example: ClassVar[str] = "runs/sft/latest/adapter merged"

    adapter: str
    """folder of a PEFT adapter, or of a run or an export with one; the first argument without a key"""
    out: str
    """folder to write, which must not exist or be empty; the second argument without a key"""
    base_model: str | None = None
    """folder or hub name of the model that the adapter belongs to; default: the adapter's config names it"""


class RolloutPlanOptions(EngineOptions):
    """The engine that generates, in `rlite plan`; the names and defaults are those of `rlite ppo`."""

    dtype: Literal["float32", "float16", "bfloat16"] = "bfloat16"
    """type of the served weights and of the KV cache"""
    max_model_len: Annotated[int, Ge(2)] | None = None
    """longest prompt and response together, in tokens; default: the model's own limit, with executor torch at most
    4096"""


class PlanConfig(LayoutOptions, AnnouncedOptions):
    """Options of `rlite plan`."""

    help_example: ClassVar[str] = "model_name=Qwen/Qwen3-8B num_devices=8 tp_size=2"
    prints_json: ClassVar[bool] = True

    num_devices: Count
    """devices in the world"""
    param_dtype: Dtype = "float32"
    """master weights, gradients and optimizer state"""
    compute_dtype: Dtype = "bfloat16"
    """forward and backward"""
    optimizer: OptimizerName = "adamw"
    """adamw has two numbers for each parameter; muon has one for the matrices inside of layers, and two for the rest"""
    device_memory_gib: Positive | None = None
    """memory of one device; with it, the KV cache is what gpu_memory_utilization leaves, as the executors take it, and
    the plan says which options would save memory in training"""
    rollout: RolloutPlanOptions | None = None
    """the engine that generates on the same devices; null plans training alone"""
    reward: Rewards = {}
    """rewards as for `rlite ppo`; those of models are counted, on the same devices or on their own (num_devices)"""

    def problems(self) -> Iterator[str]:
        """Yield a message for rewards that take all devices, and for a replica size that does not divide the rest."""
        if self.num_shared < 1:
            taken = self.num_devices - self.num_shared
            yield f"reward.NAME.num_devices: rewards take {taken} devices, and num_devices={self.num_devices} in all"
        elif self.rollout is not None and self.num_shared % self.rollout.tp_size:
            yield f"rollout.tp_size={self.rollout.tp_size} does not divide num_devices={self.num_shared}"

    @property
    def served_rewards(self) -> dict[str, RewardOptions]:
        """The rewards that a model on devices gives, by name; one of those that name the same model."""
        served = {(own.served_model, own.num_devices): name for name, own in self.reward.items() if own.served_model}
        return {name: self.reward[name] for name in served.values()}

    @property
    def num_shared(self) -> int:
        """Devices that train and generate: all that are no reward's own."""
        return self.num_devices - sum(own.num_devices or 0 for own in self.served_rewards.values())


class QuickstartRunOptions(TrainerOptions):
    """The run of the quickstart, whose options have names of their own."""

    folder_key: ClassVar[str] = "folder"

    @property
    def limit_key(self) -> str:
        """The option that says how long the run is."""
        return "steps"


class QuickstartConfig(AnnouncedOptions):
    """Options of `rlite quickstart`."""

    help_example: ClassVar[str] = "steps=60 folder=runs/quickstart"

    folder: str = "runs/quickstart"
    """everything is written here"""
    seed: Seed = 0
    """seed of problems, weights and sampling"""
    num_train: Count = 16000
    """training problems"""
    num_held_out: Count = 256
    """problems that are only tested on"""
    warm_steps: Count = 700
    """supervised steps"""
    steps: Count = 60
    """GRPO steps"""
    executor: str = "torch"
    """inference executor of the rollouts"""

    def headline(self) -> str:
        """Return in a few words what is trained, on which data, and where the result goes."""
        return f"a small model learns to spell backwards, into {self.folder}"
