"""The reference: transformers' own forward in float32, with an attention that is written out here.

It shares no code with the forward passes of engine and trainer. A setting names the points in which it deviates from an
honest computation. So two hypotheses on different points combine. Its keys:

    weights, part, amount       saved step whose weights compute; beginning of the names of those parameters; how far
                                they go from the honest weights
    dtype, stored               dtype of the computation; dtype to which matrices are rounded, and what has a scale
    before, own                 functions of the tokens before the model's own, and of both
    position, stretch, theta    function of positions and of the model's first place; factors of positions, and of the
                                base of the rotary frequencies
    scale, window, is_causal, is_tiled, is_split    the attention; is_tiled: query heads take key heads in turns, not in
                                blocks; is_split: the model's tokens do not see those before them
    router, choice, order       an attribute of routers and its value; function of the chosen experts [rows, tokens,
                                layers, K]; function of their number that returns which expert stands in which place
    layer                       the only layer whose attention or routing deviates
    code                        side whose code in this process computes
    temperature, top_p, top_k   how log-probabilities are made of logits
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from rlite.assembly.why.activations import Activations, Difference, first_difference, keep, watching
from rlite.assembly.why.evidence import MAX_LENGTH, Case, Span
from rlite.backends.embedded.cache import EmbeddedOptions
from rlite.backends.embedded.model import ATTENDED, ROTATED, See
from rlite.backends.embedded.worker import EmbeddedWorker
from rlite.backends.models.experts import experts_of, use_implementation
from rlite.backends.models.replay import LAYER, Replay, routing_shape
from rlite.errors import ConfigError, DataError
from rlite.nn.pretrained import load_config, load_tokenizer, make_model, real_tensors
from rlite.types import GenerationHyperparameters, SequenceRequest

Setting = Mapping[str, Any]
NAME = "rlite_reference"
SAMPLING = ("temperature", "top_p", "top_k")
OF_CODE = {"code", "weights", *SAMPLING}
"""keys of a setting that code in this process can follow"""
OF_WEIGHTS = ("weights", "part", "amount", "dtype", "stored", "order", "layer")
ROUTER = r"(gate|router)\.weight$"
LEAST_LOGIT = -1e4
"""logit of a token that the engine must not sample"""
_CURRENT: ContextVar[tuple[Setting, Tensor, Tensor, See | None]] = ContextVar("current")
"""setting, lengths of the rows, places of the model's first tokens, and observer of the forward pass under way"""


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, scaling: float, **asked: Any
) -> tuple[Tensor, None]:
    """Compute the attention of one layer; transformers calls this function.

    Args:
        module: the attention layer.
        query: `[rows, heads, tokens, width]`.
        key: `[rows, kv_heads, tokens, width]`.
        value: `[rows, kv_heads, tokens, width]`.
        *_: an unused mask.
        scaling: factor of the scores.
        **asked: further options of the layer, of which `sliding_window` is known.

    Returns:
        The output `[rows, tokens, heads, width]`, and None in place of the weights.

    Raises:
        ConfigError: the layer has another softmax.
    """
    if asked.get("softcap") is not None or asked.get("s_aux") is not None:
        raise ConfigError("rlite why knows no attention with soft caps or sinks; this run cannot be explained")
    setting, lengths, starts, see = _CURRENT.get()
    get = (setting if setting.get("layer") in (None, module.layer_idx) else dict[str, Any]()).get
    name, show = f"model.layers.{module.layer_idx}.", see or (lambda *_: None)
    show(name + ROTATED, *(x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)))
    heads, tokens = torch.arange(query.shape[1]), torch.arange(query.shape[2])
    order = heads % key.shape[1] if get("is_tiled") else heads * key.shape[1] // len(heads)
    distance = tokens[:, None] - tokens
    seen = (tokens < lengths[:, None, None, None]) & ((distance >= 0) if get("is_causal", True) else True)
    seen = seen & (distance < min(asked.get("sliding_window") or len(tokens), get("window", len(tokens))))
    if get("is_split"):
        seen = seen & ~((tokens < starts[:, None, None, None]) & (tokens[:, None] >= starts[:, None, None, None]))
    scores = query @ key[:, order].mT * (scaling * get("scale", 1.0))
    weights = scores.masked_fill(~(seen | (distance == 0)), float("-inf")).softmax(-1, torch.float32)
    output = (weights.to(value.dtype) @ value[:, order]).transpose(1, 2).contiguous()
    show(name + ATTENDED, output.flatten(0, 1).flatten(1))
    return output, None


AttentionInterface.register(NAME, attend)


