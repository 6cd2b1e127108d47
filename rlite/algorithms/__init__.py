"""Pure functions on tensors: log-probabilities, advantages, KL, losses, preferences and their reduction.

They know no config, logger or rank. Per-token arrays come in two layouts: packed `[T]` with `cu_seqlens [N + 1]`
(sequence i is `x[cu_seqlens[i]:cu_seqlens[i + 1]]`), or padded `[B, L]` without. Losses are per token; `aggregate`
makes the scalar, with counts of the whole batch where it is split.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlite import lazy

if TYPE_CHECKING:
    from rlite.algorithms.advantages import (
        discounted_returns,
        gae,
        group_advantages,
        masked_whiten,
        normalize_rewards,
        reinforce_pp_advantages,
        remax_advantages,
        rloo_advantages,
    )
    from rlite.algorithms.baselines import (
        gdpo_advantages,
        gpg_advantages,
        opo_advantages,
        optimal_token_advantages,
        pass_at_k_advantages,
    )
    from rlite.algorithms.estimators import (
        ADVANTAGES,
        AdvantageFunction,
        check_advantage,
        outcome_advantages,
        register_advantage,
    )
    from rlite.algorithms.importance import (
        BehaviourWeights,
        behaviour_weights,
        importance_weights,
        interpolated_proximal,
    )
    from rlite.algorithms.kl import KL_ESTIMATORS, binary_divergence, kl_penalty
    from rlite.algorithms.logprobs import (
        entropy,
        gather_logprobs,
        gather_logprobs_entropy,
        next_token,
        previous_token,
        sum_pi_squared,
    )
    from rlite.algorithms.losses import (
        TokenLoss,
        clipped_surrogate,
        cross_entropy,
        decoupled_ppo,
        ppo_clip,
        reinforce,
        sequence_log_ratio,
        value_loss,
    )
    from rlite.algorithms.off_policy import (
        off_policy_metrics,
        rejection_mask,
        weight_metrics,
    )
    from rlite.algorithms.policy_losses import (
        POLICY_LOSSES,
        SELECTIONS,
        PolicyLossFunction,
        check_policy_loss,
        is_selective,
        policy_loss,
        register_policy_loss,
        select_tokens,
    )
    from rlite.algorithms.preference import (
        PREFERENCE_LOSSES,
        PairLoss,
        PreferenceLossFunction,
        ResponseLoss,
        aot_loss,
        check_preference_loss,
        desensitised_sums,
        dpo_sigmoid,
        kto_loss,
        kto_reference_point,
        preference_loss,
        register_preference_loss,
        reward_model_loss,
    )
    from rlite.algorithms.reduce import (
        Mean,
        aggregate,
        aggregation_weight,
        masked_mean,
        masked_variance,
        sequence_means,
        sequence_sums,
        to_tokens,
    )
    from rlite.algorithms.rewards import (
        adaptive_kl_coef,
        kl_shaped_rewards,
        last_action_rewards,
    )
    from rlite.algorithms.schedules import (
        Schedule,
        lr_factor,
    )
    from rlite.algorithms.selective_losses import clip_cov, kl_cov, m2po, second_moment_mask
    from rlite.algorithms.sequence_losses import gmpo, gspo, off_policy_sequence_mask
    from rlite.algorithms.token_logprobs import OnLogprobs, TokenLogprobs, on_logprobs
    from rlite.algorithms.weighted_losses import cispo, dppo, dro, sapo, vespo

__all__, __getattr__, __dir__ = lazy.exports(
    __name__,
    {
        "rlite.algorithms.advantages": (
            "discounted_returns gae group_advantages masked_whiten normalize_rewards reinforce_pp_advantages "
            "remax_advantages rloo_advantages"
        ),
        "rlite.algorithms.baselines": (
            "gdpo_advantages gpg_advantages opo_advantages optimal_token_advantages pass_at_k_advantages"
        ),
        "rlite.algorithms.estimators": (
            "ADVANTAGES AdvantageFunction check_advantage outcome_advantages register_advantage"
        ),
        "rlite.algorithms.importance": "BehaviourWeights behaviour_weights importance_weights interpolated_proximal",
        "rlite.algorithms.kl": "KL_ESTIMATORS binary_divergence kl_penalty",
        "rlite.algorithms.logprobs": (
            "entropy gather_logprobs gather_logprobs_entropy next_token previous_token sum_pi_squared"
        ),
        "rlite.algorithms.losses": (
            "TokenLoss clipped_surrogate cross_entropy decoupled_ppo ppo_clip reinforce sequence_log_ratio value_loss"
        ),
        "rlite.algorithms.off_policy": "off_policy_metrics rejection_mask weight_metrics",
        "rlite.algorithms.policy_losses": (
            "POLICY_LOSSES SELECTIONS PolicyLossFunction check_policy_loss is_selective policy_loss "
            "register_policy_loss select_tokens"
        ),
        "rlite.algorithms.preference": (
            "PREFERENCE_LOSSES PairLoss PreferenceLossFunction ResponseLoss aot_loss check_preference_loss "
            "desensitised_sums dpo_sigmoid kto_loss kto_reference_point preference_loss register_preference_loss "
            "reward_model_loss"
        ),
        "rlite.algorithms.reduce": (
            "Mean aggregate aggregation_weight masked_mean masked_variance sequence_means sequence_sums to_tokens"
        ),
        "rlite.algorithms.rewards": "adaptive_kl_coef kl_shaped_rewards last_action_rewards",
        "rlite.algorithms.schedules": "Schedule lr_factor",
        "rlite.algorithms.selective_losses": "clip_cov kl_cov m2po second_moment_mask",
        "rlite.algorithms.sequence_losses": "gmpo gspo off_policy_sequence_mask",
        "rlite.algorithms.token_logprobs": "OnLogprobs TokenLogprobs on_logprobs",
        "rlite.algorithms.weighted_losses": "cispo dppo dro sapo vespo",
    },
)
