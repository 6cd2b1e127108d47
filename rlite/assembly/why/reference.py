"""The reference: transformers' own forward in float32, with an attention that is written out here.

It shares no code with the forward passes of engine and trainer. A setting names the points in which it deviates from an
honest computation. So two hypotheses on different points combine. Its keys:

    weights, amount             saved step whose weights compute; the share of the honest weights that is left
    stored, parts               dtype to which matrices are rounded, and what has a scale; the parameters that deviate
    dtype, cached               dtype of the computation; like `stored`, of keys and values
    before, own                 functions of the tokens before the model's own, and of both
    position, shift             function of positions and of the model's first places; added to the model's positions
    stretch, theta              factors of positions, and of the base of the rotary frequencies
    rope, factor                type of rotary frequencies that transformers knows, and by what it scales them
    scale, window, is_causal    factor of the scores; positions that a query sees; whether later tokens are hidden
    heads, hidden               function of the key head of each query head; first tokens that later tokens do not see
    router, choice              an attribute of routers and its value; function of the chosen experts [tokens, K]
    order, expert, odds         the expert whose score each expert takes; an expert, and the factor of its odds
    layer, mixture              layers whose attention deviates, and whose routing
    code                        side whose code in this process computes
    temperature                 divides the logits
    top_p, top_k, min_p         what is kept of the vocabulary
    repetition, presence, frequency     penalties of ids that are there already, as in vLLM
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface

from rlite.assembly.why.activations import Activations, Difference, first_difference, keep, watching
from rlite.assembly.why.evidence import MAX_LENGTH, Case, Ids, Span
from rlite.backends.embedded.cache import EmbeddedOptions
from rlite.backends.embedded.model import ATTENDED, ROTATED, See
from rlite.backends.embedded.worker import EmbeddedWorker
from rlite.backends.models.experts import block_of, experts_of, use_implementation
from rlite.backends.models.replay import LAYER, routing_shape
from rlite.errors import ConfigError, DataError
from rlite.nn.pretrained import load_config, load_tokenizer, make_model, real_tensors
from rlite.types import GenerationHyperparameters, SequenceRequest

Setting = Mapping[str, Any]
NAME = "rlite_reference"
PENALTIES = {"repetition", "presence", "frequency"}
SAMPLING = {"temperature", "top_p", "top_k", "min_p", *PENALTIES}
OF_CODE = {"code", "weights", *SAMPLING}
"""keys of a setting that code in this process can follow"""
OF_WEIGHTS = ("weights", "amount", "stored", "parts", "dtype")
LEAST_LOGIT = -1e4
"""logit of a token that the engine must not sample"""
_CURRENT: ContextVar[tuple[Setting, Tensor, Tensor, See | None]] = ContextVar("current")
"""setting, lengths of the rows, places of the model's first tokens, and observer of the forward pass under way"""


def labels(name: str) -> tuple[str, str]:
    """Return the layer and the module of a parameter; outside of layers, the parameter is the first label."""
    found = re.match(r"(.*?layers\.\d+)\.(.*?)(\.weight)?$", name)
    return (name, "outside of layers") if found is None else (found[1], found[2])


def layer_label(number: int) -> str:
    """Return the label of a layer."""
    return f"model.layers.{number}"


class Parts(NamedTuple):
    """Some layers of the model, or some modules of some layers."""

    chosen: frozenset[str]
    """labels; a parameter is meant if both of its labels are here"""
    layers: frozenset[str]
    """all first labels"""
    modules: frozenset[str]
    """all second labels; none if layers are meant whole"""

    def __str__(self) -> str:
        groups = [group for group in (self.layers, self.modules) if not group <= self.chosen]
        names = ", ".join(sorted(label for group in groups for label in group & self.chosen))
        return f", in {names} alone" if groups else ""

    @property
    def layer(self) -> int | None:
        """Number of the only layer."""
        numbers = [LAYER.findall(f"{label}.") for label in self.layers & self.chosen]
        return int(numbers[0][0]) if len(numbers) == 1 and numbers[0] else None


