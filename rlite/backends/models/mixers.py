"""Layers that carry a state from token to token, in packs: gated delta nets, Kimi delta attention, Mamba, convolutions.

transformers computes such a layer over a whole row, so the state of a document would run on into the next one. Six
libraries trained hybrids like this for months, because losses look plausible. Here, the unmodified module is called for
each document. Documents of similar length share a call, padded at their ends: a causal layer does not look there.

    [1, T, H]  --split at borders, pad-->  [documents, longest, H]  --module-->  --join-->  [1, T, H]

Where kernels take the borders of documents (flash-linear-attention, mamba-ssm on GPUs), the whole pack is one call. Not
every layer hands the borders on to every kernel, so a layer is first tried with two documents.

In serving, the state of a sequence is a value: the module computes with transformers' own cache layer, which is filled
before the call and read after it.
"""

from __future__ import annotations

import copy
import dis
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache

from rlite.backends.models.attention import LAYOUT, attention
from rlite.backends.models.linear import with_globals
from rlite.errors import ConfigError

CACHE_ARGUMENTS = ("cache", "cache_params", "past_key_values")
"""names of a layer's argument for the cache, the newest first (transformers 5.24 renamed the others)"""
KINDS = ("conv_states", "recurrent_states")
"""states of a cache layer in transformers, each by number"""
MOST_PADDING = 0.25
"""padding that documents in one call may add to their tokens"""

_STEP = "mamba2_selective_state_update"
"""name of the function in transformers that computes one token of Mamba-2"""
NO_LIMITS = (0.0, float("inf"))

State = dict[tuple[str, int], Tensor]
"""states of some sequences in one layer, `[sequences, ...]` each, by kind and number"""


class Mixing(ABC):
    """The way in which the mixers of a model compute inside a `mixing` block."""

    @abstractmethod
    def mix(self, mixer: Mixer, hidden_states: Tensor) -> Any:
        """Compute one mixer.

        `hidden_states`: its input, `[batch, tokens, width]`. Returns the output of the mixer's module.
        """


_CURRENT: ContextVar[Mixing | None] = ContextVar("mixing", default=None)


@dataclass(eq=False)
class Mixer:
    """A module that carries a state from token to token."""

    module: nn.Module
    number: int
    """place among the model's mixers"""
    config: PreTrainedConfig
    """the model's config, by which transformers makes a cache"""
    cache_argument: str
    _is_continuing: bool | None = None
    """true if the module continues from a state with several tokens; None before it was tried"""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute as the module's class does; the module itself calls this mixer."""
        with mixing(None):  # which a mixer inside of this one would obey, too
            return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def name(self) -> str:
        """Name of the module's class."""
        return type(self.module).__name__

    @property
    def layer_idx(self) -> int:
        """Number of the layer, by which the module finds its state in a cache."""
        return self.module.layer_idx  # type: ignore[return-value]

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute as the current `mixing` block says, outside of all blocks as the module itself does.

        `hidden_states`: `[batch, tokens, width]`.
        """
        if (current := _CURRENT.get()) is None:
            return self.forward(hidden_states, *args, **kwargs)
        return current.mix(self, hidden_states)

    @cached_property
    def _fresh_layer(self) -> Any:
        return DynamicCache(config=self.config).layers[self.layer_idx]

    def run_without_state(self, hidden_states: Tensor, **borders: Tensor) -> Any:
        """Compute whole documents.

        `hidden_states`: `[documents, tokens, width]`.
        """
        return self.forward(hidden_states, **{self.cache_argument: None}, **borders)

    @cached_property
    def _forward_with_state(self) -> Callable[..., Any]:
        forward = inspect.unwrap(type(self.module).forward)
        limits = vars(self.module).get("time_step_limit", NO_LIMITS)
        if limits == NO_LIMITS or _STEP not in forward.__code__.co_names:
            return partial(type(self.module).forward, self.module)
        step = partial(_limited_step, forward.__globals__[_STEP], limits)
        return partial(with_globals(forward, **{_STEP: step}), self.module)

    def run(self, hidden_states: Tensor, state: State | None = None) -> tuple[Any, State]:
        """Compute the next tokens of some sequences.

        A module that begins anew at several tokens, whatever the state is, is given one token at a time.

        `hidden_states`: equally many tokens of each sequence, without padding, `[sequences, tokens, width]`. `state`:
        the state before these tokens, which may be overwritten; None if they are the first.
        """
        if state is None or hidden_states.shape[1] == 1 or self._continues(hidden_states, state):
            return self._run(hidden_states, state)
        outputs = []
        for token in hidden_states.split(1, dim=1):
            output, state = self._run(token, state)
            outputs.append(output)
        return map_outputs(lambda *parts: torch.cat(parts, dim=1), *outputs), state

    def _continues(self, hidden_states: Tensor, state: State) -> bool:
        """Return whether the module computes several tokens from a state: if a part of it is NaN, so is the output."""
        if self._is_continuing is None:
            self._is_continuing = True
            for key in state:
                poisoned = {k: t[:1] * (torch.nan if k == key else 1.0) for k, t in state.items()}
                output, _ = self._run(hidden_states[:1, :2], poisoned)
                tensors = output if isinstance(output, tuple) else (output,)
                self._is_continuing &= any(bool(t.isnan().any()) for t in tensors if t is not None)
        return self._is_continuing

    def _run(self, hidden_states: Tensor, state: State | None) -> tuple[Any, State]:
        layer = copy.deepcopy(self._fresh_layer)
        for (kind, number), tensor in (state or {}).items():
            getattr(layer, kind)[number] = tensor
            getattr(layer, f"is_{kind}_initialized")[number] = layer.has_previous_state[number] = True
            layer.device, layer.dtype = tensor.device, tensor.dtype
            if kind == "conv_states":
                layer.conv_kernel_size[number] = tensor.shape[-1]
        cache = Cache(layers=[layer] * (self.layer_idx + 1))
        with mixing(None):
            output = self._forward_with_state(hidden_states, **{self.cache_argument: cache})
        found = ((kind, number, tensor) for kind in KINDS for number, tensor in getattr(layer, kind).items())
        return output, {(kind, number): tensor for kind, number, tensor in found if tensor is not None}


def _limited_step(
    step: Callable[..., Tensor],
    limits: tuple[float, float],
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Return one token of Mamba-2, whose step size is limited as in whole sequences; transformers forgets it."""
    if (bias := kwargs.pop("dt_bias", None)) is not None:
        dt = dt + bias.to(dt.dtype)
    if kwargs.pop("dt_softplus", False):
        dt = F.softplus(dt)
    return step(state, x, dt.clamp(*limits), *args, **kwargs)


