"""Operations of Llama, Qwen2, Qwen3 and Qwen3-MoE in float32 on CPU whose bits do not depend on the batch.

The result for a token depends on that token and on the tokens before it in its sequence. It does not depend on the
number of tokens in the forward pass, on their order, or on the number of threads. Training and serving use these
operations with `deterministic=true`, so that both compute the same log-probabilities.

    linear layers      tiles of a few fixed heights. Each height is compared once with tiles of TILE rows on one thread
    attention          a query reads whole blocks of keys, up to the block of its own position. A product is compared
                       once with sums in the order of the keys, which decode steps compute
    silu, rotary       runs of elements. A kernel computes the last elements of a tensor, and of each thread's part, by
    angles             other code than the rest
    experts            tiles of the rows of one expert; a token adds up its experts in the order of its choice
    log-probabilities  blocks of COLUMNS of the vocabulary

Norms, sums and products need no such care: norms process each row alone, and the rest is rounded correctly. Backward
passes are ordinary ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from transformers import LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from rlite.algorithms.logprobs import block_statistics, logprobs_and_entropy, merge, no_statistics
from rlite.backends.models.attention import causal_attention
from rlite.backends.models.experts import block_of, experts_of, use_implementation
from rlite.backends.models.linear import differentiable, forward, multiply
from rlite.errors import ConfigError

FAMILY = (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
"""classes whose layers differ only in biases and in Qwen3's norms of queries and keys"""
MIXTURES = (Qwen3MoeForCausalLM,)
"""classes with the layers of FAMILY, and experts in place of some MLPs"""
INVARIANT = "rlite_invariant"
"""name of `experts_forward` among transformers' implementations of experts"""
FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""rotary embeddings whose angles depend on the position alone, not on the length of the longest sequence"""
TILE = 16
"""rows of the smallest tile; fewer rows are padded"""
TILES = (1024, 256, 64, TILE)
COLUMNS = 4096
"""columns of a product that are computed at once, so that logits have the same bits whole and in blocks"""
BLOCK = 64
"""positions of a block of keys; smaller blocks need more sums, larger blocks more padding"""
SUM = 512
"""values that are summed at once; sums of longer products are not in order"""
RUN = 32768
"""elements that torch's elementwise kernels compute on one thread"""
ANGLES_RUN = 16
"""positions whose rotary angles are computed at once"""


# -- models ----------------------------------------------------------------------------------------------------------


def is_plain(model: Any) -> bool:
    """Return whether a model is a Llama, Qwen2, Qwen3 or Qwen3-MoE with fixed rotary angles and full attention."""
    config = model.config
    if not isinstance(model, FAMILY + MIXTURES) or config.hidden_act != "silu":
        return False
    layers = vars(config).get("layer_types") or ()
    return config.rope_parameters["rope_type"] in FIXED_ROPE and "sliding_attention" not in layers


def obstacle(model: Any, device_type: str, dtype: torch.dtype) -> str | None:
    """Return why a model cannot be computed by the operations of this module; None if it can."""
    if not is_plain(model):
        kind = getattr(model.config, "model_type", type(model).__name__)
        known = "a Llama, Qwen2, Qwen3 or Qwen3-MoE"
        return f"the model ({kind}) is not {known} with silu, fixed rotary angles and full attention"
    if device_type != "cpu" or dtype != torch.float32:
        return f"it computes in {str(dtype).removeprefix('torch.')} on {device_type}, not in float32 on CPU"
    if not torch.backends.mkldnn.is_available() or "fbgemm" not in torch.backends.quantized.supported_engines:
        return "this build of torch lacks oneDNN or fbgemm"
    return None


def make_invariant(model: Any) -> None:
    """Make a model compute its linear layers, activations and rotary angles by the operations of this module."""
    for module in model.modules():
        if type(module) is nn.Linear:
            for width in {min(module.out_features, COLUMNS), module.out_features % COLUMNS or COLUMNS}:
                check_tile(width, module.in_features, module.bias is not None, torch.get_num_threads())
            module.forward = partial(forward, linear, module)  # type: ignore[method-assign]
    experts = experts_of(model)
    for module in model.modules():
        if "act_fn" in module._modules:
            module.act_fn.forward = silu
    use_implementation(model, INVARIANT)
    for name, module in experts.items():
        for parameter in module.parameters():
            check_tile(*parameter.shape[1:], False, torch.get_num_threads())
        router: Any = block_of(model, name).get_submodule("gate")
        check_tile(*router.weight.shape, False, torch.get_num_threads())
        router.forward = partial(_with_tiles, router.forward)
    rotary = model.base_model.rotary_emb
    rotary.forward = RotaryTable(rotary.forward)


