"""A dry run: the memory that a model would take on each device, before you rent one.

    rlite plan model_name=MODEL num_devices=64 tp_size=8        MODEL: a folder with a config.json, or a hub name
    rlite plan ... optimizer=muon rollout.tp_size=4 rollout.max_model_len=8192 device_memory_gib=80
    rlite plan ... rollout.tp_size=4 reward.rm.model=REWARD_MODEL reward.rm.num_devices=8
    rlite plan ... --json        sizes in bytes

The model is made on meta and really sharded, over a process group that only pretends; no weight is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedConfig

from rlite import config
from rlite.assembly.commands.options import PlanConfig, RolloutPlanOptions
from rlite.assembly.plans import expert_parallel_plan
from rlite.backends.embedded.cache import CacheSizes, EmbeddedOptions
from rlite.backends.fsdp2.memory import NAMES, choose, footprint_of
from rlite.backends.fsdp2.options import Fsdp2Options
from rlite.backends.models.experts import check_expert_parallel, divided_apart, experts_of
from rlite.backends.models.layout import AttentionLayers, attention_layers, recurrent_bytes
from rlite.backends.models.mixers import check_not_split, find_mixers
from rlite.backends.models.stored import transformers_class
from rlite.engine.registry import registered_executors
from rlite.errors import ConfigError, RliteError, did_you_mean
from rlite.output import Result
from rlite.rollout.rewards.models import check_scorer
from rlite.rollout.rewards.options import SERVING, RewardOptions
from rlite.runtime.parallel.dims import ParallelDims
from rlite.runtime.parallel.fsdp import local_tensor, make_mesh, shard
from rlite.runtime.parallel.processes import leave
from rlite.runtime.parallel.tensor import check_heads, check_tensor_parallel, max_positions
from rlite.services.console.terminal import ConsoleReporter
from rlite.trainer.model.modules import policy_module
from rlite.trainer.model.options import ModelOptions, OptimizerOptions
from rlite.trainer.model.scorers import scorer_module


@dataclass(frozen=True, kw_only=True)
class RolloutMemory:
    """Bytes of generation on one device."""

    weights: int
    kv_cache: int
    num_seqs: int
    """sequences of `max_model_len` tokens that fit into the cache"""
    max_model_len: int

    @property
    def total(self) -> int:
        """Bytes of all parts together."""
        return self.weights + self.kv_cache


def rollout_memory(options: RolloutPlanOptions, model: Any, device_memory_gib: float | None) -> RolloutMemory:
    """Return the memory that a replica takes on each of its devices.

    Executor torch allocates pages for `max_num_seqs` sequences of `max_model_len` tokens, as far as they fit.
    The other executors fill the memory that they may have with cache. If the memory is not given, the cache is counted
    for `max_num_seqs` sequences of `max_model_len` tokens.

    `device_memory_gib`: memory of one device; None if it is not known.
    """
    known = registered_executors("inference")
    if options.executor not in known:
        raise ConfigError(f"rollout.executor={options.executor}: {did_you_mean(options.executor, known)}")
    config: PreTrainedConfig = model.config
    is_embedded, dtype = options.executor == "torch", getattr(torch, options.dtype)
    length = options.max_model_len or (None if is_embedded else max_positions(config)[1])
    cls = transformers_class(model) or type(model)
    weights, layers = _on_device(model, attention_layers(cls, config), options)
    sizes = CacheSizes(EmbeddedOptions(max_model_len=length), config, dtype, layers)
    state = recurrent_bytes(cls, config, dtype) if find_mixers(model) else 0
    length, weights = sizes.max_model_len, weights * dtype.itemsize
    # executor torch keeps as many states of prefixes, and has a page for rows without a sequence
    per_sequence = sizes.pages_per_sequence * sizes.page_bytes + (2 * state if is_embedded else state)
    beside = sizes.page_bytes if is_embedded else 0
    num_seqs, cache = options.max_num_seqs, beside + options.max_num_seqs * per_sequence
    if device_memory_gib is not None:
        room = int(device_memory_gib * options.gpu_memory_utilization * 2**30) - weights - beside
        num_seqs = min(num_seqs, room // per_sequence) if is_embedded else room // per_sequence
        cache = beside + num_seqs * per_sequence if is_embedded else room
        if num_seqs < 1:
            raise ConfigError(
                f"rollout: one sequence of max_model_len={length} needs {per_sequence / 2**30:.2f} GiB of KV cache, "
                f"and the weights leave {max(room, 0) / 2**30:.2f} GiB of device_memory_gib={device_memory_gib:g} at "
                f"gpu_memory_utilization={options.gpu_memory_utilization:g}; raise rollout.tp_size, or lower "
                "rollout.max_model_len"
            )
    return RolloutMemory(weights=weights, kv_cache=cache, num_seqs=num_seqs, max_model_len=length)


def _on_device(model: Any, layers: AttentionLayers, options: RolloutPlanOptions) -> tuple[int, AttentionLayers]:
    """Return the number of parameters on one device of a replica, and its attention layers.

    Executor torch leaves experts whole, and attention that the plan of the architecture does not split.
    """
    size, whole, whole_heads = options.tp_size, set[Any](), set[int]()
    if options.executor != "torch":
        check_heads(model.config, size)
    elif size > 1:
        check_not_split(model, f"rollout.tp_size={size}", "rollout.tp_size=1")
        split = check_tensor_parallel(model, size, divided_apart(model))
        whole_heads = split.layers_of_whole_heads(model)
        whole = {p for part in (*experts_of(model).values(), *split.whole.values()) for p in part.parameters()}
    total, kept = (sum(parameter.numel() for parameter in each) for each in (model.parameters(), whole))
    own = {index: layer.split(1 if index in whole_heads else size) for index, layer in layers.items()}
    return kept + (total - kept) // size, own


ADAMW_STATES, MUON_STATES = 2, 1
"""numbers of an optimizer for each parameter"""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Memory of a model on the first device."""

    model: str
    num_parameters: int
    remarks: dict[str, str]
    """remarks by topic: experts, and options that would save memory"""
    devices: str
    sizes: dict[str, int]
    """bytes on the device by their use; sums are named `together`"""
    not_counted: str = "activations inside one layer, and what the libraries take for themselves"

    def rows(self) -> dict[str, str]:
        """Return the plan as text by topic."""
        return {
            "model": f"{self.model}, {self.num_parameters / 1e9:.2f} B parameters",
            **self.remarks,
            "devices": self.devices,
            **{f"{name}, per device": f"{size / 2**30:.2f} GiB ({size} bytes)" for name, size in self.sizes.items()},
            "not counted": self.not_counted,
        }