class Reference:
    """The model of a case, to be computed in any setting.

    Args:
        case: the case.
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        with real_tensors():
            self.model = make_model(load_config(case.model_name), torch.float32).eval().requires_grad_(False)
        use_implementation(self.model, "eager")
        self.model.set_attn_implementation(NAME)
        self.tokenizer: Any = load_tokenizer(case.model_name)
        self.shape = routing_shape(self.model)
        self.mixtures = [int(LAYER.findall(name)[0]) for name in experts_of(self.model)]
        """numbers of the layers with experts"""
        self._replay = None if self.shape is None else Replay(self.model, self.shape)
        self._loaded: Setting = {}
        self.exact = 0
        """saved step with the weights of an honest computation"""

    @torch.inference_mode()
    def logits(self, setting: Setting, spans: Sequence[Span], see: See | None = None) -> tuple[Tensor, Tensor]:
        """Return float32 logits [tokens, vocabulary] of the spans' tokens, and the tokens' ids [tokens].

        Args:
            setting: how to compute.
            spans: the spans.
            see: called with the activations of the modules.
        """
        if "code" in setting:
            is_engine = setting["code"] == "engine"
            logits = self.serve(setting, spans)["lm_head"][0].float() if is_engine else self._trained(setting, spans)
            return logits, torch.tensor([token for span in spans for token in span.ids])
        self._load(setting)
        pairs = [(setting.get("before", tuple)(span.before) or span.before[:1], span.ids) for span in spans]
        pairs = [setting["own"](*pair) if "own" in setting else pair for pair in pairs]
        tokens, lengths = padded([(*before, *own) for before, own in pairs])
        places = torch.arange(tokens.shape[1]).repeat(len(pairs), 1)
        if "position" in setting:
            places = torch.stack(
                [setting["position"](own, len(pair[0])) for own, pair in zip(places, pairs, strict=True)]
            )
        starts = torch.tensor([len(before) for before, _ in pairs])
        mark = _CURRENT.set((setting, lengths, starts, see))
        try:
            with self._deviating(setting), watching(self.model, see):
                logits = self._forward(setting, tokens, places * setting.get("stretch", 1))
        finally:
            _CURRENT.reset(mark)
        parts = [own[len(pair[0]) - 1 : sum(map(len, pair)) - 1] for own, pair in zip(logits, pairs, strict=True)]
        return torch.cat(parts).float(), torch.tensor([token for _, own in pairs for token in own])

    def _forward(self, setting: Setting, tokens: Tensor, positions: Tensor) -> Tensor:
        def computed() -> Tensor:
            return self.model(input_ids=tokens, position_ids=positions, use_cache=False).logits

        if "choice" not in setting or self._replay is None or self.shape is None:
            return computed()
        with self._replay.recording():
            computed()
            chosen = torch.stack(self._replay.chosen or [], dim=1)
        given = setting["choice"](chosen.unflatten(0, tokens.shape)).flatten(0, 1)
        layers = torch.tensor(self.mixtures)[:, None]
        kept = given.masked_fill(layers != setting["layer"], -1) if setting["layer"] is not None else given
        with self._replay.replaying(kept):
            return computed()

    def weights(self, setting: Setting) -> dict[str, Tensor]:
        """Return the weights of a setting."""
        state = self._case.states[self.exact]
        if "weights" in setting:
            other, part, amount = (
                self._case.states[setting["weights"]],
                setting.get("part", ""),
                setting.get("amount", 1.0),
            )
            state = {k: x.lerp(other[k], amount) if k.startswith(part) else x for k, x in state.items()}
        if "order" in setting:
            layers = self.mixtures if setting["layer"] is None else [setting["layer"]]
            names = [name for name in state for layer in layers if re.search(rf"layers\.{layer}\..*{ROUTER}", name)]
            state = {**state, **{name: state[name][setting["order"](len(state[name]))] for name in names}}
        if (stored := setting.get("stored")) is not None:
            state = {name: _rounded(x, *stored) if x.dim() > 1 else x for name, x in state.items()}
        return state

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
        changes: list[tuple[Any, str, Any]] = []
        routers = [module for module in self.model.modules() if hasattr(module, "top_k")]
        if "router" in setting:
            chosen = [
                x for number, x in zip(self.mixtures, routers, strict=False) if setting["layer"] in (None, number)
            ]
            changes += [(module, *setting["router"]) for module in chosen]
        for module in self.model.modules() if "theta" in setting else ():
            if isinstance(own := getattr(module, "inv_freq", None), Tensor):
                changes.append((module, "inv_freq", own * setting["theta"] ** -torch.linspace(0, 1, len(own) + 1)[:-1]))
        before = [(module, name, getattr(module, name)) for module, name, _ in changes]
        try:
            for change in changes:
                setattr(*change)
            yield
        finally:
            for change in before:
                setattr(*change)

    # -- the code of this process --------------------------------------------------------------------------------

    def serve(self, setting: Setting, spans: Sequence[Span]) -> Activations:
        """Return the activations of the engine, which decodes the tokens of each span after a prefill.

        Args:
            setting: whose weights are served.
            spans: the spans.

        Raises:
            DataError: the engine refuses a sequence.
        """
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
                values[0].fill_(LEAST_LOGIT)
                values[0][..., next(forced)] = 0

        worker.weights.watch(see)
        for number, span in enumerate(spans):
            sampling = GenerationHyperparameters(max_new_tokens=len(span.ids), greedy=True, ignore_eos=True)
            request = SequenceRequest(request_id=number, input_ids=list(span.before), gconfig=sampling, seed=0)
            if error := worker.advance([request], [], len(span.ids))[0].error:
                raise DataError(f"the engine refuses a recorded sequence: {error}")
        return found

    def _trained(self, setting: Setting, spans: Sequence[Span]) -> Tensor:
        """Return the trainer's logits; it computes all spans at once."""
        self._case.load(setting.get("weights", self.exact))
        ids, lengths = padded([(*span.before, *span.ids) for span in spans])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        logits = self._case.trainer.forward({"input_ids": ids, "attention_mask": mask}, _logits)
        return torch.cat([own[len(s.before) - 1 :][: len(s.ids)] for own, s in zip(logits, spans, strict=True)])

    @torch.inference_mode()
    def difference(self, side: str, setting: Setting, span: Span) -> Difference | None:
        """Return the first module in which code differs from the reference beyond rounding; None if none does.

        Args:
            side: side whose code it is.
            setting: whose weights compute.
            span: the sequence.
        """
        ids = (*span.before, *span.ids[:-1])
        weights = {name: setting[name] for name in ("weights", "part", "amount") if name in setting}
        exact, coarse = Activations(), Activations()
        for found, dtype in ((exact, torch.float32), (coarse, self._case.dtype)):
            self.logits({**weights, "dtype": dtype}, [Span(ids[:1], ids[1:], 0, {})], partial(keep, found))
        if side == "engine":
            return first_difference(self.serve(weights, [span]), exact, coarse)
        self._case.load(setting.get("weights", self.exact))
        pack: dict[str, Any] = {"input_ids": torch.tensor(ids * 2), "position_ids": torch.arange(len(ids)).repeat(2)}
        pack |= {"cu_seqlens": torch.tensor([0, len(ids), 2 * len(ids)], dtype=torch.int32), "max_seqlen": len(ids)}
        [found] = self._case.trainer.activations(pack)
        return first_difference(found, exact, coarse)


