"""The Triton kernel of decode steps, without a GPU: its numbers by Triton's interpreter, and its code for three GPUs.

The interpreter must be chosen before Triton is imported, so the numbers are computed in a process of its own, which
runs this file.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlite.backends.embedded.kernel import kernel_objection
from rlite.backends.models.attention import Softmax, Weighting
from rlite.backends.models.layout import AttentionLayer

PAGE = 64
CASES: list[tuple[tuple[int, int, int, int], str, int | None, bool]] = [
    ((8, 2, 64, 64), "float32", None, False),
    ((8, 2, 64, 64), "bfloat16", 24, True),
    ((4, 4, 24, 40), "float32", 100, True),
    ((3, 1, 128, 128), "float16", None, False),
    ((3, 1, 128, 128), "float32", 64, False),
]
"""heads, key heads and widths; dtype; window; whether scores are capped and have sinks"""
TOLERANCE = {"float32": 2e-6, "float16": 3e-3, "bfloat16": 3e-2}
POSITIONS = [0, 15, 63, 64, 200, 129]


def reference(query: Tensor, keys: Tensor, values: Tensor, pages: Tensor, length: int, weighting: Weighting) -> Tensor:
    """Attention of one row in float64."""
    first = max(0, length - (weighting.window or length))
    k, v = (
        x[pages].flatten(0, 1)[first:length].double().repeat_interleave(len(query) // x.shape[2], 1)
        for x in (keys, values)
    )
    scores = torch.einsum("hd,nhd->hn", query.double(), k) * weighting.scale
    softmax = weighting.softmax
    scores = scores if softmax.softcap is None else softmax.softcap * torch.tanh(scores / softmax.softcap)
    if softmax.sinks is not None:
        scores = torch.cat([scores, softmax.sinks.double()[:, None]], dim=1)
    return torch.einsum("hn,nhd->hd", scores.softmax(-1)[:, : len(k)], v)


def error_of(shape: tuple[int, int, int, int], dtype: str, window: int | None, has_all: bool) -> float:
    """The largest difference from float64 over rows of all lengths, whose pages are in any order."""
    from rlite.backends.embedded.triton_decode import paged_decode

    torch.manual_seed(0)
    heads, kv_heads, width, value_width = shape
    kind = getattr(torch, dtype)
    query = torch.randn(6, heads, width).to(kind)
    keys, values = (torch.randn(40, PAGE, kv_heads, w).to(kind) for w in (width, value_width))
    table, softmax = torch.randperm(40)[:36].view(6, 6), Softmax(2.5, torch.randn(heads)) if has_all else Softmax()
    weighting = Weighting(width**-0.5, window, softmax)
    given = query, keys, values, table, torch.tensor(POSITIONS), weighting
    found = paged_decode(*given, is_wide=dtype == "bfloat16")
    rows = zip(query, table, POSITIONS, strict=True)
    expected = torch.stack([reference(q, keys, values, t, p + 1, weighting) for q, t, p in rows])
    return float((found.double() - expected).abs().max())


def test_the_kernel_computes_attention_in_float64_up_to_rounding() -> None:
    pytest.importorskip("triton", reason="the interpreter needs the package triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    errors, objections = json.loads(done.stdout.splitlines()[-1])
    for case, error in zip(CASES, errors, strict=True):
        assert error < TOLERANCE[case[1]], case
    assert objections[0] == ""
    assert objections[1:] == [
        "on this GPU the kernel computes something else than PyTorch",
        "the kernel fails with ValueError: x",
    ]


def compiled_for(capability: int, width: int) -> Any:
    """The first kernel's code for a GPU: bfloat16, 16 heads, 8 key heads."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rlite.backends.embedded.triton_decode import STAGES, partial_attention

    pointers = dict.fromkeys(("query", "keys", "values"), "*bf16") | dict.fromkeys(("table", "positions"), "*i64")
    numbers = dict.fromkeys(("scale", "softcap"), "fp32") | dict.fromkeys(("window", "table_stride"), "i32")
    signature = {**pointers, "sums": "*fp32", "stats": "*fp32", **numbers, "pages_per_part": "i32"}
    sizes = {"KV_HEADS": 8, "GROUP": 2, "ROWS": 16, "PAGE": PAGE, "KEY": width, "KEY_PADDED": width, "VALUE": width}
    sizes |= {"VALUE_PADDED": width, "HAS_CAP": False, "WIDE": False}
    source = ASTSource(
        fn=partial_attention,
        signature=signature | dict.fromkeys(sizes, "constexpr"),
        constexprs=sizes,
        attrs={(index,): [["tt.divisibility", 16]] for index in range(7)},
    )
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_stages": STAGES, "enable_fp_fusion": True}
    )


