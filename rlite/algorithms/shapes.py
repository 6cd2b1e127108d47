"""Define shapes of the tensors that algorithms take and return, as annotations.

Per-token tensors come in two layouts. Packed is `[T]` with `cu_seqlens [N + 1]`, in which sequence i is
`x[cu_seqlens[i]:cu_seqlens[i + 1]]`. Padded is `[B, L]` without `cu_seqlens`.
"""

from __future__ import annotations

from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

Tokens = Float[Tensor, "*tokens"]
"""one number per token, `[T]` or `[B, L]`"""
Logits = Float[Tensor, "*tokens vocab"]
"""logits of each token, `[T, V]` or `[B, L, V]`"""
Mask = Shaped[Tensor, "*tokens"]
"""1 or True for the tokens that count, of any dtype"""
Flags = Bool[Tensor, "*tokens"]
"""True or False per token"""
CuSeqlens = Int[Tensor, " sequences+1"]
"""boundaries of the sequences of a pack: the start of each, and the end of the last"""
Sequences = Float[Tensor, " sequences"]
"""one number per sequence, `[N]`"""
GroupIds = Int[Tensor, " sequences"]
"""equal for the responses to one prompt, in any order"""
Pairs = Float[Tensor, " pairs"]
"""one number per preference pair, `[P]`"""
Scalar = Float[Tensor, ""]
"""a tensor of one number"""
