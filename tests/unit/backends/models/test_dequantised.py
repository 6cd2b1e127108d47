"""Tensors in fp8 and MXFP4 are read as transformers dequantises them, box by box."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from rlite.backends.models.stored import DequantisedReader
from rlite.errors import CheckpointError
from rlite.nn.pretrained import check_plain, load_config
from rlite.runtime.parallel.shards import CheckpointReader
from tests.unit.backends.models.small import text_model, written


def reader(folder: Path, tensors: dict[str, Tensor], **quantisation: Any) -> DequantisedReader:
    save_file(tensors, folder / "model.safetensors")
    return DequantisedReader(CheckpointReader(folder), quantisation)


def fp8(rows: int, columns: int, block: tuple[int, int]) -> dict[str, Tensor]:
    scales = torch.rand(-(-rows // block[0]), -(-columns // block[1])) + 0.1
    return {"a.weight": torch.randn(rows, columns).to(torch.float8_e4m3fn), "a.weight_scale_inv": scales}


BOXES = [
    (slice(0, 16), slice(0, 24)),
    (slice(3, 11), slice(7, 8)),
    (slice(8, 16), slice(0, 12)),
    (slice(5, 5), slice(0, 24)),
]


@pytest.mark.parametrize("box", BOXES)
def test_fp8_with_a_scale_per_block_is_what_transformers_makes_of_it(box: Any, tmp_path: Path) -> None:
    tensors = fp8(16, 24, (8, 12))
    found = reader(tmp_path, tensors, weight_block_size=[8, 12])
    expected = Fp8Dequantize(None)._dequantize_one(*tensors.values(), torch.bfloat16)
    assert found.names() == ["a.weight"]
    assert found.dtype("a.weight") == torch.bfloat16
    assert found.shape("a.weight") == (16, 24)
    assert torch.equal(found.read("a.weight"), expected)
    assert torch.equal(found.read("a.weight", box), expected[box])


def test_the_last_blocks_of_fp8_may_be_smaller(tmp_path: Path) -> None:
    tensors = fp8(10, 25, (8, 12))
    weight, scales = tensors.values()
    found = reader(tmp_path, tensors, weight_block_size=[8, 12])
    expected = weight.float() * scales.repeat_interleave(8, 0)[:10].repeat_interleave(12, 1)[:, :25]
    assert torch.equal(found.read("a.weight"), expected.bfloat16())
    assert torch.equal(found.read("a.weight", (slice(7, 10), slice(11, 25))), expected[7:, 11:].bfloat16())


def test_fp8_may_have_a_scale_for_the_whole_tensor(tmp_path: Path) -> None:
    weight, scale = torch.randn(4, 6).to(torch.float8_e4m3fn), torch.tensor(0.3)
    found = reader(tmp_path, {"a.weight": weight, "a.weight_scale_inv": scale})
    assert torch.equal(found.read("a.weight"), (weight.float() * scale).bfloat16())


def test_scales_that_do_not_fit_their_tensor_are_refused(tmp_path: Path) -> None:
    found = reader(tmp_path, fp8(16, 24, (8, 12)), weight_block_size=[4, 12])
    with pytest.raises(CheckpointError, match=r"a.weight_scale_inv has the shape \(2, 2\), and blocks of \[4, 12\]"):
        found.read("a.weight")


@pytest.mark.parametrize("box", [(slice(0, 3), slice(0, 96), slice(0, 4)), (slice(1, 2), slice(31, 70), slice(1, 3))])
def test_mxfp4_is_what_transformers_makes_of_it(box: Any, tmp_path: Path) -> None:
    blocks = torch.randint(0, 256, (3, 4, 3, 16), dtype=torch.uint8)
    scales = torch.randint(118, 132, (3, 4, 3), dtype=torch.uint8)
    found = reader(tmp_path, {"experts.up_blocks": blocks, "experts.up_scales": scales, "experts.bias": torch.ones(2)})
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert sorted(found.names()) == ["experts.bias", "experts.up"]
    assert found.shape("experts.up") == (3, 96, 4) == tuple(expected.shape)
    assert torch.equal(found.read("experts.up"), expected)
    assert torch.equal(found.read("experts.up", box), expected[box])
    assert found.dtype("experts.bias") == torch.float32


def test_it_is_said_once_that_weights_are_dequantised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(text_model("qwen3"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [8, 12]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            check_plain(load_config(tmp_path), tmp_path)
    (said,) = (record.getMessage() for record in caplog.records)
    assert "is stored in fp8: its weights are converted to bfloat16 as they are read, and exports" in said
    with pytest.raises(CheckpointError, match=r"quantised \(its config has quantization_config, method fp8"):
        check_plain(load_config(tmp_path), tmp_path, reads=())