class _Forward(torch.autograd.Function):
    """The value of one function, with the gradient of another that differs from it in rounding only."""

    @staticmethod
    def forward(ctx: Any, exact: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.plain = plain
        ctx.save_for_backward(*inputs)
        return exact(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            plain = ctx.plain(*inputs)
        return None, None, *torch.autograd.grad(plain, inputs, grad)


# -- linear layers ---------------------------------------------------------------------------------------------------


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear(x, weight, bias)`, where each row's bits depend on that row alone.

    `x`: [..., in]. `weight`: [out, in]. `bias`: [out].
    """
    if x.numel() == 0:
        return F.linear(x, weight, bias)
    return differentiable(_multiply_in_tiles, x, weight, bias)


def _multiply_in_tiles(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    num = len(rows)
    if num % TILE:
        rows = F.pad(rows, (0, 0, 0, -num % TILE))
    weights = weight.split(COLUMNS)
    biases = [None] * len(weights) if bias is None else bias.split(COLUMNS)
    parts = [_tiled(rows, *part) for part in zip(weights, biases, strict=True)]
    product = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    # a plain view would make FSDP warn that a module's output must not be changed in place
    return torch.ops.aten._unsafe_view(product[:num], (*x.shape[:-1], len(weight)))


def _tiled(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    num, heights = len(rows), list[int]()
    for height in TILES:
        if num >= height and _is_invariant(height, *weight.shape, bias is not None, torch.get_num_threads()):
            heights += [height] * (num // height)
            num %= height
    tiles = [multiply(tile, weight, bias) for tile in rows.split(heights)]
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles)


@cache
def _is_invariant(height: int, out_features: int, in_features: int, has_bias: bool, num_threads: int) -> bool:
    """Return whether a tile of this height has the bits of tiles of TILE rows on one thread."""
    if height == TILE:
        check_tile(out_features, in_features, has_bias, num_threads)
        return True
    x, weight, bias = _random_operands(height, out_features, in_features, has_bias)
    found = multiply(x, weight, bias)
    with _one_thread():
        expected = [multiply(tile, weight, bias) for tile in x.split(TILE)]
    return torch.equal(found, torch.cat(expected))


@cache
def check_tile(out_features: int, in_features: int, has_bias: bool, num_threads: int) -> None:
    """Check that the rows of a tile of TILE rows are computed equally, and with the bits of one thread."""
    x, weight, bias = _random_operands(TILE, out_features, in_features, has_bias)
    found = multiply(x, weight, bias)
    with _one_thread():
        rows = [multiply(row.expand(TILE, -1).contiguous(), weight, bias) for row in x.split(1)]
    if not all(torch.equal(found[i].expand_as(row), row) for i, row in enumerate(rows)):
        product = f"a product of {TILE} rows with a matrix [{out_features}, {in_features}]"
        problem = f"on this machine {product} depends on the place of a row or on the number of threads ({num_threads})"
        raise ConfigError(f"deterministic=true: {problem}; use one thread for each device, or leave deterministic out")


def _random_operands(
    num_rows: int, out_features: int, in_features: int, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(num_rows, in_features, generator=generator)
        weight = torch.randn(out_features, in_features, generator=generator)
        return x, weight, torch.randn(out_features, generator=generator) if has_bias else None


@contextmanager
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


# -- experts ---------------------------------------------------------------------------------------------------------


class _Tiles(TorchFunctionMode):
    """A context in which `F.linear` is `linear`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (linear if func is F.linear else func)(*args, **(kwargs or {}))


def _with_tiles(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _Tiles():
        return forward(*args, **kwargs)


def experts_forward(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the sums of the chosen experts' outputs [t, H], where each token's bits depend on that token alone.

    `module`: the experts, whose matrices are [E, out, in]. `hidden`: tokens, [t, H]. `chosen`: experts of each token,
    [t, K]. `weights`: their weights, [t, K].
    """
    experts, order = chosen.flatten().sort(stable=True)
    counts = experts.bincount(minlength=len(module.down_proj)).tolist()
    parts = hidden[order // chosen.shape[1]].split(counts)
    outputs = []
    for part, gate_up, down in zip(parts, module.gate_up_proj, module.down_proj, strict=True):
        gate, up = linear(part, gate_up).chunk(2, dim=-1)
        outputs.append(linear(module.act_fn(gate) * up, down))
    found = torch.cat(outputs)[order.argsort()].view(*chosen.shape, -1) * weights[..., None]
    return reduce(torch.add, found.unbind(1)).to(hidden.dtype)


ALL_EXPERTS_FUNCTIONS.register(INVARIANT, experts_forward)


# -- attention -------------------------------------------------------------------------------------------------------


def causal_attention_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None, dropout: float = 0.0
) -> Tensor:
    """Compute `causal_attention` of a whole sequence with the bits of decode steps.

    `q`: [1, H, tokens, D]. `k`: [1, K, tokens, D]. `v`: [1, K, tokens, D]. `scaling`: factor of the scores; default: 1
    / sqrt(D). `window`: None. `dropout`: 0. Returns [1, H, tokens, D].
    """
    if window is not None or dropout:
        asked = f"the model asks for window={window}, dropout={dropout}; leave deterministic out"
        raise ConfigError(f"deterministic=true has neither windows nor dropout in attention, and {asked}")
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling

    def in_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (F.pad(x[0], (0, 0, 0, -x.shape[2] % BLOCK)).contiguous() for x in (k, v))
        return attend(q[0], keys, values, 0, scale)[None]

    return _Forward.apply(in_blocks, partial(causal_attention, scaling=scaling, window=None), q, k, v)


def attend(query: Tensor, keys: Tensor, values: Tensor, start: int, scale: float) -> Tensor:
    """Compute the attention of successive positions of one sequence.

    Keys and values behind the last query are read with weight 0, and must be finite.

    `query`: [heads, queries, head_dim]. `keys`: [kv_heads, positions, head_dim], up to the end of the last query's
    block. `values`: [kv_heads, positions, head_dim]. Returns [heads, queries, head_dim].
    """
    heads, num, dim = query.shape
    before = start % BLOCK
    padded = F.pad(query * scale, (0, 0, before, -(before + num) % BLOCK)).contiguous()
    # the heads that share keys are rows of one product
    tiles = padded.view(len(keys), heads // len(keys), -1, BLOCK, dim)
    hidden = torch.full((BLOCK, BLOCK), -torch.inf, device=query.device).triu(1)
    out = torch.empty_like(tiles)
    for index in range(tiles.shape[2]):
        width = start - before + (index + 1) * BLOCK
        for head, (key, value) in enumerate(zip(keys, values, strict=True)):
            scores = _product(tiles[head, :, index].flatten(0, 1), key[:width])
            scores.view(-1, BLOCK, width)[..., -BLOCK:] += hidden
            probs = torch.softmax(scores, dim=-1).split(SUM, dim=1)
            parts = zip(probs, value[:width].split(SUM), strict=True)
            weighted = reduce(torch.add, (_product(some.contiguous(), rows.t()) for some, rows in parts))
            out[head, :, index] = weighted.view(-1, BLOCK, dim)
    return out.view(heads, -1, dim)[:, before : before + num]


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T; each element is the sum in the order of `in_order`."""
    is_ordered = _is_ordered(*x.shape, len(weight), weight.is_contiguous(), torch.get_num_threads())
    return multiply(x, weight) if is_ordered else in_order(x, weight)


@cache
def _is_ordered(num_rows: int, in_features: int, out_features: int, is_contiguous: bool, num_threads: int) -> bool:
    """Return whether `multiply` sums in order.

    `is_contiguous`: whether the weight is; otherwise it is transposed.
    """
    x, weight, _ = _random_operands(num_rows, out_features, in_features, has_bias=False)
    if not is_contiguous:
        weight = weight.t().contiguous().t()
    return torch.equal(multiply(x, weight), in_order(x, weight))


def in_order(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T; each element is summed term after term, as a decode step sums it.

    `x`: [rows, in]. `weight`: [out, in].
    """
    num, width = x.shape
    terms = torch.arange(width, dtype=torch.int32, device=x.device).repeat(num)
    starts = torch.arange(0, num * width, width, dtype=torch.int32, device=x.device)
    return torch.embedding_bag(weight.t().contiguous(), terms, starts, False, 0, False, x.flatten())[0]


# -- elementwise functions -------------------------------------------------------------------------------------------


def silu(x: Tensor) -> Tensor:
    """Return `F.silu(x)`, where each element's bits depend on that element alone."""
    return _Forward.apply(_silu, F.silu, x)


def _silu(x: Tensor) -> Tensor:
    # whole vectors of any processor; a copy, also if nothing is padded
    flat = F.pad(x.flatten(), (0, -x.numel() % 64))
    for run in flat.split(RUN):
        F.silu(run, inplace=True)
    return flat[: x.numel()].view(x.shape)


class RotaryTable:
    """The forward of a rotary embedding, read from a table. The table grows with the positions."""

    def __init__(self, forward: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        self._forward = forward
        self._runs: list[Tensor] = []
        self._table = torch.empty(0, 2, 0, device="cpu")

    @torch.no_grad()
    def __call__(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines `[..., head_dim]`."""
        num = int(position_ids.max()) + 1
        if num > len(self._table):
            for start in range(len(self._table), num, ANGLES_RUN):
                positions = torch.arange(start, start + ANGLES_RUN, device=x.device)
                self._runs.append(torch.stack(self._forward(x, positions[None]), dim=2)[0])
            self._table = torch.cat(self._runs)
        cos, sin = self._table[position_ids].unbind(-2)
        return cos, sin


# -- log-probabilities -----------------------------------------------------------------------------------------------


def label_logprobs(logits: Tensor, labels: Tensor, temperature: float, num_shards: int = 1) -> Tensor:
    """Return the log-probabilities `[rows]` that `linear_logprobs` computes with `is_deterministic`.

    `logits`: `[rows, vocabulary]`. `labels`: token ids, `[rows]`.
    """
    found = []
    for number, shard in enumerate(logits.tensor_split(num_shards, dim=1)):
        statistics = no_statistics(labels, logits.dtype)
        for index, block in enumerate(shard.split(COLUMNS, dim=1)):
            first = number * shard.shape[1] + index * COLUMNS
            statistics = merge(statistics, block_statistics(block, labels - first, temperature))
        found.append(statistics)
    return logprobs_and_entropy(reduce(merge, found))[0]
