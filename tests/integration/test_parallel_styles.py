"""Every parallel style of transformers' plans, on two ranks: logits, gradients and served tokens are those of one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from rlite.backends.embedded.cache import EmbeddedOptions
from rlite.backends.embedded.worker import EmbeddedWorker
from rlite.backends.models.architecture import ROUNDED_TOLERANCE, alone, miniature, packed, saved
from rlite.nn.pretrained import meta_parameters, real_tensors
from rlite.runtime.parallel.tensor import parallelize
from rlite.types import GenerationHyperparameters, SequenceRequest
from tests.integration.worlds import ranks

pytestmark = pytest.mark.slow
KINDS: dict[str, dict[str, Any]] = {
    "granite_swa": {"num_hidden_layers": 2},  # sinks are split with their heads
    "gemma4_text": {"num_hidden_layers": 6},  # a scaled embedding, two widths of heads, an input for each layer
    "phi3": {"num_hidden_layers": 2},  # queries, keys and values of one matrix, whose outputs are gathered
    "deepseek_v3": {"num_hidden_layers": 2, "first_k_dense_replace": 2},  # latent attention, which is whole
}
MORE: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_hidden_layers": 2, "first_k_dense_replace": 2},  # latent attention with complex rotary angles
    "gemma3_text": {"num_hidden_layers": 6},
    # the mean of all columns of an MLP decides which are zero
    "gemma3n_text": {
        "num_hidden_layers": 10,
        "num_kv_shared_layers": 5,
        "activation_sparsity_pattern": [0.95] * 5 + [0.0] * 5,
    },
    "glm4": {"num_hidden_layers": 2},  # gate and up of one matrix
    "olmo2": {"num_hidden_layers": 2},  # a norm over all heads
    "minicpm3": {"num_hidden_layers": 2},  # latent attention, whose plan splits its last projections
    "qwen3_moe": {"num_hidden_layers": 2},  # experts, which are whole
    "hunyuan_v1_moe": {"num_hidden_layers": 2},  # routers that know the number of their layer
    "mimo_v2_flash": {"num_hidden_layers": 4},
}
WITH_EXPERTS = {"qwen3_moe", "hunyuan_v1_moe", "mimo_v2_flash"}
ROUNDED = {"gemma3n_text"}
"""their norms take powers in float32, whose rounding varies with the number of tokens"""
PROMPTS = [[25, 29, 31, 26, 30, 51, 28] * 2, [47, 33, 22]]


def small_model(kind: str) -> Any:
    config = AutoConfig.for_model(kind, **{**KINDS, **MORE}[kind])
    return miniature(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)


def gradients_of(model: Any) -> dict[str, Tensor]:
    out = packed(model)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    (out * weights).sum().backward()
    found = {"logits": out.detach()}
    for name, parameter in model.named_parameters():
        if (gradient := parameter.grad) is not None:
            found[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return found


def in_its_widest(model: Any) -> Any:
    """Return the model in float64, or in float32 if its kernels do not take more."""
    try:
        alone(model.double())
    except Exception:
        model.float()
    return model


def split_copy(model: Any, mesh: Any) -> Any:
    """Return the model with its parameters split over the ranks."""
    dtype = next(model.parameters()).dtype
    with real_tensors(), meta_parameters():
        copy = type(model)._from_config(model.config, dtype=dtype).eval()
    with real_tensors():
        copy.tie_weights()
    parallelize(copy, mesh)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        placeholder = copy.get_parameter(name)
        made[placeholder] = nn.Parameter(distribute_tensor(parameter.detach(), mesh, placeholder.placements))
    for module in copy.modules():
        module._parameters.update({name: made[p] for name, p in module._parameters.items() if p is not None})
    return copy


def served(path: str, group: Any, *, deterministic: bool) -> dict[int, tuple[list[int], list[float]]]:
    options = EmbeddedOptions(max_model_len=32, max_num_seqs=2, max_prefill_tokens=8, deterministic=deterministic)
    worker = EmbeddedWorker(path, options, torch.device("cpu"), group)
    gconfig = GenerationHyperparameters(max_new_tokens=6, temperature=0, ignore_eos=True)
    requests = [SequenceRequest(request_id=i, input_ids=x, gconfig=gconfig, seed=i) for i, x in enumerate(PROMPTS)]
    return {chunk.request_id: (chunk.token_ids, chunk.logprobs) for chunk in worker.advance(requests, [], 6)}


def compute(rank: int, folder: str, kinds: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    found: dict[str, Any] = {kind: gradients_of(split_copy(in_its_widest(small_model(kind)), mesh)) for kind in kinds}
    for kind in kinds:
        for is_fixed in (False, True):
            found[f"{kind} {is_fixed}"] = served(f"{folder}/{kind}", dist.group.WORLD, deterministic=is_fixed)
    torch.save(found, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def compare(kinds: list[str], folder: Path) -> None:
    """Compare two ranks with one: logits, gradients and served tokens."""
    for kind in kinds:
        with saved(small_model(kind)) as path:
            shutil.copytree(path, folder / kind)
    with ranks(compute, [(rank, str(folder), kinds) for rank in range(2)]):
        pass
    both = [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]
    for kind in kinds:
        expected = gradients_of(in_its_widest(small_model(kind)))
        largest = max(float(gradient.abs().max()) for name, gradient in expected.items() if name != "logits")
        # experts and norms compute in float32, and norms sum other parts of a gradient
        is_exact = kind not in WITH_EXPERTS | ROUNDED and expected["logits"].dtype == torch.float64
        tolerance = 1e-9 if is_exact else ROUNDED_TOLERANCE if kind in ROUNDED else 1e-4
        for found in (rank[kind] for rank in both):
            assert found.keys() == expected.keys()
            torch.testing.assert_close(found["logits"], expected["logits"], rtol=0, atol=tolerance)
            for name in expected.keys() - {"logits"}:
                error = float((found[name] - expected[name]).abs().max()) / largest
                assert error <= (1e-6 if is_exact else 1e-5), (kind, name, error)
    for kind in kinds:
        for is_fixed in (False, True):
            expected_tokens = served(str(folder / kind), None, deterministic=is_fixed)
            for rank in both:
                for number, (tokens, logprobs) in rank[f"{kind} {is_fixed}"].items():
                    assert tokens == expected_tokens[number][0]
                    expected_logprobs = torch.tensor(expected_tokens[number][1])
                    torch.testing.assert_close(torch.tensor(logprobs), expected_logprobs, rtol=0, atol=1e-4)


def test_two_ranks_compute_and_serve_what_one_does(tmp_path: Path) -> None:
    compare(list(KINDS), tmp_path)


@pytest.mark.nightly
def test_two_ranks_compute_and_serve_what_one_does_for_more_classes(tmp_path: Path) -> None:
    compare(list(MORE), tmp_path)