def plan(options: PlanConfig) -> Plan:
    """Return the memory that a model would take on the first device, counted after sharding it on meta.

    The other devices hold as much, or a little less. `gathered units` are the largest FSDP unit and the next one, in
    compute_dtype while they compute. `layers' inputs` are kept with gradient checkpointing for one full microbatch.
    """
    if dist.is_initialized():
        raise RliteError("a plan is made in a process of its own: this one is in a process group already")
    optimizer = OptimizerOptions(
        name=options.optimizer, lr=1.0, weight_decay=0.0, scheduler="constant", warmup_steps=0, total_steps=1
    )
    module = policy_module(options.model_name, optimizer)
    dims = options.dims(options.num_shared)
    if dims.expert > 1:
        check_expert_parallel(module, dims.expert)
    told = {"experts": expert_parallel_plan(module, dims)} if experts_of(module) else {}
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    told |= _savings(options, module, dims)
    rollout = None
    if options.rollout is not None:
        rollout = rollout_memory(options.rollout, module, options.device_memory_gib)
    with _pretended_group(options.num_devices):
        parts = training_memory(options, module, dims)
        rewards = {name: reward_memory(options, name, own) for name, own in options.served_rewards.items()}
    training = parts["training together"]
    if options.rollout is not None and rollout is not None:
        parts |= {
            f"rollout weights, {options.rollout.dtype}": rollout.weights,
            f"KV cache, {rollout.num_seqs} sequences of {rollout.max_model_len} tokens": rollout.kv_cache,
            "generation together": rollout.total,
            "both, if they do not take turns": training + rollout.total,
        }
    for name, own in rewards.items():
        parts |= {f"{topic} of reward {name}": size for topic, size in own.items()}
    shared = sum(sum(own.values()) for name, own in rewards.items() if options.reward[name].num_devices is None)
    if shared:
        parts["rewards beside generation, together"] = shared + (0 if rollout is None else rollout.total)
    apart = options.num_devices - options.num_shared
    return Plan(
        model=options.model_name,
        num_parameters=num_parameters,
        remarks=told,
        devices=f"{options.num_shared} = {dims}" + (f", and {apart} for rewards" if apart else ""),
        sizes=parts,
    )