def compiled_join(capability: int) -> Any:
    """The second kernel's code for a GPU: 16 heads, 64 parts."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rlite.backends.embedded.triton_decode import join_parts

    signature = {"sums": "*fp32", "stats": "*fp32", "sinks": "*bf16", "output": "*bf16", "num_parts": "i32"}
    sizes = {"HEADS": 16, "PARTS": 64, "VALUE": 128, "VALUE_PADDED": 128, "HAS_SINKS": True}
    source = ASTSource(
        fn=join_parts,
        signature=signature | dict.fromkeys(sizes, "constexpr"),
        constexprs=sizes,
        attrs={(index,): [["tt.divisibility", 16]] for index in range(4)},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": True})


def spilled(cubin: bytes, folder: Path) -> tuple[int, int]:
    """Bytes of local memory and of stack of a compiled kernel."""
    import triton

    (tool,) = Path(triton.__file__).parent.glob("backends/nvidia/bin/cuobjdump*")
    (folder / "kernel.cubin").write_bytes(cubin)
    told = subprocess.run(
        [tool, "-res-usage", folder / "kernel.cubin"], capture_output=True, text=True, check=True
    ).stdout
    return tuple(int(re.search(rf"{name}:(\d+)", told)[1]) for name in ("LOCAL", "STACK"))  # type: ignore[index, return-value]


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("width", [64, 128])
def test_the_compiled_kernel_uses_tensor_cores_and_vector_loads_and_spills_nothing(
    capability: int, width: int, tmp_path: Path
) -> None:
    pytest.importorskip("triton", reason="compilation for a GPU needs the package triton")
    kernel = compiled_for(capability, width)
    code = kernel.asm["ptx"]
    assert f".target sm_{capability}{'' if capability == 80 else 'a'}" in code
    assert len(re.findall(r"(wgmma\.mma_async|mma\.sync|tcgen05\.mma)", code)) >= 2
    assert re.search(r"cp\.async\.c[ag]\.shared\.global[^;]*, 0x10|ld\.global[^;]*v4|cp\.async\.bulk", code)
    assert kernel.metadata.shared < 227 * 1024 if capability > 80 else kernel.metadata.shared < 163 * 1024
    for code in (kernel, compiled_join(capability)):
        assert spilled(code.asm["cubin"], tmp_path) == (0, 0)


def test_widths_and_types_that_the_kernel_cannot_compute_are_told() -> None:
    def unused(*_: Any) -> Tensor:
        raise AssertionError("there is nothing to compute")

    wide = {0: AttentionLayer(4, 1, 576, 512)}
    for layers, dtype in ((wide, torch.float32), ({0: AttentionLayer(4, 1, 64, 64)}, torch.float64)):
        found = kernel_objection(unused, layers, dtype, torch.device("cpu"))
        assert found == "the kernel computes heads up to 256 wide, and not in float64"


if __name__ == "__main__":
    from rlite.backends.embedded.triton_decode import paged_decode

    def fail(*_: Any) -> Tensor:
        raise ValueError("x")

    layers = {0: AttentionLayer(8, 2, 64, 64), 1: AttentionLayer(4, 4, 24, 40)}
    kernels = (paged_decode, lambda *given: paged_decode(*given) * 1.1, fail)
    told = [kernel_objection(kernel, layers, torch.float16, torch.device("cpu")) for kernel in kernels]
    print(json.dumps([[error_of(*case) for case in CASES], told]))
