"""The DPO family: losses of the log ratios of a chosen and a rejected response, log pi - log ref, one value per pair.

`preference.preference_loss` makes the log ratios, or what another divergence or length normalisation makes of them.
Below, c and r are the two, d = c - r and b = beta.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid, relu, sigmoid

from rlite.errors import ConfigError


def dpo(
    chosen: Float[Tensor, " pairs"],
    rejected: Float[Tensor, " pairs"],
    *,
    beta: float,
    label_smoothing: float = 0.0,
    margin: float = 0.0,
) -> Float[Tensor, " pairs"]:
    """L = -log sigmoid(b d - margin). DPO, arXiv:2305.18290, eq. 7.

    `label_smoothing` = e is conservative DPO: (1 - e) L(d) + e L(-d) (Mitchell 2023, "A note on DPO with noisy
    preferences"). With lengths, a margin and a reference of 0 it is SimPO (arXiv:2405.14734).
    """
    logits = beta * (chosen - rejected) - margin
    return -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)


def robust_dpo(
    chosen: Float[Tensor, " pairs"], rejected: Float[Tensor, " pairs"], *, beta: float, label_smoothing: float = 0.1
) -> Float[Tensor, " pairs"]:
    """L = [-(1 - e) log sigmoid(b d) + e log sigmoid(-b d)] / (1 - 2 e), unbiased where a share e of the labels is
    flipped. Robust DPO, arXiv:2403.00409. Raises: ConfigError unless 0 <= e < 1/2."""
    if not 0 <= label_smoothing < 0.5:
        raise ConfigError(f"label_smoothing={label_smoothing}: expected a share of flipped labels under one half")
    logits = beta * (chosen - rejected)
    loss = -(1 - label_smoothing) * logsigmoid(logits) + label_smoothing * logsigmoid(-logits)
    return loss / (1 - 2 * label_smoothing)


def hinge(
    chosen: Float[Tensor, " pairs"], rejected: Float[Tensor, " pairs"], *, beta: float
) -> Float[Tensor, " pairs"]:
    """L = max(0, 1 - b d). SLiC, arXiv:2305.10425; RSO, arXiv:2309.06657."""
    return relu(1 - beta * (chosen - rejected))


def ipo(chosen: Float[Tensor, " pairs"], rejected: Float[Tensor, " pairs"], *, beta: float) -> Float[Tensor, " pairs"]:
    """L = (d - 1 / (2 b))^2. IPO, arXiv:2310.12036, eq. 17; implementations differ in dividing by the lengths."""
    return (chosen - rejected - 0.5 / beta).square()


def exo(
    chosen: Float[Tensor, " pairs"], rejected: Float[Tensor, " pairs"], *, beta: float, label_smoothing: float = 1e-3
) -> Float[Tensor, " pairs"]:
    """L = KL(sigmoid(b d) || 1 - e): the reverse KL of the policy's preference from the labels'. EXO,
    arXiv:2402.00856. Raises: ConfigError unless 0 < e < 1."""
    if not 0 < label_smoothing < 1:
        raise ConfigError(f"label_smoothing={label_smoothing}: EXO compares with labels between 0 and 1")
    logits = beta * (chosen - rejected)
    prefers = sigmoid(logits) * (logsigmoid(logits) - math.log1p(-label_smoothing))
    return prefers + sigmoid(-logits) * (logsigmoid(-logits) - math.log(label_smoothing))


def nca(chosen: Float[Tensor, " pairs"], rejected: Float[Tensor, " pairs"], *, beta: float) -> Float[Tensor, " pairs"]:
    """L = -log sigmoid(b c) - [log sigmoid(-b c) + log sigmoid(-b r)] / 2. NCA, arXiv:2402.05369."""
    return -logsigmoid(beta * chosen) - 0.5 * (logsigmoid(-beta * chosen) + logsigmoid(-beta * rejected))


def bco(
    chosen: Float[Tensor, " pairs"], rejected: Float[Tensor, " pairs"], *, beta: float, shift: float = 0.0
) -> Float[Tensor, " pairs"]:
    """L = -log sigmoid(b c - shift) - log sigmoid(shift - b r). BCO, arXiv:2404.04656; `shift` is its running
    mean of the rewards."""
    return -logsigmoid(beta * chosen - shift) - logsigmoid(shift - beta * rejected)


def sppo(chosen: Float[Tensor, " pairs"], rejected: Float[Tensor, " pairs"], *, beta: float) -> Float[Tensor, " pairs"]:
    """L = (c - 1 / (2 b))^2 + (r + 1 / (2 b))^2. SPPO with hard labels, arXiv:2405.00675."""
    return (chosen - 0.5 / beta).square() + (rejected + 0.5 / beta).square()


def apo_zero(
    chosen: Float[Tensor, " pairs"], rejected: Float[Tensor, " pairs"], *, beta: float
) -> Float[Tensor, " pairs"]:
    """L = 1 - sigmoid(b c) + sigmoid(b r): chosen up, rejected down. APO-zero, arXiv:2408.06266."""
    return sigmoid(-beta * chosen) + sigmoid(beta * rejected)


def apo_down(
    chosen: Float[Tensor, " pairs"], rejected: Float[Tensor, " pairs"], *, beta: float
) -> Float[Tensor, " pairs"]:
    """L = sigmoid(b c) + 1 - sigmoid(b d): both down, rejected further; for a policy that is better than the chosen
    responses. APO-down, arXiv:2408.06266."""
    return sigmoid(beta * chosen) + sigmoid(-beta * (chosen - rejected))


def discopop(
    chosen: Float[Tensor, " pairs"], rejected: Float[Tensor, " pairs"], *, beta: float, tau: float = 0.05
) -> Float[Tensor, " pairs"]:
    """L = -(1 - m) log sigmoid(l) + m exp(-l), l = b d, m = sigmoid(l / tau). DiscoPOP, arXiv:2406.08414."""
    logits = beta * (chosen - rejected)
    blend = sigmoid(logits / tau)
    # where the blend rounds to 0 the exponential may be infinite, and 0 inf is nan
    exponential = torch.where(blend > 0, blend * torch.exp(-logits.clamp(min=-80.0)), 0.0)
    return -(1 - blend) * logsigmoid(logits) + exponential
