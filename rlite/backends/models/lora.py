"""Low-rank adapters (LoRA, Hu et al. 2021) through PEFT: they are trained while the checkpoint's weights stay frozen.

    held        q_proj.base_layer.weight W [out, in], frozen
                q_proj.lora_A.default.weight A [rank, in], q_proj.lora_B.default.weight B [out, rank]
    served      q_proj.weight = W + alpha / rank B A: to other engines, in state_dict() and in the checkpoint of save()
    exported    A and B in PEFT's own format, which `peft.PeftModel.from_pretrained` opens, in `adapter/` beside it

A checkpoint to resume from holds W, A and B, and the optimizer's state of A and B.
"""

from __future__ import annotations

import json
import logging
import math
import re
import signal
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlite.backends.models.architecture import check_fit
from rlite.backends.models.conversion import name_before
from rlite.backends.models.experts import (
    adapter_of,
    experts_of,
    is_transposed,
    plain_name,
    stacked_factors,
    wraps_parameter,
)
from rlite.backends.models.huggingface import HuggingFaceFsdp2ScoreModule, pad_apart
from rlite.backends.models.mixers import layers_read_raw
from rlite.backends.models.stored import StoredCheckpoint, stored_buffers, stored_form
from rlite.errors import CheckpointError, ConfigError, did_you_mean
from rlite.files import reading
from rlite.imports import require
from rlite.nn import pretrained
from rlite.nn.base import BaseTrainModule, is_on_meta
from rlite.nn.options import ALL_LINEAR, LoraOptions
from rlite.runtime.parallel.fsdp import dtensor_like, full_tensor, local_shard, local_tensor, replace_parameters
from rlite.runtime.replicas.adapters import AdapterWeights, Factors
from rlite.runtime.storage.huggingface import Writer, copy_companions
from rlite.wording import warn_once