def find_mixers(model: Any) -> list[Mixer]:
    """Return the modules of a transformers model that are known to carry a state from token to token.

    Such a module has a convolution, knows its layer's number, and takes hidden states and a cache. Whether nothing else
    mixes tokens, and whether the module computes documents and steps as transformers does, is for a check to find out.
    """
    mixers: list[Mixer] = []
    for module in model.modules():
        if isinstance(installed := vars(module).get("forward"), Mixer):
            mixers.append(installed)
        elif (argument := _cache_argument(module)) is not None:
            mixers.append(Mixer(module, len(mixers), model.config, argument))
    return mixers


def _cache_argument(module: nn.Module) -> str | None:
    """Return the name of the argument for the cache, None if the module is no known mixer."""
    if "layer_idx" not in vars(module) or not any(isinstance(child, nn.Conv1d) for child in module.children()):
        return None
    _, first, *others = inspect.signature(type(module).forward).parameters.values()
    needed = [p for p in others if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    names = {p.name for p in others}
    if first.name != "hidden_states" or {p.name for p in needed} - {*CACHE_ARGUMENTS}:
        return None
    return next(filter(names.__contains__, CACHE_ARGUMENTS), None)


def install_mixers(model: Any) -> list[Mixer]:
    """Return the mixers of a model, and make them obey `mixing` from now on; a second call changes nothing."""
    mixers = find_mixers(model)
    for mixer in mixers:
        mixer.module.forward = mixer
    return mixers


def layers_read_raw(model: nn.Module) -> dict[str, str]:
    """Return the linear layers whose weight a mixer reads without calling the layer, so that adapters would be ignored.

    Returns the class of the mixer by the name of the layer.
    """
    found = {}
    for name, module in model.named_modules():
        if _cache_argument(module) is not None:
            code = list(dis.get_instructions(inspect.unwrap(type(module).forward)))
            for layer, attribute in pairwise(step.argval if step.opname == "LOAD_ATTR" else None for step in code):
                if attribute == "weight" and isinstance(dict(module.named_children()).get(layer), nn.Linear):
                    found[f"{name}.{layer}"] = type(module).__name__
    return found


def check_not_split(model: Any, asked: str, remedy: str) -> None:
    """Check that no layer carries a state, for ways to divide a sequence or its layers over workers."""
    if mixers := find_mixers(model):
        problem = f"{mixers[0].name} carries a state from the first token of a sequence to the last"
        raise ConfigError(f"{asked}: {problem}, so workers cannot share its work; use {remedy}")


@contextmanager
def mixing(current: Mixing | None) -> Iterator[None]:
    """Make installed mixers compute in this way inside the block; with None as their modules do."""
    token = _CURRENT.set(current)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_mixing() -> Mixing | None:
    """Return the way in which mixers compute in the innermost `mixing` block."""
    return _CURRENT.get()


def recompute_alike(
    config: PreTrainedConfig, *further: AbstractContextManager[Any]
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return contexts of a checkpointed forward and of its recomputation: the attention and the mixing in use now."""
    alike = attention(config, config._attn_implementation, LAYOUT.get()), mixing(_CURRENT.get())
    return nullcontext(), _inside(*alike, *further)


@contextmanager
def _inside(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


class Documents(Mixing):
    """Computes each document of a pack by itself."""

    def __init__(self, lengths: Sequence[int], takes_borders: bool = False) -> None:
        self._lengths, self._takes_borders = list(lengths), takes_borders
        self._groups = list(groups(self._lengths))

    def mix(self, mixer: Mixer, hidden_states: Tensor) -> Any:
        """Compute one mixer over each document.

        `hidden_states`: `[1, T, width]`. Returns the output of the mixer's module, with T tokens.
        """
        if len(self._lengths) == 1:
            return mixer.run_without_state(hidden_states)
        if self._takes_borders and keeps_apart(mixer, hidden_states):
            return mixer.run_without_state(hidden_states, **borders(self._lengths, hidden_states.device))
        documents = hidden_states[0].split(self._lengths)
        outputs: list[Any] = [None] * len(documents)
        for rows in self._groups:
            batch = mixer.run_without_state(pad_sequence([documents[row] for row in rows], batch_first=True))
            for place, row in enumerate(rows):
                outputs[row] = map_outputs(lambda x, p=place, n=self._lengths[row]: x[p : p + 1, :n], batch)
        return map_outputs(lambda *parts: torch.cat(parts, dim=1), *outputs)


def groups(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield the numbers of the documents that share a call: of similar length, so that little padding is computed."""
    rows: list[int] = []
    tokens = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        padded = lengths[rows[0]] * (len(rows) + 1) if rows else 0
        if padded > (1 + MOST_PADDING) * (tokens + lengths[row]):
            yield rows
            rows, tokens = [], 0
        rows.append(row)
        tokens += lengths[row]
    yield rows


def map_outputs(function: Callable[..., Tensor], *outputs: Any) -> Any:
    """Apply a function to the outputs of mixers.

    Returns the tensor, or a tuple of tensors; None in place of None.
    """
    if isinstance(outputs[0], tuple):
        return tuple(map_outputs(function, *parts) for parts in zip(*outputs, strict=True))
    return None if outputs[0] is None else function(*outputs)


def borders(lengths: Iterable[int], device: torch.device) -> dict[str, Tensor]:
    """Return the arguments by which transformers hands the borders of documents to kernels."""
    counts = torch.tensor([0, *lengths], device=device)
    numbers = torch.arange(len(counts) - 1, dtype=torch.int32, device=device)
    return {"cu_seq_lens_q": counts.cumsum(0).int(), "seq_idx": numbers.repeat_interleave(counts[1:])[None]}


_KEEPS_APART: dict[tuple[type, bool, torch.dtype], bool] = {}
TRIED_LENGTHS = (67, 5)
"""tokens of the documents with which a layer is tried: longer than a block of the kernels, and not a multiple of it"""


@torch.no_grad()
def keeps_apart(mixer: Mixer, like: Tensor) -> bool:
    """Return whether a mixer keeps documents apart by itself, if it is given their borders.

    The second of two documents must have the same bits whatever the first one is, and be computed as if it were alone.
    A class of modules is tried once for each mode and dtype.
    """
    key = (type(mixer.module), mixer.module.training, like.dtype)
    if key not in _KEEPS_APART:
        first, second = TRIED_LENGTHS
        wave = torch.arange(2 * (first + second) * like.shape[-1], device=like.device).sin().to(like.dtype)
        one, other = wave.view(2, 1, first + second, -1)
        other = torch.cat([other[:, :first], one[:, first:]], dim=1)
        given = borders(TRIED_LENGTHS, like.device)
        try:
            found, again = (mixer.run_without_state(row, **given)[:, first:] for row in (one, other))
        except (TypeError, ValueError):  # transformers' fallback, or an output that is no tensor
            _KEEPS_APART[key] = False
        else:
            alone = mixer.run_without_state(one[:, first:])
            error = (found - alone).abs().max() / alone.abs().max()
            rounding = 8 * torch.finfo(like.dtype).eps ** 0.5
            _KEEPS_APART[key] = torch.equal(found, again) and bool(error < rounding)
    return _KEEPS_APART[key]
