"""Operations that make a host wait for its GPU, or that are many, do not occur; the CPU shows that as well.

Masks as indices, assigned numbers and copies of host values wait. One operation for each parameter takes long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig
from transformers.masking_utils import create_causal_mask

from rlite.algorithms.logprobs import next_token, no_statistics, previous_token
from rlite.backends.embedded.attention import DecodePlan
from rlite.backends.embedded.cache import CacheShape, PagedCache
from rlite.backends.fsdp2.worker import read_weights
from rlite.backends.models.attention import PACKED, Weighting
from rlite.backends.models.head_logprobs import logprobs_of
from rlite.backends.models.layout import AttentionLayer
from rlite.data.packs import lazy_pack
from rlite.nn.base import BaseTrainModule
from rlite.runtime.parallel import fsdp
from rlite.runtime.parallel.upload import upload

WAITING = {"masked_scatter", "masked_scatter_backward", "index", "index_put", "index_put_", "_index_put_impl_", "sort"}
"""operations whose index may be a mask, or whose value may be a number of the host; `nonzero` is counted apart"""


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name.split("::")[-1]] += 1
        return func(*args, **(kwargs or {}))


def operations(function: Callable[[], Any]) -> Counter[str]:
    with Operations() as found:
        function()
    return found.counts


def test_a_head_at_some_positions_looks_for_them_once_forward_and_never_backward() -> None:
    head, hidden = nn.Linear(5, 13), torch.randn(1, 8, 5, requires_grad=True)
    positions = torch.arange(8) % 3 == 1

    def step() -> None:
        with logprobs_of(head, torch.arange(8), 1.0, positions):
            output = head(hidden)
        output.sum().backward()

    found = operations(step)
    assert found["nonzero"] == 1
    assert WAITING & found.keys() == set()


def test_values_are_shifted_without_an_assigned_number() -> None:
    cu_seqlens = torch.tensor([0, 3, 7])
    for shift in (next_token, previous_token):
        assert WAITING & operations(lambda shift=shift: shift(torch.arange(7), cu_seqlens)).keys() == set()
    assert "lift_fresh" not in operations(lambda: no_statistics(torch.arange(7), torch.float32))


def test_gradients_of_many_parameters_are_clipped_by_as_many_operations_as_those_of_one() -> None:
    def clipping(num: int) -> int:
        parameters = [nn.Parameter(torch.ones(3)) for _ in range(num)]
        for parameter in parameters:
            parameter.grad = torch.ones(3)
        mesh: Any = SimpleNamespace(tensor_rank=0, dims=SimpleNamespace(copies=1))
        found = operations(lambda: fsdp.clip_gradients(parameters, 1.0, mesh, None))
        return sum(count for name, count in found.items() if name not in ("detach", "alias"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_reduce", lambda tensor, group=None: None)
        assert clipping(20) == clipping(1)


def test_positions_are_computed_of_a_pack_on_the_host() -> None:
    batch = {
        "input_ids": torch.arange(6).view(2, 3),
        "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
        "loss_mask": torch.tensor([[0, 1, 0], [0, 1, 1]]),
    }
    pack = lazy_pack(batch, [1, 0], torch.device("meta"))
    assert pack["input_ids"].is_meta
    assert pack.on_host()["loss_mask"].tolist() == [0, 1, 1, 0, 1]
    assert pack.on_host()["cu_seqlens"].tolist() == [0, 3, 5]


def test_transformers_computes_nothing_for_the_mask_of_a_pack() -> None:
    config, positions = AutoConfig.for_model("qwen3"), torch.tensor([[0, 1, 2, 0, 1]])
    config._attn_implementation = PACKED
    given = {"inputs_embeds": torch.zeros(1, 5, 4), "attention_mask": None, "past_key_values": None}
    assert not operations(lambda: create_causal_mask(config=config, position_ids=positions, **given))


class OneLayer(BaseTrainModule):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.layer, self.folder = nn.Linear(4, 6, bias=False), folder

    def materialization_source(self) -> str:
        return str(self.folder)


def test_weights_are_read_on_the_host_in_a_context_of_another_device(tmp_path: Path) -> None:
    save_file({"layer.weight": (stored := torch.randn(6, 4))}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    module = OneLayer(tmp_path)
    with torch.device("meta"):
        read_weights(module)
    assert torch.equal(module.layer.weight, stored)


def test_eager_decode_steps_attend_to_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that plans its kernel for each length would plan it anew at each step."""
    cache = PagedCache(CacheShape({0: AttentionLayer(4, 2, 16, 16)}, 7), torch.bfloat16, torch.device("cpu"))
    table = torch.arange(1, 7).view(2, 3)
    lengths, steps, widths = [5, 70], 60, set()
    attention = F.scaled_dot_product_attention

    def watched(query: Tensor, key: Tensor, *args: Any, **options: Any) -> Tensor:
        widths.add(key.shape[2])
        return attention(query, key, *args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    plan = DecodePlan(cache, table, torch.tensor(lengths) - 1 + torch.arange(steps)[:, None], lengths)
    for step in range(steps):
        if step:
            plan.go_to(step)
        query, key = torch.randn(2, 4, 16).bfloat16(), torch.randn(2, 2, 16).bfloat16()
        assert plan.attend(0, query, key, key, Weighting(0.25)).isfinite().all()
    assert widths == {128, 192}


@pytest.mark.parametrize("values", [[[1, 2], [3, 4]], torch.tensor([[1, 2], [3, 4]])])
def test_uploaded_values_keep_their_shape_in_a_context_of_another_device(values: Any) -> None:
    with torch.device("meta"):
        made = upload(values, torch.device("cpu"), torch.float64)
    assert made.dtype == torch.float64
    assert made.tolist() == [[1.0, 2.0], [3.0, 4.0]]
