"""The policy losses by name, and the one way to call any of them.

Every policy loss is a function `(logprobs, old_logprobs, advantages, *, ...) -> TokenLoss` of per-token tensors. By
naming them as keyword parameters it is given what it needs of the batch (`GIVEN`); its other keyword parameters are
options. A loss of your own:

    @register_policy_loss("squared")
    def squared(logprobs, old_logprobs, advantages, *, strength=1.0):
        return TokenLoss(-advantages * logprobs + strength * (logprobs - old_logprobs).square(), {})
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from rlite.algorithms.losses import TokenLoss, decoupled_ppo, ppo_clip, reinforce
from rlite.algorithms.registry import check_options, find, keyword_parameters, name_of, register
from rlite.algorithms.selective_losses import (
    clip_cov,
    draw_covariant,
    kl_cov,
    largest_covariances,
    m2po,
    near_behaviour,
)
from rlite.algorithms.sequence_losses import gmpo, gspo
from rlite.algorithms.weighted_losses import cispo, dppo, dro, sapo, vespo
from rlite.errors import ConfigError

PolicyLossFunction = Callable[..., TokenLoss]

GIVEN = ("mask", "cu_seqlens", "weights", "behaviour_logprobs", "selected")
"""what a policy loss may ask for by naming it; see `policy_loss`"""


def policy_loss(
    loss: str | PolicyLossFunction,
    logprobs: Float[Tensor, "*tokens"],
    old_logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    mask: Shaped[Tensor, "*tokens"],
    cu_seqlens: Int[Tensor, " sequences+1"] | None = None,
    weights: Float[Tensor, "*tokens"] | None = None,
    behaviour_logprobs: Float[Tensor, "*tokens"] | None = None,
    selected: Bool[Tensor, "*tokens"] | None = None,
    options: Mapping[str, Any] | None = None,
) -> TokenLoss:
    """The loss of every token, by a policy loss of `POLICY_LOSSES` or a function like them.

    Args:
        loss: a registered name or a function.
        logprobs: of the policy that is trained; carry the gradient.
        old_logprobs: of the policy that the ratio is taken against.
        advantages: of each token.
        mask: 1 for the tokens that count.
        cu_seqlens: where the sequences begin, in a pack.
        weights: importance weights of the old policy over the one that sampled. A loss that does not name them, nor
            `behaviour_logprobs`, from which it makes its own, is multiplied by them.
        behaviour_logprobs: of the policy that sampled.
        selected: what `select_tokens` chose over the whole batch, of which this is a part.
        options: of the loss.

    Raises: ConfigError for an unknown name, UnknownOptionError for an unknown option; `check_policy_loss` asks before.
    """
    function = check_policy_loss(loss, options or {})
    batch = {
        "mask": mask,
        "cu_seqlens": cu_seqlens,
        "weights": weights,
        "behaviour_logprobs": behaviour_logprobs,
        "selected": selected,
    }
    asked = keyword_parameters(function)
    given = {name: value for name, value in batch.items() if name in asked}
    if missing := [k for k, value in given.items() if value is None and asked[k].default is inspect.Parameter.empty]:
        raise ConfigError(f"policy loss {name_of(POLICY_LOSSES, function)} needs {', '.join(missing)}")
    value, metrics = function(logprobs, old_logprobs, advantages, **given, **(options or {}))
    if weights is not None and not {"weights", "behaviour_logprobs"} & set(given):
        value = value * weights.detach()
    return TokenLoss(value, metrics)


def select_tokens(
    loss: str | PolicyLossFunction,
    logprobs: Float[Tensor, "*tokens"],
    old_logprobs: Float[Tensor, "*tokens"],
    advantages: Float[Tensor, "*tokens"],
    *,
    mask: Shaped[Tensor, "*tokens"],
    behaviour_logprobs: Float[Tensor, "*tokens"] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Bool[Tensor, "*tokens"]:
    """Return the tokens that a loss of `SELECTIONS` treats apart, chosen by a statistic over all that it is given.

    The arguments are those of `policy_loss`, of the whole batch in any layout. A loss that gets the result as
    `selected` gives the same, whatever parts the batch is split into.
    """
    select = SELECTIONS[name_of(POLICY_LOSSES, check_policy_loss(loss, options or {}))]
    asked = keyword_parameters(select)
    given = {"behaviour_logprobs": behaviour_logprobs, **(options or {})}
    own = {name: value for name, value in given.items() if name in asked}
    return select(logprobs, old_logprobs, advantages, mask=mask, **own)


def is_selective(loss: str | PolicyLossFunction) -> bool:
    """Return whether a loss treats tokens apart that `select_tokens` chooses."""
    return name_of(POLICY_LOSSES, find(POLICY_LOSSES, loss, "policy loss")) in SELECTIONS


def check_policy_loss(loss: str | PolicyLossFunction, options: Mapping[str, Any]) -> PolicyLossFunction:
    """The function of that name. Raises: ConfigError for an unknown name, or an option's value of another kind than
    annotated; UnknownOptionError for an unknown option."""
    function = find(POLICY_LOSSES, loss, "policy loss")
    check_options(function, options, f"policy loss {name_of(POLICY_LOSSES, function)}", reserved=GIVEN)
    return function


def register_policy_loss(name: str) -> Callable[[PolicyLossFunction], PolicyLossFunction]:
    """A decorator that makes a function a policy loss of that name. Raises: ConfigError if the name is taken."""
    return register(POLICY_LOSSES, name)


def _reinforce(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, weights: Tensor | None = None
) -> TokenLoss:
    return reinforce(logprobs, advantages, weights=weights)


POLICY_LOSSES: dict[str, PolicyLossFunction] = {
    "cispo": cispo,
    "clip_cov": clip_cov,
    "decoupled_ppo": decoupled_ppo,
    "dppo": dppo,
    "dro": dro,
    "gmpo": gmpo,
    "gspo": gspo,
    "kl_cov": kl_cov,
    "m2po": m2po,
    "ppo_clip": ppo_clip,
    "reinforce": _reinforce,
    "sapo": sapo,
    "vespo": vespo,
}

SELECTIONS: dict[str, Callable[..., Tensor]] = {
    "clip_cov": draw_covariant,
    "kl_cov": largest_covariances,
    "m2po": near_behaviour,
}
"""what chooses the tokens that a loss treats apart, by the loss's name; see `select_tokens`"""