def is_meant(parts: Parts | None, *own: str) -> bool:
    """Return whether labels are parts that deviate; None is the whole model."""
    return parts is None or parts.chosen.issuperset(own)


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, scaling: float, **asked: Any
) -> tuple[Tensor, None]:
    """Compute the attention of one layer; transformers calls this function.

    `query`: `[rows, heads, tokens, width]`. `key`: `[rows, kv_heads, tokens, width]`. `value`: `[rows, kv_heads,
    tokens, width]`. Returns the output `[rows, tokens, heads, width]`, and None in place of the weights.
    """
    if asked.get("softcap") is not None or asked.get("s_aux") is not None:
        raise ConfigError("rlite why knows no attention with soft caps or sinks; this run cannot be explained")
    setting, lengths, starts, see = _CURRENT.get()
    label, show = layer_label(module.layer_idx), see or (lambda *_: None)
    get = (setting if is_meant(setting.get("layer"), label) else dict[str, Any]()).get
    name = f"{label}."
    show(name + ROTATED, *(x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)))
    if (cached := get("cached")) is not None:
        key, value = _rounded(key, *cached), _rounded(value, *cached)
    tokens, heads = torch.arange(query.shape[2]), torch.arange(query.shape[1]) * key.shape[1] // query.shape[1]
    heads = get("heads", Tensor.long)(heads)
    distance = tokens[:, None] - tokens
    seen = (tokens < lengths[:, None, None, None]) & ((distance >= 0) if get("is_causal", True) else True)
    seen = seen & (distance < min(asked.get("sliding_window") or len(tokens), get("window", len(tokens))))
    first = starts[:, None, None, None].clamp(max=get("hidden", 0))
    seen = seen & ~((tokens < first) & (tokens[:, None] >= first))
    scores = query @ key[:, heads].mT * (scaling * get("scale", 1.0))
    weights = scores.masked_fill(~(seen | (distance == 0)), float("-inf")).softmax(-1, torch.float32)
    output = (weights.to(value.dtype) @ value[:, heads]).transpose(1, 2).contiguous()
    show(name + ATTENDED, output.flatten(0, 1).flatten(1))
    return output, None


AttentionInterface.register(NAME, attend)


