"""Hugging Face causal models as train modules.

Dropout is switched off in the layers and in the config, which a forward may read.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial, reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.dropout import _DropoutNd
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_outputs import TokenClassifierOutput
from transformers.modeling_utils import _CAN_RECORD_REGISTRY

from rlite.algorithms.divergence import Divergence, TaughtLogprobs
from rlite.algorithms.kept_ids import KeptIds
from rlite.algorithms.logprobs import TokenLogprobs, next_token
from rlite.backends.models import experts
from rlite.backends.models.architecture import check_architecture, check_gpu_kernels, prefix_refusal, rope_limit
from rlite.backends.models.attention import PACKED, PackedLayout, attention, causal_attention
from rlite.backends.models.batch_invariant import causal_attention_in_blocks, make_invariant, obstacle
from rlite.backends.models.experts import divided_apart, experts_of
from rlite.backends.models.head_logprobs import logprobs_of, passed_through
from rlite.backends.models.mixers import (
    Documents,
    Mixer,
    check_not_split,
    find_mixers,
    install_mixers,
    mixing,
    recompute_alike,
)
from rlite.backends.models.replay import Replay, replay_refusal, routing_shape
from rlite.backends.models.routing import Routing, check_balance
from rlite.backends.models.teachers import TaughtModule, compare
from rlite.data.routing import ROUTED, RoutingShape
from rlite.engine.user_module import own_methods
from rlite.errors import ConfigError
from rlite.nn.base import BaseTrainModule, CheckpointSource, logprobs_of_logits
from rlite.nn.pretrained import (
    causal_config,
    check_plain,
    end_ids,
    forget_quantisation,
    load_config,
    load_tokenizer,
    meta_parameters,
    padding_token,
    real_tensors,
)
from rlite.runtime.parallel.context_parallel import ContextShare
from rlite.runtime.parallel.fsdp import TrainMesh, shard_group
from rlite.runtime.parallel.tensor import check_split, parallelize
from rlite.wording import counted

DropoutRates = Mapping[tuple[str, ...], float]
"""rates that were switched off: where each stands in the config -> what it was"""


def disable_dropout(config: PretrainedConfig) -> DropoutRates:
    """Set every dropout rate of a config to 0, before a model is made of it.

    Returns the rates that were set to 0.
    """
    rates = dict(_rates(config))
    _set_rates(config, {path: type(rate)(0) for path, rate in rates.items()})  # some configs insist on the type
    return rates


def with_dropout(config: PretrainedConfig, rates: DropoutRates) -> PretrainedConfig:
    """Return a copy of a config with the rates that `disable_dropout` returned."""
    config = copy.deepcopy(config)
    _set_rates(config, rates)
    return config


def _set_rates(config: PretrainedConfig, rates: DropoutRates) -> None:
    for path, rate in rates.items():
        setattr(reduce(getattr, path[:-1], config), path[-1], rate)


def disable_dropout_layers(module: nn.Module) -> None:
    """Switch off dropout layers, including those whose rate is no option of the config."""
    for child in module.modules():
        if isinstance(child, _DropoutNd):
            child.p = 0.0


def _rates(config: PretrainedConfig, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            yield from _rates(value, (*path, name))
        elif "drop" in name and isinstance(value, int | float) and not isinstance(value, bool) and value:
            yield (*path, name), value


class HuggingFaceFsdp2TrainModule(TaughtModule):
    """Base class of Hugging Face causal models: `class Mine(HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM)`.

    Inside `accelerate.init_empty_weights()` or `torch.device("meta")`, `from_pretrained` reads only the config and
    remembers the path. Outside it is transformers' own, so that the module can be tried without an engine.
    """

    config: PretrainedConfig
    loss_type: str
    _no_split_modules: Sequence[str] | None
    _config_options: ClassVar[Mapping[str, Any]] = {}
    """changes to the checkpoint's config"""
    _keeps_dropout: ClassVar[bool] = True
    """true to keep the dropout of the checkpoint's config in training mode"""
    _dropout: DropoutRates = MappingProxyType({})
    _changes_logits: bool = False
    """true if the model's forward changes logits after the output embedding"""
    further_end_ids: Sequence[int] = ()
    """end tokens that the model learns besides its own; a saved checkpoint names them"""
    is_deterministic: bool = False
    """set by the worker: log-probabilities do not depend on the batch; see `rlite.backends.models.batch_invariant`"""

    @classmethod
    def from_pretrained(cls, path: str | Path, *args: Any, **kwargs: Any) -> Any:
        """Make the module from a checkpoint; on meta from its config alone.

        Args:
            path: a Hugging Face folder or hub name.
            *args: for transformers' own method, not on meta.
            **kwargs: for transformers' own method, not on meta.

        Returns:
            The module.

        Raises:
            ConfigError: there is no such checkpoint; or further arguments were given on meta.
        """
        if not nn.Linear(1, 1, bias=False).weight.is_meta:
            known = next((base for base in cls.__mro__ if base.__module__.startswith("transformers.models.")), cls)
            names = (known.__name__, cls.config_class.model_type)  # type: ignore[attr-defined]
            if (rules := next(filter(None, map(get_checkpoint_conversion_mapping, names)), None)) is not None:
                # transformers looks conversions up by the name of the class, which is the user's here
                register_checkpoint_conversion_mapping(cls.__name__, rules, overwrite=True)
            return super().from_pretrained(path, *args, **kwargs)  # type: ignore[misc]
        if args or kwargs:
            given = [*map(repr, args), *kwargs]
            raise ConfigError(f"from_pretrained on meta takes the path alone, not {given}; dtypes: options of build()")
        with real_tensors(), meta_parameters():
            config = load_config(path, cls.config_class, **cls._config_options)  # type: ignore[attr-defined]
            check_plain(whole := load_config(path), path)
            if type(found := causal_config(whole)) is type(config):  # perhaps inside another model
                config.dtype, config.tie_word_embeddings = found.dtype, found.tie_word_embeddings
            forget_quantisation(config)
            rates = {} if cls._keeps_dropout else disable_dropout(config)
            module = cls(config)
        with real_tensors():  # accelerate registers a new parameter for each name, so tied weights are apart
            module.tie_weights()  # type: ignore[operator]
        if not cls._keeps_dropout:
            disable_dropout_layers(module)
        module._dropout = rates
        module.config._name_or_path = str(path)
        module.loss_type = "ForCausalLM"  # transformers reads it off the class's name, which is the user's here
        return module

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register the outputs that `output_hidden_states=True` records.

        transformers does so only in the process that made the model.
        """
        super().__setstate__(state)
        for module in self.modules():
            if isinstance(module, PreTrainedModel):
                _CAN_RECORD_REGISTRY[module] = module._can_record_outputs

    def materialization_source(self) -> CheckpointSource:
        """Return the path from which the module was made.

        Raises:
            ConfigError: it was made from a config.
        """
        if not self.config._name_or_path:
            problem = f"{type(self).__name__} was made from a config, so there are no weights to read"
            raise ConfigError(f"{problem}: use from_pretrained, or define materialization_source()")
        return self.config._name_or_path

    def exported_config(self) -> PretrainedConfig:
        """Return a copy of the config for a checkpoint, with the dropout that it was read with."""
        return with_dropout(self.config, self._dropout)

    def fsdp_units(self) -> list[nn.Module]:
        """Return the blocks that transformers does not allow to split, by default the entries of module lists."""
        blocks = [module for module in self.modules() if type(module).__name__ in (self._no_split_modules or ())]
        # a weight that modules share stays outside: sharding one of them alone unties it
        counts = Counter(id(p) for module in self.modules() for p in module._parameters.values() if p is not None)
        units = [block for block in blocks if not any(counts[id(parameter)] > 1 for parameter in block.parameters())]
        return units or super().fsdp_units()

    def recompute_activations(self) -> None:
        """Recompute the activations of each layer with the attention that its forward used."""
        enable: Any = getattr(self, "activation_checkpointing_enable", None)  # its name since transformers 5.23
        enable = enable or self.gradient_checkpointing_enable
        enable({"use_reentrant": False, "context_fn": self._recomputing_alike})

    def _recomputing_alike(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts of a forward and of its recomputation, with the attention and the experts in use now."""
        experts = () if self.replay is None else (self.replay.replaying_alike(),)
        return recompute_alike(self.config, *experts)

    def check_deterministic(self, device_type: str) -> None:
        """Check that the model is one of those that are computed independently of the batch.

        Args:
            device_type: type of the devices of the workers.

        Raises:
            ConfigError: the model is not supported; the message gives the reason.
        """
        reason = obstacle(self, device_type, torch.float32)
        if mixers := find_mixers(self):
            steps = "in chunks of tokens when it trains, and token by token when it is served"
            reason = f"{mixers[0].name} sums the past {steps}"
        if reason is None and (rate := self.config.attention_dropout):
            reason = f"the model has attention dropout ({rate})"
        if reason is not None:
            problem = f"{reason}, so its log-probabilities would not be the served ones bit for bit"
            raise ConfigError(f"deterministic=true: {problem}; leave deterministic out")

    def make_deterministic(self) -> None:
        """Make log-probabilities independent of the batch from now on."""
        make_invariant(self)
        self.is_deterministic = True

    def check_architecture(self) -> None:
        """Raise ConfigError if packs would be computed differently from transformers."""
        if (cls := self._transformers_class()) is not None:
            check_architecture(cls, self.config)

    def check_gpu_kernels(self) -> None:
        """Raise ConfigError if the heads are too wide for the attention kernels of GPUs."""
        if (cls := self._transformers_class()) is not None:
            check_gpu_kernels(cls, self.config)

    def _transformers_class(self) -> type[PreTrainedModel] | None:
        """Return the class of transformers that the module extends; None if it extends none."""
        bases = [base for base in type(self).__mro__ if issubclass(base, PreTrainedModel)]
        cls = next(base for base in bases if not issubclass(base, BaseTrainModule))
        return None if cls is PreTrainedModel else cls

    def check_parallel(self, size: int) -> None:
        """Raise ConfigError if the model's own plan cannot split it over `size` ranks."""
        check_not_split(self, f"tp_size={size}", "tp_size=1")
        check_split(self, size, divided_apart(self))

    def check_context_parallel(self, size: int) -> None:
        """Raise ConfigError if the tokens of a sequence cannot be divided over `size` ranks."""
        check_not_split(self, f"sp_size={size}", "sp_size=1, and gradient_checkpointing=true if memory is short")

    def parallelize(self, mesh: DeviceMesh) -> None:
        """Split the model by its own plan; see `rlite.runtime.parallel.tensor`."""
        parallelize(self, mesh, divided_apart(self))
        for observer in (self.routing, self.replay):
            if observer is not None:
                observer.tensor_group = mesh.get_group()

    def check_experts(self, options: Any, device_type: str) -> None:
        """Check the options of experts; see `rlite.backends.models.experts`.

        Args:
            options: the executor's options.
            device_type: type of the devices of the workers.

        Raises:
            ConfigError: they do not fit the model.
        """
        model: Any = self
        dtype = getattr(torch, options.compute_dtype or ("bfloat16" if device_type == "cuda" else options.param_dtype))
        experts.check_implementation(model, options.experts_implementation, device_type, dtype)
        check_balance(model, options.router_aux_loss_coef, options.router_bias_update_rate)
        if options.ep_size > 1:
            experts.check_expert_parallel(model, options.ep_size)

    def prepare_experts(self, mesh: TrainMesh, options: Any) -> list[nn.Module]:
        """Divide the experts of the module, and observe their routers; see `rlite.backends.models.experts`.

        Returns:
            The experts, which are sharded over a mesh of their own.
        """
        model: Any = self
        if not experts_of(model):
            return []
        self.routing = Routing(model, options.router_aux_loss_coef, options.router_bias_update_rate)
        if (shape := routing_shape(model)) is not None:
            self.routing.replay = self.replay = Replay(model, shape)
        return experts.divide(model, mesh)

    def routing_shape(self) -> RoutingShape | None:
        """Return the form of the experts' choices that the module can replay; None if it has no experts."""
        model: Any = self
        return routing_shape(model)

    def replay_obstacle(self) -> str | None:
        """Return why the module cannot replay chosen experts; see `rlite.backends.models.replay`."""
        cls = self._transformers_class()
        return super().replay_obstacle() if cls is None else replay_refusal(cls, self.config)

    def prefix_obstacle(self) -> str | None:
        """Return why tokens with which sequences of a pack begin alike cannot be computed once; None if they can."""
        if own := sorted(own_methods(type(self)).keys() & {"forward", "compute_logits", "compute_logprobs"}):
            return f"{type(self).__name__} has {counted(len(own), 'method')} of its own: {', '.join(own)}"
        is_dropping = any(isinstance(child, _DropoutNd) and child.p for child in self.modules())
        if is_dropping or any(_rates(self.config)):
            return "dropout draws other numbers for each sequence"
        if mixers := find_mixers(self):
            return f"{mixers[0].name} carries a state from token to token"
        cls = self._transformers_class()
        return None if cls is None else prefix_refusal(cls, self.config)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate with transformers' own method, for methods of yours.

        For rollouts an inference engine is many times faster.

        Ranks that share weights continue until the last of them is done, and must call it equally often.

        Returns:
            The result of transformers' `generate`.
        """
        group = shard_group(self)
        kwargs["synced_gpus"] = group is not None and group.size() > 1
        return super().generate(*args, **kwargs)  # type: ignore[misc]

    def _has_unfinished_sequences(self, this_peer_finished: bool, synced_gpus: bool, device: torch.device) -> bool:
        """Return True if a rank that shares weights has unfinished sequences.

        transformers would ask all ranks of the world.
        """
        if not synced_gpus:
            return not this_peer_finished
        num_unfinished = torch.tensor(float(not this_peer_finished), device=device)
        dist.all_reduce(num_unfinished, group=shard_group(self))
        return num_unfinished.item() > 0

    @cached_property
    def _rope_limit(self) -> int | None:
        return rope_limit(self.config.get_text_config())

    @cached_property
    def _mixers(self) -> list[Mixer]:
        return install_mixers(self)

    def compute_logits(self, data: Mapping[str, Any]) -> Tensor:
        """Run the model's own forward over a pack, with attention inside each sequence.

        Returns:
            Logits [T, V].

        Raises:
            ConfigError: a sequence is so long that it changes the rotary angles of the others.
        """
        share = self._share(data)
        return share.expand(self._computed_logits(data, share))

    def _share(self, data: Mapping[str, Any]) -> ContextShare:
        return ContextShare(data["cu_seqlens"], self.context_group, data.get("prefix_tree"))

    def _computed_logits(self, data: Mapping[str, Any], share: ContextShare) -> Tensor:
        """Return the logits [U, V] of the tokens of a pack that are computed."""
        limit, length = self._rope_limit, data["max_seqlen"]
        if limit is not None and length > limit:
            problem = f"the rotary embedding of {type(self).__name__} changes with the longest sequence of a pack"
            raise ConfigError(f"a sequence of {length} tokens: beyond {limit} {problem}; use shorter sequences")
        attend = causal_attention_in_blocks if self.is_deterministic else causal_attention
        layout = PackedLayout(data["cu_seqlens"], length, share, attend)
        ids, positions = (share.take(data[name])[None] for name in ("input_ids", "position_ids"))
        documents = Documents(layout.lengths, ids.is_cuda) if self._mixers else None
        routed = self._routed(data, share, ids.numel())
        with attention(self.config, PACKED, layout), mixing(documents), self._seen(ids[0], share), routed:
            output = self(input_ids=ids, position_ids=positions, use_cache=False)
        return share.gather_computed(output.logits[0])

    def _unexpanded_logits(self, data: Mapping[str, Any], share: ContextShare) -> Tensor:
        """Return logits [U, V] by `compute_logits`, which a class may replace; nothing is shared then, and U is T."""
        return self.compute_logits(data) if share.tree is None else self._computed_logits(data, share)

    @contextmanager
    def _routed(self, data: Mapping[str, Any], share: ContextShare, num_own: int) -> Iterator[None]:
        """Replay the pack's `routed_experts` inside of the block; if it is None, record them there."""
        if self.replay is None or ROUTED not in data:
            yield
        elif data[ROUTED] is None:
            with self.replay.recording():
                yield
                data[ROUTED] = self.replay.recorded(share, num_own)  # type: ignore[index]
        else:
            with self.replay.replaying_pack(data[ROUTED], share):
                yield

    def _seen(self, ids: Tensor, share: ContextShare) -> AbstractContextManager[None]:
        """Return a context in which the routers' choices for this rank's tokens are seen."""
        if self.routing is None:
            return nullcontext()
        return self.routing.tokens(share.own_counts(ids))

    def compute_hidden(self, data: Mapping[str, Any]) -> Tensor:
        """Compute the last hidden states [T, H] of a pack, which the output embedding reads.

        Returns:
            The hidden states.

        Raises:
            ConfigError: the model has no linear output embedding, or changes logits after it.
        """
        head, share = self.get_output_embeddings(), self._share(data)  # type: ignore[operator]
        if isinstance(head, nn.Linear):
            with passed_through(head) as answers:
                output = self._unexpanded_logits(data, share)
            if len(answers) == 1 and answers[0][0].is_what_became(output, share):
                return share.expand(output).to(answers[0][1])
        raise ConfigError(self._without_divergence())

    def _without_divergence(self) -> str:
        told = f"{type(self).__name__} does not compute logits by a linear output embedding alone"
        return f"{told}, so only distill.support=sampled can compare it with a teacher"

    def compute_logprobs(
        self,
        data: Mapping[str, Any],
        temperature: float = 1.0,
        positions: Tensor | None = None,
        divergence: Divergence | None = None,
    ) -> TokenLogprobs:
        """Compute log-probabilities as the base class does, without logits of the whole pack if the model allows it.

        The model's own forward runs with an output embedding that returns log-probabilities and entropies [1, T, 2]
        instead of logits; see `head_logprobs.logprobs_of`. A model that changes its logits afterwards (scales or caps
        them) would change those. It is recognised by its output and gets logits from then on, like a model
        without a linear output embedding.

        Args:
            data: the pack, as for `compute_logits`.
            temperature: divides the logits.
            positions: bool [T]; values where it is False are not needed and may be 0. None needs all.
            divergence: also compute this divergence from the teacher, whose columns the pack has. None computes none.

        Returns:
            Log-probabilities and entropies.

        Raises:
            ConfigError: a divergence is asked for, and the logits are not those of a linear output embedding alone.
        """
        head, share = self.get_output_embeddings(), self._share(data)  # type: ignore[operator]
        labels = next_token(data["input_ids"], data["cu_seqlens"])
        kept = KeptIds.of_pack(data) if "kept_ids" in data else None
        if self._changes_logits or not isinstance(head, nn.Linear):
            if divergence is not None:
                raise ConfigError(self._without_divergence())
            return self._logprobs_of_logits(data, share, labels, temperature, kept)
        own_kept = kept if kept is None or share.is_whole else kept.select(share.own_positions())
        if positions is not None and share.group is not None:
            positions = positions.to(labels.device)
        wanted = None if positions is None else share.take_any(positions)
        compared = None
        if divergence is not None:
            compared = partial(compare, self.teacher_heads, divergence, temperature, data, share.take)
        how = own_kept, self.is_deterministic, self.head_kernels, compared
        with logprobs_of(head, share.take(labels), temperature, wanted, *how) as answers:
            output = self._unexpanded_logits(data, share)
        if len(answers) != 1 or not answers[0].is_what_became(output, share):
            self._changes_logits = True
            return self.compute_logprobs(data, temperature, positions, divergence)
        columns = answers[0].columns(share.expand(output))
        if divergence is None:
            return TokenLogprobs(*columns)
        return TaughtLogprobs.of(TokenLogprobs(*columns[:-1]), columns[-1])

    def _logprobs_of_logits(
        self, data: Mapping[str, Any], share: ContextShare, labels: Tensor, temperature: float, kept: KeptIds | None
    ) -> TokenLogprobs:
        """Return log-probabilities and entropies [T] from the logits of all tokens that are computed."""
        logits = self._unexpanded_logits(data, share)
        if share.tree is not None:
            labels, kept = labels[share.tree.tokens], None if kept is None else kept.select(share.tree.tokens)
        return TokenLogprobs(*map(share.expand, logprobs_of_logits(logits, labels, temperature, kept)))