logger = logging.getLogger(__name__)
_HELD, _DOWN, _UP = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"
_SCORE, _SCORER = "score", "SEQ_CLS"
_LINEAR = (nn.Linear, Conv1D)
"""classes of linear layers; the weight of Conv1D (GPT-2) is [in, out]"""
_TAKEN = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""names of layers that PEFT takes for routers and experts of a mixture, wherever they are"""


class LoraTrainModule(BaseTrainModule):
    """Base of modules with adapters. Put it before the module's other classes, and call `add_lora` on meta.

    `class Mine(LoraTrainModule, HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM)`. Nothing changes until `add_lora`.
    Afterwards only adapters have gradients, and the head of a score module, which is new itself.
    """

    lora: LoraOptions | None = None

    def add_lora(self, options: LoraOptions) -> None:
        """Put adapters beside the linear layers that `options` name, and freeze everything else.

        Raises:
            ConfigError: the module has weights; a name fits no linear layer; or a layer is tied and so has no merged
                weight of its own.
        """
        if not is_on_meta(self):
            raise ConfigError(f"{type(self).__name__} holds real weights; add_lora comes before them, on meta")
        require("adapters of the module's own need", "lora", "peft")
        import peft  # optional, and slow to import

        layers = target_layers(self, options)
        targets = layers if options.target_modules == [ALL_LINEAR] else options.target_modules
        with pretrained.meta_parameters():
            # PEFT would see in the module's config that it is a mixture, and move targets to routers and experts
            peft.inject_adapter_in_model(self._peft_config(options, targets), nn.ModuleDict({"module": self}))
        if isinstance(self, HuggingFaceFsdp2ScoreModule):
            self.score.requires_grad_(True)
        if isinstance(self, PreTrainedModel):  # an adapter of tied layers is one, too
            with pretrained.real_tensors():
                self.tie_weights()
        self.lora = options

    def _peft_config(self, options: LoraOptions, targets: Sequence[str], **changes: Any) -> Any:
        import peft

        return peft.LoraConfig(
            task_type=_SCORER if isinstance(self, HuggingFaceFsdp2ScoreModule) else "CAUSAL_LM",
            r=options.rank,
            lora_alpha=options.alpha,
            lora_dropout=options.dropout,
            target_modules=list(targets) or None,
            exclude_modules=[*layers_read_raw(self)] or None,
            target_parameters=options.target_parameters or None,
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in self.modules()),
            **changes,
        )

    def check_deterministic(self, device_type: str) -> None:
        """Refuse adapters that engines do not serve beside their base: merged into the weights they have other bits.

        Args:
            device_type: type of the devices of the workers.

        Raises:
            ConfigError: the module has such adapters, or cannot be computed deterministically anyway.
        """
        if self.lora is not None:
            told = f"lora.dropout={self.lora.dropout}" if self.lora.dropout else self.adapter_obstacle()
            if told:
                raise ConfigError(f"deterministic=true: {told}, which gives other bits; leave one of them out")
        super().check_deterministic(device_type)

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Make the module compute with its frozen weights only, inside the block.

        Yields:
            None.

        Raises:
            ConfigError: the module has no adapters.
        """
        if self.lora is None:
            raise ConfigError(f"{type(self).__name__} has no adapters to switch off: call add_lora")
        adapted: list[Any] = [module for module in self.modules() if hasattr(module, "_disable_adapters")]
        for module in adapted:
            # PEFT's own switch would also freeze the adapters
            module._disable_adapters = True
        try:
            yield
        finally:
            for module in adapted:
                module._disable_adapters = False

    def adapter_obstacle(self) -> str:
        """Return why an engine cannot serve the adapter beside its base; "" if it can."""
        if self.lora is None:
            return "the model has no adapter: actor.lora is not set"
        if self.lora.target_parameters:
            return "experts have adapters (target_parameters), which travel merged"
        head = self.get_output_embeddings() if isinstance(self, PreTrainedModel) else None
        adapted = {name: layer for name, layer in self.named_modules() if hasattr(layer, "base_layer")}
        odd = [name for name, layer in adapted.items() if type(layer.base_layer) is not nn.Linear or layer is head]
        return f"{odd[0]} has an adapter, and is the output embedding or no plain linear layer" if odd else ""

    # -- on the way in -------------------------------------------------------------------------------------------

    def checkpoint_name(self, name: str) -> str:
        """Return the name without the adapters: `q_proj.weight` for `q_proj.base_layer.weight`."""
        return super().checkpoint_name(self._plain_name(name))

    def preprocess_named_parameter(self, name: str, tensor: Tensor) -> Tensor:
        """Change a parameter on its way in, under its name without adapters.

        Args:
            name: the parameter.
            tensor: this worker's box of it.

        Returns:
            The changed box.
        """
        return super().preprocess_named_parameter(self._plain_name(name), tensor)

    def missing_parameter(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """Return an adapter's initial value as PEFT draws it."""
        if self.lora is not None and name.endswith((_DOWN, _UP)):
            return torch.zeros(shape, device="cpu") if name.endswith(_UP) else initial_factor(name, shape)
        return super().missing_parameter(self._plain_name(name), shape)

    # -- on the way out ------------------------------------------------------------------------------------------

    def served_parameter(self, name: str, parameter: Tensor) -> Tensor:
        """Return a layer's weight, or the matrices of its experts, with their adapter merged into them."""
        layer, _, attribute = name.rpartition(_HELD)
        if self.lora is None or not layer:
            return super().served_parameter(self._plain_name(name), parameter)
        if (adapter := adapter_of(self, plain_name(layer), attribute)) is not None:
            merged = merge_experts(parameter, adapter, self.lora.alpha / self.lora.rank)
            return super().served_parameter(self._plain_name(name), merged)
        if attribute != "weight":
            return super().served_parameter(self._plain_name(name), parameter)
        down, up = self.get_parameter(layer + _DOWN), self.get_parameter(layer + _UP)
        scale = self.lora.alpha / self.lora.rank
        if isinstance(self.get_submodule(f"{layer}{_HELD}".rstrip(".")), Conv1D):
            rows, columns = local_shard(parameter).box
            factors = full_tensor(up).T[:, columns], full_tensor(down).T[rows]
            merged = dtensor_like(parameter, merge(local_tensor(parameter), *factors, scale))
        else:
            merged = merge(parameter, down, up, scale)
        return super().served_parameter(self._plain_name(name), merged)

    def postprocess_named_parameter(self, name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
        """Leave adapters out: they are already merged into the weights.

        Args:
            name: the parameter.
            tensor: this worker's box of it.

        Returns:
            Name and box; None for adapters.
        """
        if self.lora is not None and name.endswith((_DOWN, _UP)):
            return None
        return super().postprocess_named_parameter(self._plain_name(name), tensor)

    def _plain_name(self, name: str) -> str:
        return name if self.lora is None else plain_name(name)

    def save_adapter(self, folder: Path, trained: Mapping[str, Tensor]) -> None:
        """Write the trained parameters into `folder` in PEFT's format.

        The result opens with `peft.PeftModel.from_pretrained(base, folder)`, where `base` is the original checkpoint.

        Args:
            folder: where the files go.
            trained: whole tensors by parameter name.

        Raises:
            ConfigError: the module has no adapters.
        """
        if self.lora is None:
            raise ConfigError(f"{type(self).__name__} has no adapter to save: call add_lora")
        own = {id(self.get_parameter(name)): tensor for name, tensor in trained.items()}
        # an adapter of tied layers has several names
        places = {name: own[id(p)] for name, p in self.named_parameters(remove_duplicate=False) if id(p) in own}
        adapted = [name.removesuffix(_DOWN) for name in places if name.endswith(_DOWN)]
        layers = {name for name in adapted if not wraps_parameter(self.get_submodule(name))}
        whole = [_SCORE] if isinstance(self, HuggingFaceFsdp2ScoreModule) else None
        # all-linear: layers of the base as it is now, which an opener's may not be
        named = endings(self, layers) if self.lora.target_modules == [ALL_LINEAR] else set(self.lora.target_modules)
        taken = {name for name in named if experts_of(self) and name.rpartition(".")[2] in _TAKEN}
        changes = {"base_model_name_or_path": base_name(self), "inference_mode": True, "modules_to_save": whole}
        config = self._peft_config(self.lora, sorted(named - taken), **changes)
        if taken:  # PEFT leaves parameters where they are, and computes the same, but without dropout
            if config.lora_dropout:
                warn_once(logger, f"exports have lora_dropout=0: PEFT has none for {', '.join(sorted(taken))}")
            config.lora_dropout = 0.0
            config.target_parameters = [*self.lora.target_parameters, *(f"{name}.weight" for name in sorted(taken))]
        config.save_pretrained(str(folder))
        tensors = {
            f"base_model.model.{name_before(self, name).replace('.default.', '.')}": tensor.detach().cpu().clone()
            for name, tensor in places.items()
        }
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def initial_factor(name: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Return the initial A of an adapter as PEFT draws it: Kaiming-uniform with a = sqrt(5). B is zero.

    Args:
        name: name of the parameter. The draw depends on the name and the seed alone.
        shape: its shape.
        seed: seed of the adapter.
    """
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(name.encode()) ^ seed)
    return nn.init.kaiming_uniform_(torch.empty(shape, device="cpu"), math.sqrt(5), generator=generator)


def base_name(module: nn.Module) -> str | None:
    """Return the folder or hub name from which a model was made, for PEFT; None if it was made otherwise."""
    return module.config._name_or_path or None if isinstance(module, PreTrainedModel) else None


def target_layers(module: nn.Module, options: LoraOptions) -> list[str]:
    """Return the names of the linear layers that the options name, in the module's order.

    Args:
        module: the module, without adapters.
        options: `all-linear` names every linear layer but the output embedding, a new head, and layers that are not
            called.

    Raises:
        ConfigError: a name fits no linear layer, or a layer that cannot have an adapter.
    """
    raw, modules = layers_read_raw(module), dict(module.named_modules())
    _check_target_parameters(module, options.target_parameters)
    if options.target_modules == [ALL_LINEAR]:
        if raw:
            layers = ", ".join(sorted({name.rpartition(".")[2] for name in raw}))
            logger.warning("no adapters on %s: %s reads weights past the layers", layers, next(iter(raw.values())))
        head = module.get_output_embeddings() if isinstance(module, PreTrainedModel) else None
        found = [name for name, layer in modules.items() if isinstance(layer, _LINEAR) and layer is not head]
        return [name for name in found if name != _SCORE and name not in raw]
    targets = set[str]()
    for target in options.target_modules:
        named = {name: layer for name, layer in modules.items() if f".{name}".endswith(f".{target}")}
        problem = ""
        if not named or not all(isinstance(layer, _LINEAR) for layer in named.values()):
            known = {name.rpartition(".")[2] for name, layer in modules.items() if isinstance(layer, _LINEAR)}
            problem = f"is no linear layer; {did_you_mean(target, known)}"
        elif isinstance(module, HuggingFaceFsdp2ScoreModule) and _SCORE in named:
            problem = "is the new head, which is trained as a whole"
        elif reader := next(filter(None, map(raw.get, named)), None):
            problem = f"would be ignored: {reader} reads the layer's weight and does not call the layer; leave it out"
        elif any(_is_tied(module, layer) for layer in named.values()):
            problem = "shares its weight with the input embedding, which would have to change with it; leave it out"
        if problem:
            raise ConfigError(f"target_modules: {target!r} {problem}")
        targets |= named.keys()
    return [name for name in modules if name in targets]


def stored_layers(module: nn.Module) -> dict[str, tuple[str, nn.Linear]]:
    """Return the linear layers that may have adapters which come and go, with their own names.

    These are plain layers other than the output embedding, which are called.

    Args:
        module: the model.

    Returns:
        Name and layer by the name in PEFT's files, which keep the names of checkpoints.
    """
    head = module.get_output_embeddings() if isinstance(module, PreTrainedModel) else None
    raw, end = layers_read_raw(module), ".lora_A.weight"
    return {
        name_before(module, f"{name}{end}").removesuffix(end): (name, layer)
        for name, layer in module.named_modules()
        if type(layer) is nn.Linear and layer is not head and name not in raw
    }


def own_adapter(module: LoraTrainModule) -> AdapterWeights:
    """Return copies of the values of a module's own adapter on CPU; a collective of all ranks.

    Raises:
        ConfigError: the module has none, or an adapter of experts.
    """
    if module.lora is None:
        raise ConfigError(f"{type(module).__name__} has no adapter of its own: call add_lora, or name an adapter")
    factors = {}
    for name, down in module.named_parameters():
        if not name.endswith(_DOWN):
            continue
        layer = name.removesuffix(_DOWN)
        if wraps_parameter(module.get_submodule(layer)):
            raise ConfigError(f"{layer} has adapters of experts, which travel merged: use p2p_weight_sync")
        pair = (full_tensor(part).cpu().clone() for part in (down, module.get_parameter(layer + _UP)))
        factors[name_before(module, name).removesuffix(_DOWN)] = Factors(*pair)
    return AdapterWeights(module.lora.rank, module.lora.alpha, factors)


def _check_target_parameters(module: nn.Module, targets: Sequence[str]) -> None:
    experts = experts_of(module)
    stacks = [f"{name}.{key}" for name, each in experts.items() for key, p in each._parameters.items() if p.ndim == 3]
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in stacks):
            known = {".".join(name.split(".")[-3:]) for name in stacks}
            problem = f"names no stack of experts' matrices; {did_you_mean(target, known)}"
            raise ConfigError(f"target_parameters: {target!r} {problem if known else 'fits a model with experts'}")


def endings(module: nn.Module, layers: Collection[str]) -> set[str]:
    """Return the shortest ending of each layer's name that fits no module without an adapter.

    Args:
        module: the module.
        layers: names of the layers with adapters.
    """
    names = {plain_name(name) for name, _ in module.named_modules() if ".lora_" not in name}
    others = {ending for name in names - {*layers} - layers_read_raw(module).keys() for ending in _endings_of(name)}
    return {next((ending for ending in _endings_of(name) if ending not in others), name) for name in layers}


def _endings_of(name: str) -> list[str]:
    """Return the endings of a dotted name, the shortest first."""
    parts = name.split(".")
    return [".".join(parts[i:]) for i in reversed(range(len(parts)))]


@torch.no_grad()
def merge(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return `weight + scale up @ down`, computed in float32 at least, with the dtype and sharding of `weight`.

    A collective if the tensors are DTensors, which are sharded alike.

    Args:
        weight: [out, in].
        down: [rank, in].
        up: [out, rank].
        scale: factor of the product.
    """
    if isinstance(weight, DTensor) and isinstance(down, DTensor):
        # of `down` the columns that this rank holds of the weight; its rows of `up` are the weight's
        columns = [placement if placement.is_shard(1) else Replicate() for placement in down.placements]
        down = down.redistribute(placements=columns)
        own = merge(local_tensor(weight), local_tensor(down), local_tensor(up), scale)
        return dtensor_like(weight, own)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return torch.add(weight.to(dtype), up.to(dtype) @ down.to(dtype), alpha=scale).to(weight.dtype)


@torch.no_grad()
def merge_experts(stack: Tensor, adapter: Any, scale: float) -> Tensor:
    """Return experts' matrices with an adapter added, with the dtype and sharding of `stack`.

    A collective if the tensors are DTensors.

    Args:
        stack: [E, rows, columns].
        adapter: PEFT's wrapper.
        scale: factor of the product.
    """
    down, up = (full_tensor(part["default"].weight) for part in (adapter.lora_A, adapter.lora_B))
    box, local = local_shard(stack).box, local_tensor(stack)
    dtype = torch.promote_types(local.dtype, torch.float32)
    left, right = stacked_factors(down, up, stack.shape[0], is_transposed(adapter))
    merged = torch.baddbmm(local.to(dtype), left[box[0]].to(dtype), right[box[0]].to(dtype), alpha=scale)
    return dtensor_like(stack, merged.to(local.dtype))


def _is_tied(module: nn.Module, layer: nn.Module) -> bool:
    """Return True if the weight of `layer` is, or will be after tying, that of the input embedding."""
    if not isinstance(module, PreTrainedModel) or layer is not module.get_output_embeddings():
        return False
    return bool(getattr(module.config.get_text_config(), "tie_word_embeddings", False))


PATTERN_S = 5
"""seconds for the patterns of an adapter's config"""


def adapter_config(folder: Path) -> Mapping[str, Any]:
    """Return the config of a PEFT adapter.

    Raises:
        ConfigError: the file is not readable.
    """
    file = folder / "adapter_config.json"
    try:
        with reading(file) as stream:
            found = json.load(stream)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not a config of PEFT: {error}") from error
    if not isinstance(found, Mapping):
        raise ConfigError(f"{file}: not a config of PEFT: expected a mapping")
    return found


def merge_adapter(folder: Path, base: str, out: Path) -> None:
    """Write a base model with an adapter merged into its weights, as an ordinary Hugging Face folder.

    The sum is computed in float32 and stored in the base's dtype. A head or embedding with an adapter is not tied in
    the result. Both models must compute the same logits.

    Args:
        folder: folder of the adapter, in PEFT's format.
        base: folder or hub name of the model that the adapter belongs to.
        out: an empty folder.

    Raises:
        ConfigError: PEFT is missing, there is no such base, or the adapter does not fit it.
        CheckpointError: the base or the adapter is unusable.
    """
    require("adapters need", "lora", "peft")
    import peft  # optional, and slow to import

    origin, config = pretrained.local_checkpoint(base), adapter_config(folder)
    with pretrained.opening(folder, "adapter"):
        weights = peft.load_peft_weights(str(folder), device="cpu")
    model, source = _base(origin, config, weights)
    _check_patterns(folder, config, [name for name, _ in model.named_modules()])
    _untie(model, weights)
    try:
        adapted = pretrained.load_adapter(peft.PeftModel, model, folder).eval()
        strange = sorted(weights.keys() ^ peft.get_peft_model_state_dict(adapted).keys())
        before = _logits(adapted)
        merged = adapted.merge_and_unload(safe_merge=True)
        merged.tie_weights()
    except (AttributeError, CheckpointError, KeyError, RuntimeError, ValueError) as error:  # PEFT has none of its own
        raise ConfigError(f"adapter={folder} does not fit {base}: {pretrained.summary(error)}") from error
    if strange:
        told = f"{len(strange)} tensors belong to one of them only, such as {strange[0]}"
        raise ConfigError(f"adapter={folder} does not fit {base}: {told}")
    if not torch.allclose(before, after := _logits(merged), atol=1e-3 * float(before.abs().max()), rtol=1e-3):
        problem = f"computes other logits than beside it, by up to {(before - after).abs().max():.3g}"
        raise ConfigError(f"adapter={folder}: merged into {base}, it {problem}; serve it as an adapter")
    own = next((place for place in (folder, folder.parent) if (place / "tokenizer_config.json").exists()), origin)
    _write_merged(merged, source, out, origin, own)
    if config.get("task_type") == _SCORER:
        pad_apart(out)


def _base(
    origin: Path, adapter: Mapping[str, Any], weights: Mapping[str, torch.Tensor]
) -> tuple[Any, StoredCheckpoint | None]:
    """Return the base model in float32, with the head that the adapter was trained with, and its checkpoint."""
    if adapter.get("task_type") == _SCORER:
        head = next((tensor for name, tensor in weights.items() if name.endswith("score.weight")), None)
        labels = {} if head is None else {"num_labels": len(head)}
        return pretrained.load_model(AutoModelForSequenceClassification, origin, **labels), None
    config = pretrained.load_config(origin)
    pretrained.check_plain(config, origin)
    pretrained.forget_quantisation(config)
    model = pretrained.meta_model(config, torch.float32)
    reader = StoredCheckpoint(model, origin)
    check_fit(reader, origin, model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    replace_parameters(model, lambda parameter: nn.Parameter(reader.read(names[parameter]).float()))
    for name, buffer in stored_buffers(model).items():
        if name in reader.names():
            buffer.copy_(reader.read(name))
    return model, reader


def _write_merged(model: Any, source: StoredCheckpoint | None, out: Path, origin: Path, tokenizer: Path) -> None:
    """Write a merged model in the form of its base's checkpoint."""
    dtype = pretrained.stored_dtype(origin, pretrained.causal_config(pretrained.load_config(origin)))
    form, writer = stored_form(model, source, is_writer=True, drops=False), Writer(out, dtype)
    tensors = {**dict(model.named_parameters()), **stored_buffers(model)}
    for name, tensor, own_dtype in form.tensors((name, tensor.detach()) for name, tensor in tensors.items()):
        writer.add(name, tensor, own_dtype)
    model.config.dtype = dtype
    writer.add_config(*form.config(model.config, type(model).__name__), None)
    copy_companions(origin, writer.folder, tokenizer=tokenizer)
    writer.finish()


def _untie(model: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Give a tied head a weight of its own if the adapter changes the head or the embedding alone."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    names = [name for name, module in model.named_modules() if module in (head, embedding)]
    is_tied = head is not None and head.weight is embedding.weight
    if is_tied and any(f".{name}." in tensor for name in names for tensor in weights):
        head.weight = torch.nn.Parameter(embedding.weight.detach().clone())
        model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    ids = torch.arange(16)[None] * 7 % model.config.get_text_config().vocab_size
    return model(input_ids=ids, use_cache=False).logits.float()


def _check_patterns(folder: Path, adapter: Mapping[str, Any], names: list[str]) -> None:
    """Refuse regular expressions of a stranger that take too long on the names of modules, as PEFT matches them.

    Only a signal interrupts a match, so this is for the main thread.

    Raises:
        ConfigError: the expressions take more than PATTERN_S.
    """

    def stop(*_: object) -> None:
        problem = f"take more than {PATTERN_S} s to match the names of modules; name the modules of target_modules"
        raise ConfigError(f"{folder}: the patterns of its adapter_config.json {problem} instead")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, PATTERN_S)
    try:
        for pattern in (text for text in _texts(adapter) if set(text) & set("*+{")):
            with suppress(re.error, OverflowError, RecursionError):
                for tried in (re.compile(pattern), re.compile(rf"(.*\.)?({pattern})$")):
                    _ = [tried.fullmatch(name) or tried.match(name) for name in names]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for part in [*value, *value.values()] if isinstance(value, Mapping) else value:
            yield from _texts(part)