class Reference:
    """The model of a case, to be computed in any setting."""

    def __init__(self, case: Case) -> None:
        self._case = case
        with real_tensors():
            self.model = make_model(load_config(case.model_name), torch.float32).eval().requires_grad_(False)
        use_implementation(self.model, "eager")
        self.model.set_attn_implementation(NAME)
        self.tokenizer: Any = load_tokenizer(case.model_name)
        self.shape = routing_shape(self.model)
        self.mixtures = {int(LAYER.findall(name)[0]): block_of(self.model, name) for name in experts_of(self.model)}
        """router and experts of the layers with experts"""
        self._loaded: Setting = {}
        self.exact = 0
        """saved step with the weights of an honest computation"""

    @torch.inference_mode()
    def logits(
        self, setting: Setting, spans: Sequence[Span], see: See | None = None
    ) -> tuple[Tensor, list[tuple[Ids, Ids]]]:
        """Return float32 logits [tokens, vocabulary] of the spans' tokens, and the ids before and of each span."""
        pairs = [(setting.get("before", tuple)(span.before) or span.before[:1], span.ids) for span in spans]
        if "code" in setting:
            [logits] = (self.serve if setting["code"] == "engine" else self.train)(setting, spans)["logits"]
            return logits.float(), pairs
        self._load(setting)
        pairs = [setting["own"](*pair) if "own" in setting else pair for pair in pairs]
        tokens, lengths = padded([(*before, *own) for before, own in pairs])
        starts = torch.tensor([len(before) for before, _ in pairs])
        places = torch.arange(tokens.shape[1]).repeat(len(pairs), 1)
        places = (places + setting.get("shift", 0) * (places >= starts[:, None])).clamp(min=0)
        if "position" in setting:
            places = setting["position"](places, starts[:, None])
        mark = _CURRENT.set((setting, lengths, starts, see))
        try:
            with self._deviating(setting), watching(self.model, see):
                places = places * setting.get("stretch", 1)
                logits = self.model(input_ids=tokens, position_ids=places, use_cache=False).logits
        finally:
            _CURRENT.reset(mark)
        parts = [own[len(pair[0]) - 1 : sum(map(len, pair)) - 1] for own, pair in zip(logits, pairs, strict=True)]
        return torch.cat(parts).float(), pairs

    def weights(self, setting: Setting) -> dict[str, Tensor]:
        """Return the weights of a setting."""
        state, found = self._case.states[self.exact], dict[str, Tensor]()
        other, parts = self._case.states[setting.get("weights", self.exact)], setting.get("parts")
        for name, own in state.items():
            if is_meant(parts, *labels(name)):
                own = other[name].lerp(own, setting["amount"]) if "amount" in setting else other[name]
                own = _rounded(own, *setting["stored"]) if "stored" in setting and own.dim() > 1 else own
            found[name] = own
        return found

    def _load(self, setting: Setting) -> None:
        key = {"exact": self.exact, **{name: setting[name] for name in OF_WEIGHTS if name in setting}}
        if key != self._loaded:
            own, self._loaded = self.model.state_dict(keep_vars=True), {}
            for name, tensor in self.weights(setting).items():
                own[name].data = tensor.to(setting.get("dtype", torch.float32))
            self._loaded = key

    @contextmanager
    def _deviating(self, setting: Setting) -> Iterator[None]:
        """Change rotary frequencies and routers inside the block."""
        meant = partial(is_meant, setting.get("mixture"))
        blocks = [block for layer, block in self.mixtures.items() if meant(layer_label(layer))]
        children = [child for block in blocks for child in block.children()]
        size = self.shape.num_experts if self.shape else 0
        weights = [own for child in children for own in child.parameters(recurse=False) if len(own) == size]
        changes: list[tuple[Any, str, Any]] = []
        if "router" in setting:
            name, value = setting["router"]
            changes = [(part, name, value) for block in blocks for part in block.modules() if name in vars(part)]
        for module in self.model.modules() if {"theta", "rope"} & setting.keys() else ():
            if "inv_freq" in module._buffers:
                made = scaled(module, setting["rope"], setting["factor"]) if "rope" in setting else module
                own, powers = made.inv_freq, torch.linspace(0, 1, len(made.inv_freq) + 1)
                changes.append((module, "inv_freq", own * setting.get("theta", 1.0) ** -powers[:-1]))
                changes.append((module, "attention_scaling", made.attention_scaling))
        before = [(module, name, getattr(module, name)) for module, name, _ in changes]
        try:
            for change in changes:
                setattr(*change)
            with _Routers(setting, weights) if {"order", "odds", "choice"} & setting.keys() else nullcontext():
                yield
        finally:
            for change in before:
                setattr(*change)

    # -- the code of this process --------------------------------------------------------------------------------

    def serve(self, setting: Setting, spans: Sequence[Span]) -> Activations:
        """Return the activations of the engine, which decodes the tokens of each span after a prefill."""
        case, found = self._case, Activations()
        lengths = [len(span.before) + len(span.ids) for span in spans]
        given = case.option("rollout.max_model_len")
        longest = max(*lengths, min(given, MAX_LENGTH) if isinstance(given, int) else 0)
        dtype: Any = str(case.dtype)[6:]
        options = EmbeddedOptions(dtype=dtype, max_model_len=longest, max_num_seqs=1)
        worker = EmbeddedWorker(case.model_name, options, torch.device("cpu"))
        state, forced = self.weights(setting), iter([token for span in spans for token in span.ids])
        for name, shard in worker.parameter_shards().items():
            shard.tensor.copy_(state[name])
        worker.weights_changed(1)

        def see(name: str, *values: Tensor) -> None:
            keep(found, name, *values)
            if name == "lm_head":  # the recorded token is the one to sample
                keep(found, "logits", *values)
                values[0].fill_(LEAST_LOGIT)
                values[0][..., next(forced)] = 0

        worker.weights.watch(see)
        for number, span in enumerate(spans):
            sampling = GenerationHyperparameters(max_new_tokens=len(span.ids), greedy=True, ignore_eos=True)
            request = SequenceRequest(request_id=number, input_ids=list(span.before), gconfig=sampling, seed=0)
            if error := worker.advance([request], [], len(span.ids))[0].error:
                raise DataError(f"the engine refuses a recorded sequence: {error}")
        return found

    def train(self, setting: Setting, spans: Sequence[Span]) -> Activations:
        """Return the trainer's activations and the logits of the spans' tokens. It computes the spans in one pack."""
        self._case.load(setting.get("weights", self.exact))
        rows = [torch.tensor((*span.before, *span.ids[:-1])) for span in spans]
        places, sizes = [torch.arange(len(row)) for row in rows], torch.tensor([0, *map(len, rows)])
        pack: dict[str, Any] = {"input_ids": torch.cat(rows), "position_ids": torch.cat(places)}
        pack |= {"cu_seqlens": sizes.cumsum(0).int(), "max_seqlen": int(sizes.max())}
        [found] = self._case.trainer.activations(pack)
        own = [each >= len(span.before) - 1 for each, span in zip(places, spans, strict=True)]
        return {**found, "logits": [found["logits"][0][torch.cat(own)]]}

    @torch.inference_mode()
    def difference(self, side: str, setting: Setting, span: Span) -> Difference | None:
        """Return the first module in which code differs from the reference beyond rounding; None if none does."""
        ids = (*span.before, *span.ids[:-1])
        weights = {"weights": setting.get("weights", self.exact)}
        exact, coarse = Activations(), Activations()
        for found, dtype in ((exact, torch.float32), (coarse, self._case.dtype)):
            self.logits({**weights, "dtype": dtype}, [Span(ids[:1], ids[1:], 0, {})], partial(keep, found))
        found = self.serve(weights, [span]) if side == "engine" else self.train(weights, [span, span])
        return first_difference(found, exact, coarse)