def training_memory(options: PlanConfig, module: Any, dims: ParallelDims) -> dict[str, int]:
    """Return the bytes of training on the first device by their use, after sharding the module on meta."""
    compute, master = (getattr(torch, name) for name in (options.compute_dtype, options.param_dtype))
    num_units = len(module.fsdp_units())
    weights, gathered = _sharded(module, dims, options.num_shared, compute, master)
    num_states = sum(
        (MUON_STATES if group.is_muon else ADAMW_STATES) * local_tensor(module.get_parameter(name)).numel()
        for group in module.parameter_groups
        for name in group.names
    )
    hidden = module.config.get_text_config().hidden_size
    parts = {
        f"weights, {options.param_dtype}": weights,
        "gradients": weights,
        f"optimizer, {options.optimizer}": num_states * master.itemsize,
        f"gathered units, {options.compute_dtype}": gathered,
        "layers' inputs": num_units * options.max_length_per_device * hidden * compute.itemsize,
    }
    return {**parts, "training together": sum(parts.values())}


def reward_memory(options: PlanConfig, name: str, reward: RewardOptions) -> dict[str, int]:
    """Return the bytes that the model of a reward takes on each of its devices, by their use."""
    num_devices, path = reward.num_devices or options.num_shared, str(reward.served_model)
    if reward.judge is not None:
        given = {key: value for key in SERVING if (value := getattr(reward.judge, key)) is not None}
        served = rollout_memory(RolloutPlanOptions(**given), policy_module(path), options.device_memory_gib)
        return {f"weights, {given.get('dtype', 'bfloat16')},": served.weights, "KV cache": served.kv_cache}
    what = f"reward.{name}.model={path}"
    module = scorer_module(path, what, check_scorer(path, what, reward.label))
    weights, gathered = _sharded(module, ModelOptions(model_name=path).dims(num_devices), num_devices)
    return {"weights, bfloat16,": weights, "gathered units": gathered}


def _sharded(
    module: Any,
    dims: ParallelDims,
    world: int,
    compute: torch.dtype = torch.bfloat16,
    master: torch.dtype | None = None,
) -> tuple[int, int]:
    """Shard a module on meta.

    Returns the bytes of its weights, and of its largest gathered units, on the first device.
    """
    master = master or compute
    mesh = make_mesh("cpu", range(world), 0, dims)
    experts = module.prepare_experts(mesh, Fsdp2Options(ep_size=dims.expert))
    if dims.tensor > 1:
        module.parallelize(mesh.tensor)
    units = module.fsdp_units()
    gathered = 2 * max(_local_numel(unit) for unit in units) * compute.itemsize
    shard(module, units, mesh, compute, master, experts)
    return _local_numel(module) * master.itemsize, gathered


@contextmanager
def _pretended_group(world: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        leave()  # not of torch alone: its subgroups would be found again by the next plan


def _savings(options: PlanConfig, module: Any, dims: ParallelDims) -> dict[str, str]:
    """Return which options would save memory in training, and why; nothing if a device's memory is not known."""
    if options.device_memory_gib is None:
        return {}
    given = {"max_tokens_per_microbatch": options.max_length_per_device, "param_dtype": options.param_dtype}
    engine = Fsdp2Options.model_validate(given | dict.fromkeys(NAMES, "auto"))
    footprint = footprint_of(module, engine, dims, getattr(torch, options.compute_dtype), "cuda")
    return {"memory": choose(engine, footprint, int(options.device_memory_gib * 2**30), dims.num_shards, "cuda").text()}


def _local_numel(module: torch.nn.Module) -> int:
    return sum(local_tensor(parameter).numel() for parameter in module.parameters())


def main(argv: Sequence[str]) -> Result:
    """Print a plan.

    Returns the plan, with sizes in bytes.
    """
    made = plan(config.load(PlanConfig, argv))
    ConsoleReporter().report("rlite plan", made.rows())
    return Result(asdict(made))
