"""The choice of the attention of decode steps on a GPU: the Triton kernel, if it computes what PyTorch computes."""

from __future__ import annotations

import importlib
import logging

import torch

from rlite.backends.embedded.attention import DecodePlan, KernelDecodePlan, PagedKernel
from rlite.backends.embedded.cache import CacheShape, PagedCache
from rlite.backends.models.attention import Weighting
from rlite.backends.models.layout import AttentionLayers
from rlite.imports import lacking
from rlite.nn.pretrained import summary

logger = logging.getLogger(__name__)
MAX_KERNEL_WIDTH = 256
"""widest head of the kernel"""
TOLERANCE = 0.02
"""largest difference in bfloat16, absolute and relative"""


def decode_kernel(layers: AttentionLayers, dtype: torch.dtype, device: torch.device) -> PagedKernel | None:
    """Return the Triton kernel of decode steps, if it computes here what PyTorch computes; else say why not."""
    reason = lacking("the kernel needs", "triton", "triton")
    if not reason:
        kernel: PagedKernel = importlib.import_module("rlite.backends.embedded.triton_decode").paged_decode
        if not (reason := kernel_objection(kernel, layers, dtype, device)):
            return kernel
    logger.warning("decode steps gather the keys and values of all sequences, which is slower: %s", reason)
    return None


@torch.inference_mode()
def kernel_objection(kernel: PagedKernel, layers: AttentionLayers, dtype: torch.dtype, device: torch.device) -> str:
    """Return why a kernel cannot compute the attention of these layers; "" if it can."""
    if dtype == torch.float64 or any(max(layer[2:4]) > MAX_KERNEL_WIDTH for layer in layers.values()):
        return f"the kernel computes heads up to {MAX_KERNEL_WIDTH} wide, and not in float64"
    lengths = [150, 71]
    positions = torch.tensor([lengths], device=device) - 1
    table = torch.tensor([[5, 2, 4], [1, 3, 0]], device=device)
    for layer in {layer._replace(source=None) for layer in layers.values()}:
        cache = PagedCache(CacheShape({0: layer}, 6), dtype, device)
        query = torch.randn(2, layer.num_heads, layer.key_width, device=device).to(dtype)
        key = torch.randn(2, layer.num_key_heads, layer.key_width, device=device).to(dtype)
        value = torch.randn(2, layer.num_key_heads, layer.value_width, device=device).to(dtype)
        for tensor in (cache.keys[0], cache.values[0]):
            tensor.normal_()
        plans = DecodePlan(cache, table, positions, lengths), KernelDecodePlan(cache, table, positions, kernel)
        weighting = Weighting(layer.key_width**-0.5)
        try:
            expected, found = (plan.attend(0, query, key, value, weighting).float() for plan in plans)
        except Exception as error:  # of any kind: Triton's, its compiler's or the driver's
            return f"the kernel fails with {summary(error)}"
        if not torch.allclose(found, expected, atol=TOLERANCE, rtol=TOLERANCE):
            return "on this GPU the kernel computes something else than PyTorch"
    return ""
