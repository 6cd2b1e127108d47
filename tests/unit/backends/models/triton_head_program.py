"""Runs the Triton kernels of the output embedding without a GPU, and prints JSON: a process of its own, because Triton
decides at import whether its kernels are interpreted.

    TRITON_INTERPRET=1 python -m tests.unit.backends.models.triton_head_program interpret
    python -m tests.unit.backends.models.triton_head_program compile
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlite.algorithms import logprobs as formulas
from rlite.backends.models import triton_head
from rlite.nn import linear_logprobs
from tests.kept_ids import kept_sets, pairs_of

T, VOCAB, WIDTH = 9, 5003, 24
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def cases() -> Iterator[tuple[str, dict[str, float]]]:
    for name, dtype in DTYPES.items():
        for temperature in (1.0, 0.7):
            for has_entropy in (False, True):
                yield f"{name}, {temperature}, {has_entropy}", errors(dtype, temperature, has_entropy)


def errors(dtype: torch.dtype, temperature: float, has_entropy: bool) -> dict[str, float]:
    """Errors against float64, for a vocabulary that two ranks hold."""
    torch.manual_seed(0)
    logits, labels = (torch.randn(T, VOCAB) * 3).to(dtype), torch.randint(VOCAB, (T,))
    parts = [(0, 2000), (2000, VOCAB)]
    exact = formulas.block_statistics(logits.double(), labels, temperature)
    found = [triton_head.block_statistics(logits[:, a:b].contiguous(), labels - a, temperature) for a, b in parts]
    values = formulas.logprobs_and_entropy(formulas.merge(*found)), formulas.logprobs_and_entropy(exact)
    differences = [float((x - y).abs().max()) for x, y in zip(*values, strict=True)]
    logprob, entropy = torch.randn(T).double(), torch.randn(T).double() if has_entropy else None
    log_sums = values[1][2], values[1][1]
    grad = formulas.block_gradient(logits.double(), labels, temperature, *log_sums, logprob, entropy)
    totals = [None if x is None else x.float() for x in (*log_sums, logprob, entropy)]
    blocks = [logits[:, a:b].contiguous() for a, b in parts]
    for block, (a, _) in zip(blocks, parts, strict=True):  # in place
        triton_head.block_gradient(block, labels - a, temperature, *totals, out=block)
    return {
        "logprobs": differences[0],
        "entropies": differences[1],
        "gradient": relative(torch.cat(blocks, 1), grad),
    }


def infinities() -> dict[str, Any]:
    """Rows with forbidden tokens, without an allowed token, with NaN and with infinity."""
    torch.manual_seed(0)
    logits, labels = torch.randn(4, VOCAB), torch.tensor([1, 1, 1, VOCAB])
    logits[0, 5:4990], logits[1], logits[2, 4700], logits[3, 7] = -torch.inf, -torch.inf, torch.nan, torch.inf
    logits = torch.cat([logits, torch.randn(1, VOCAB)])
    labels = torch.cat([labels, torch.tensor([-3])])
    exact = formulas.logprobs_and_entropy(formulas.block_statistics(logits, labels, 1.0))
    found = formulas.logprobs_and_entropy(triton_head.block_statistics(logits, labels, 1.0))
    grad = triton_head.block_gradient(logits, labels, 1.0, found[2], found[1], torch.ones(5), torch.ones(5))
    return {
        "is_alike": [torch.allclose(x, y, atol=1e-5, equal_nan=True) for x, y in zip(found, exact, strict=True)],
        "is_nan": exact[1].isnan().tolist(),
        "has_nan_gradient": grad.isnan().any(1).tolist(),
        "forbidden": float(grad[0, 5:4990].abs().max()),
    }


def head(case: str) -> dict[str, float]:
    """Errors of `linear_logprobs` with the kernels against float64, of values and of all gradients."""
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(*s, dtype=torch.float64) for s in ((T, WIDTH), (VOCAB, WIDTH), (VOCAB,)))
    labels = torch.randint(VOCAB, (T,))
    replay = pairs_of(kept_sets(labels.tolist(), VOCAB)) if case == "kept ids" else None
    results = []
    for dtype, kernels in ((torch.float64, None), (torch.float32, triton_head)):
        leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight, bias)]
        options: dict[str, Any] = {"bias": leaves[2], "kernels": kernels, "replay": replay}
        options |= {"block_size": 2000, "num_kept": 3 * T * 1000 if case == "kept blocks" else 0}
        values = linear_logprobs(*leaves[:2], labels, 0.7, **options)
        loss = (values.logprobs.square() + values.entropy * values.logprobs).sum()
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        second = torch.autograd.grad(loss, leaves)  # kept blocks must be as they were
        results.append([*values, *first, *second])
    names = ("logprobs", "entropies", *(f"{x} {n}" for n in (1, 2) for x in ("hidden", "weight", "bias")))
    return dict(zip(names, map(relative, results[1], results[0]), strict=True))


def interpret() -> dict[str, Any]:
    heads = {case: head(case) for case in ("plain", "kept blocks", "kept ids")}
    return {"cases": dict(cases()), "infinities": infinities(), "heads": heads}


SHARED = {"labels_ptr": "*i64", "num_columns": "i32", "inverse_temperature": "fp32", "COLUMNS": "constexpr"}
STATISTICS = {"logits_ptr": "*bf16", "out_ptr": "*fp32", "num_rows": "i32", **SHARED}
GRADIENT = {
    "logits_ptr": "*bf16",
    "out_ptr": "*bf16",
    "HAS_ENTROPY": "constexpr",
    **SHARED,
    **dict.fromkeys(("log_sums_ptr", "entropies_ptr", "grad_logprobs_ptr", "grad_entropies_ptr"), "*fp32"),
}


def compiled() -> Iterator[tuple[str, dict[str, Any]]]:
    gradient = triton_head.gradient_kernel, GRADIENT, triton_head.GRADIENT_WARPS
    statistics = triton_head.statistics_kernel, STATISTICS, triton_head.STATISTICS_WARPS
    for capability in (80, 90, 100):
        yield f"statistics {capability}", facts(*statistics, capability, COLUMNS=triton_head.STATISTICS_COLUMNS)
        for has_entropy in (False, True):
            sizes = {"COLUMNS": triton_head.GRADIENT_COLUMNS, "HAS_ENTROPY": has_entropy}
            yield f"gradient {has_entropy} {capability}", facts(*gradient, capability, **sizes)


def facts(kernel: Any, types: dict[str, str], num_warps: int, capability: int, **constants: Any) -> dict[str, Any]:
    """What ptxas says of a kernel, compiled for columns that are a multiple of 16, as vocabularies are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: types[name] for name in kernel.arg_names}
    aligned = [i for i, (name, kind) in enumerate(signature.items()) if kind[0] == "*" or name == "num_columns"]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps})
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        used = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    ptx = binary.asm["ptx"]
    return {
        **{name: int(value) for name, value in re.findall(r"(STACK|LOCAL):(\d+)", used)},
        "shared": binary.metadata.shared,
        "loads": len(re.findall(r"ld\.global\S*\.v4", ptx)),
        "target": re.search(r"\.target (\w+)", ptx)[1],  # type: ignore[index]
        "stores": len(re.findall(r"st\.global\S*\.v4", ptx)),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(interpret() if sys.argv[1] == "interpret" else dict(compiled())))