class _Routers(TorchFunctionMode):
    """A mode in which routers score or choose experts otherwise."""

    def __init__(self, setting: Setting, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self._setting, self._weights, self._is_inside = setting, weights, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Return the result of a function, other scores, or other experts."""
        setting, result = self._setting, func(*args, **(kwargs or {}))
        if func is F.linear:
            self._is_inside = any(args[1] is weight for weight in self._weights)
            if self._is_inside and "order" in setting:
                return result[..., setting["order"]]
            if self._is_inside and "odds" in setting:
                own = torch.arange(result.shape[-1]) == setting["expert"]
                return result + own * math.log(max(setting["odds"], 1e-30))
        if func in (torch.topk, Tensor.topk) and self._is_inside and "choice" in setting:
            chosen = setting["choice"](result.indices)
            return torch.return_types.topk((args[0].gather(-1, chosen), chosen))
        return result


def padded(sequences: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """Return token ids [rows, tokens] padded with 0, and the lengths [rows]."""
    rows = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in sequences], batch_first=True)
    return rows, torch.tensor([len(ids) for ids in sequences])


def _rounded(values: Tensor, dtype: torch.dtype, scaled: str) -> Tensor:
    """Return values after a visit in a dtype of 8 bits, whose range each row, or the matrix, uses to the full."""
    most = (torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max
    largest = {"nothing": torch.tensor(float(most)), "row": values.abs().amax(-1, keepdim=True)}
    scale = largest.get(scaled, values.abs().max()).clamp(min=1e-12) / most
    kept = (values / scale).clamp(-most, most)
    return (kept if dtype.is_floating_point else kept.round()).to(dtype).to(values.dtype) * scale


def scaled(module: Any, kind: str, factor: float) -> Any:
    """Return a module of rotary embeddings whose frequencies are scaled otherwise."""
    config, given = copy.deepcopy(module.config), {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    given |= {"original_max_position_embeddings": config.max_position_embeddings, **config.rope_parameters}
    config.rope_parameters = {**given, "rope_type": kind, "factor": factor}
    return type(module)(config)


def penalised(logits: Tensor, pairs: Sequence[tuple[Ids, Ids]], setting: Setting) -> Tensor:
    """Return logits [tokens, vocabulary] less the penalties of a setting, for the ids before each token."""
    size = logits.shape[-1]
    made = [(own := F.one_hot(torch.tensor(ids), size)).cumsum(0) - own for _, ids in pairs]
    seen = [own + torch.tensor(before).bincount(minlength=size) for own, (before, _) in zip(made, pairs, strict=True)]
    by = setting.get("repetition", 1.0)
    logits = logits.where(torch.cat(seen) == 0, torch.where(logits > 0, logits / by, logits * by))
    answer = torch.cat(made)
    return logits - setting.get("presence", 0.0) * (answer > 0) - setting.get("frequency", 0.0) * answer


def label_logprobs(logits: Tensor, labels: Tensor, setting: Setting) -> Tensor:
    """Return the log-probabilities of labels [tokens] by logits [tokens, vocabulary], normalised over the kept ids."""
    logprobs = (logits / setting["temperature"]).log_softmax(-1)
    own = logprobs.gather(1, labels[:, None])[:, 0]
    if setting["top_p"] < 1 or setting["top_k"] or setting.get("min_p"):
        ranked = logprobs.sort(-1, descending=True).values[:, : setting["top_k"] or None]
        probs = ranked.softmax(-1)
        gone = (probs.cumsum(-1) - probs >= setting["top_p"]) | (probs < setting.get("min_p", 0.0) * probs[:, :1])
        own = own - ranked.masked_fill(gone, float("-inf")).logsumexp(-1)
    return own
