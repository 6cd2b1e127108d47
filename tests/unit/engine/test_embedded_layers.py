"""Layers of one cache differ in heads, in widths, in their softmax, and in the layer whose keys they read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from rlite.backends.embedded.attention import DecodePlan, NativeDecodePlan, PrefillPlan, ScoringPlan
from rlite.backends.embedded.cache import CacheShape, EmbeddedOptions, PagedCache
from rlite.backends.embedded.scheduler import Chunk, Copies
from rlite.backends.embedded.worker import EmbeddedWorker
from rlite.backends.models.architecture import miniature, saved
from rlite.backends.models.attention import Softmax, Weighting, causal_attention
from rlite.backends.models.layout import AttentionLayer, attention_layers
from rlite.types import GenerationHyperparameters, SequenceRequest

CPU = torch.device("cpu")
SINKS = torch.linspace(-2.0, 2.0, 4)
LAYERS = {
    0: AttentionLayer(4, 2, 16, 8),
    1: AttentionLayer(4, 1, 24, 40),
    3: AttentionLayer(4, 2, 16, 8, source=0),
    4: AttentionLayer(4, 1, 24, 40, is_capped=True),
}
SOFTMAX = {0: Softmax(), 1: Softmax(sinks=SINKS), 3: Softmax(), 4: Softmax(softcap=1.5)}
WINDOWS = {0: None, 1: 5, 3: 3, 4: None}
"""layer 2 has no attention"""
LENGTH, START = 70, 67


def tensors(num: int, dtype: torch.dtype) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    """Queries, keys and values [num, heads, width] of each layer; layer 3 has the keys and values of layer 0."""
    generator = torch.Generator().manual_seed(num)
    made: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for index, layer in LAYERS.items():
        sizes = [(layer.num_heads, layer.key_width), (layer.num_key_heads, layer.key_width)]
        sizes.append((layer.num_key_heads, layer.value_width))
        query, key, value = (
            torch.randn(num, *size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes
        )
        made[index] = (query, key, value) if layer.source is None else (query, *made[layer.source][1:])
    return made


def expected(layer: int, start: int) -> Tensor:
    query, key, value = (x.transpose(0, 1)[None] for x in tensors(LENGTH, torch.float64)[layer])
    softmax = SOFTMAX[layer]
    if softmax.sinks is not None:
        softmax = softmax._replace(sinks=softmax.sinks.double())
    found = causal_attention(query, key, value, 0.4, WINDOWS[layer], softmax=softmax)
    return found[0].transpose(0, 1)[start:]


@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["plain", "blocked"])
def test_prompts_and_decode_steps_of_every_kind_of_layer_are_those_of_the_whole_sequence(
    dtype: torch.dtype, is_fixed: bool
) -> None:
    cache, rows = PagedCache(CacheShape(LAYERS, 7), dtype, CPU), tensors(LENGTH, dtype)
    pages = [5, 2]
    if is_fixed:
        chunks = [Chunk(0, 0, 64, [7] * 64, pages=pages), Chunk(0, 64, START, [7] * 3, pages=pages)]
    else:
        chunks = [Chunk(0, 0, 40, [7] * 40, pages=pages), Chunk(0, 40, START, [7] * 27, pages=pages)]
    for chunk in chunks:
        plan = PrefillPlan(cache, [chunk], is_flash=False, is_invariant=False, is_fixed=is_fixed)
        for layer in LAYERS:
            part = [x[chunk.start : chunk.stop] for x in rows[layer]]
            out = plan.attend(layer, *part, Weighting(0.4, WINDOWS[layer], SOFTMAX[layer]))
            torch.testing.assert_close(out, expected(layer, chunk.start)[: len(out)].to(dtype), rtol=1e-5, atol=1e-5)
    cache.apply(Copies([(2, 1), (2, 6)], []))
    table, positions = torch.tensor([[5, 1], [5, 6]]), torch.arange(START, LENGTH)[:, None].expand(-1, 2)
    plans: list = [DecodePlan(cache, table, positions, [START + 1] * 2)]
    if cache.is_blocked:
        plans.append(NativeDecodePlan(cache, table, positions))
    for step in range(LENGTH - START):
        for plan in plans:
            if step:
                plan.go_to(step)
            for layer in LAYERS:
                new = [x[START + step][None].expand(2, -1, -1) for x in rows[layer]]
                out = plan.attend(layer, *new, Weighting(0.4, WINDOWS[layer], SOFTMAX[layer]))
                right = expected(layer, START + step)[:1].expand_as(out).to(dtype)
                torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-5)


def test_scoring_continues_a_prompt_in_every_kind_of_layer() -> None:
    rows, plan = tensors(LENGTH, torch.float64), None
    for chunk in (Chunk(0, 0, 40, [7] * 40), Chunk(0, 40, LENGTH, [7] * 30)):
        plan = ScoringPlan([chunk], plan, CPU)
        for layer in LAYERS:
            softmax = SOFTMAX[layer]._replace(sinks=SINKS.double() if layer == 1 else None)
            part = [x[chunk.start : chunk.stop] for x in rows[layer]]
            out = plan.attend(layer, *part, Weighting(0.4, WINDOWS[layer], softmax))
            torch.testing.assert_close(out, expected(layer, chunk.start)[: len(out)])


def test_layers_that_read_another_layer_s_keys_have_no_memory_of_their_own() -> None:
    cache = PagedCache(CacheShape(LAYERS, 3), torch.float64, CPU)
    elements = 3 * 64 * (2 * (16 + 8) + 2 * 1 * (24 + 40))
    assert cache.nbytes == 8 * elements == 8 * 3 * CacheShape(LAYERS, 3).page_elements
    assert cache.keys[3].data_ptr() == cache.keys[0].data_ptr()
    cache.values[1].fill_(torch.nan)
    cache.clear([1])
    assert cache.values[1].isnan().any(dim=-1).any(dim=-1).any(dim=-1).tolist() == [True, False, True]


def test_the_layers_of_a_model_are_found_by_a_pass_of_one_token() -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "attention_k_eq_v": True}
    windows = ["sliding_attention"] * 3 + ["full_attention", "sliding_attention", "full_attention"]
    others = {3: {"head_dim": 128, "num_key_value_heads": 2}, 5: {"head_dim": 128, "num_key_value_heads": 2}}
    sizes = {"num_hidden_layers": 6, "layer_types": windows, "num_kv_shared_layers": 2}
    config = AutoConfig.for_model("gemma4_text", **heads, **sizes, per_layer_config=others)
    layers = attention_layers(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
    assert [layer.source for layer in layers.values()] == [None] * 4 + [2, 3]
    assert layers[4] == AttentionLayer(8, 4, 64, 64, source=2)
    assert layers[3] == AttentionLayer(8, 2, 128, 128)


PROMPTS = [[25, 29, 31, 26, 30, 51, 28] * 3] * 2 + [[47, 33, 22]]
NUM_NEW = 12


def served(path: str, options: dict) -> list[list[int]]:
    """Return the greedy tokens of siblings and of a neighbour, whose caches are computed again from time to time."""
    worker = EmbeddedWorker(path, EmbeddedOptions(max_model_len=64, max_num_seqs=4, **options), CPU)
    gconfig = GenerationHyperparameters(max_new_tokens=NUM_NEW, temperature=0, ignore_eos=True)
    requests = [SequenceRequest(request_id=i, input_ids=x, gconfig=gconfig, seed=i) for i, x in enumerate(PROMPTS)]
    made: list[list[int]] = [[] for _ in PROMPTS]
    for new in (requests, [], []):
        for chunk in worker.advance(new, [], 4):
            made[chunk.request_id] += chunk.token_ids
        worker.weights_changed(1)
    return made


@pytest.mark.parametrize("kind", ["gemma4_text", "granite_swa", "gemma2", "minicpm3"])
def test_siblings_and_recomputed_caches_give_the_tokens_of_transformers(kind: str) -> None:
    is_shared = kind == "gemma4_text"
    sizes = {"num_hidden_layers": 12, "num_kv_shared_layers": 6} if is_shared else {"num_hidden_layers": 4}
    config = AutoConfig.for_model(kind, **sizes)
    model = miniature(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
    expected = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(NUM_NEW):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
        expected.append(tokens[len(prompt) :])
    with saved(model) as path:
        for options in ({}, {"deterministic": True}, {"dtype": "float64"}):
            assert served(path, options) == expected