def _logits(logits: Tensor, data: Mapping[str, Any]) -> Tensor:
    return logits.float()


def padded(sequences: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """Return token ids [rows, tokens] padded with 0, and the lengths [rows]."""
    rows = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in sequences], batch_first=True)
    return rows, torch.tensor([len(ids) for ids in sequences])


def _rounded(matrix: Tensor, dtype: torch.dtype, scaled: str) -> Tensor:
    """Return a matrix after a visit in a dtype of 8 bits, whose range each row, or the matrix, uses to the full."""
    most = (torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max
    largest = matrix.abs().amax(-1, keepdim=True) if scaled == "row" else matrix.abs().max()
    scale = largest.clamp(min=1e-12) / most
    values = matrix / scale
    return (values if dtype.is_floating_point else values.round()).to(dtype).to(matrix.dtype) * scale


def label_logprobs(logits: Tensor, labels: Tensor, setting: Setting) -> Tensor:
    """Return the log-probabilities of labels [tokens] by logits [tokens, vocabulary], normalised over the kept ids.

    Args:
        logits: logits.
        labels: ids of the tokens.
        setting: has temperature, top_p and top_k.
    """
    logprobs = (logits / setting["temperature"]).log_softmax(-1)
    own = logprobs.gather(1, labels[:, None])[:, 0]
    if setting["top_p"] < 1 or setting["top_k"]:
        ranked = logprobs.sort(-1, descending=True).values[:, : setting["top_k"] or None]
        probs = ranked.softmax(-1)
        own = own - ranked.masked_fill(probs.cumsum(-1) - probs >= setting["top_p"], float("-inf")).logsumexp(-1)
    return own