def exported_class(module: nn.Module) -> str:
    """Return the transformers class that a checkpoint of `module` names, not the user's subclass."""
    known = (cls for cls in type(module).__mro__ if cls.__module__.startswith("transformers.models."))
    return next(known, type(module)).__name__


class HuggingFaceFsdp2ScoreModule(HuggingFaceFsdp2TrainModule):
    """Base of reward models and critics: `class Critic(HuggingFaceFsdp2ScoreModule, Qwen2ForSequenceClassification)`.

    Losses see scores [T], one per token. Weights are those of a causal model with a new head (normal, of deviation 1 /
    (hidden size + 1), as in Stiennon et al. 2020), or of an earlier such model with its head. A saved checkpoint opens
    with `AutoModelForSequenceClassification`, whose score is that of the last token.
    """

    base_model: nn.Module
    base_model_prefix: str
    score: nn.Linear
    has_narrow_outputs: bool = True
    row_ends: frozenset[int] = frozenset()
    """ids of the last tokens of the rows that are learnt; an export pads with another token"""
    _config_options: ClassVar[Mapping[str, Any]] = {"num_labels": 1}

    def forward(self, *args: Any, **inputs: Any) -> TokenClassifierOutput:
        """Return scores [B, L, 1] as logits; transformers' own forward would keep only the last token's score."""
        return TokenClassifierOutput(logits=self.score(self.base_model(*args, **inputs).last_hidden_state))

    def compute_logits(self, data: Mapping[str, Any]) -> Tensor:
        """Return scores [T] of a pack."""
        return super().compute_logits(data)[:, 0]

    def missing_parameter(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """Return the head of a model that has none yet, the same on every rank."""
        if name != "score.weight":
            return super().missing_parameter(name, shape)
        return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / (shape[1] + 1)

    def leaves_out(self, name: str) -> bool:
        """Return True for the output embedding of a causal model, in whose place the head is."""
        return super().leaves_out(name) or not name.startswith(f"{self.base_model_prefix}.")


def pad_apart(folder: Path, ends: Collection[int] = ()) -> None:
    """Let the config and the tokenizer of an exported scorer pad with a token with which no row ends.

    `ends`: ids of tokens with which rows end; the model's end tokens by default.
    """
    if not (folder / "tokenizer_config.json").exists():
        return
    config, tokenizer = load_config(folder), load_tokenizer(folder)
    ends = ends or {*end_ids(folder, config), tokenizer.eos_token_id}
    pad = padding_token(tokenizer, config.get_text_config().vocab_size, ends)
    if pad is None or pad == config.pad_token_id == tokenizer.pad_token_id:
        return
    token = {"pad_token": tokenizer.convert_ids_to_tokens(pad)}
    changes = {"config": {"pad_token_id": pad}, "tokenizer_config": token, "special_tokens_map": token}
    for name, change in changes.items():
        if (file := folder / f"{name}.json").exists():
            file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), **change}, indent=2), "utf-8")
