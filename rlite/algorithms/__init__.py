"""Compute log-probabilities, advantages, KL, losses and preferences, and their reduction, by pure functions on tensors.

The functions know no config, logger or rank. Per-token tensors come in two layouts. Packed is `[T]` with
`cu_seqlens [N + 1]`, in which sequence i is `x[cu_seqlens[i]:cu_seqlens[i + 1]]`. Padded is `[B, L]` without
`cu_seqlens`. Losses are per token; `aggregate` makes the scalar. If the batch is split, it uses the counts of the whole
batch.
"""

from rlite.algorithms.advantages.credit import (
    CREDITS,
    Branch,
    CreditRule,
    credit_by_branches,
    credit_by_tokens,
    register_credit,
)
from rlite.algorithms.advantages.group import (
    ADVANTAGES,
    AdvantageFunction,
    last_action_rewards,
    normalize_rewards,
    outcome_advantages,
    register_advantage,
)
from rlite.algorithms.advantages.outcomes import (
    gdpo_advantages,
    gpg_advantages,
    group_advantages,
    is_of_group_alone,
    opo_advantages,
    pass_at_k_advantages,
    remax_advantages,
    rloo_advantages,
)
from rlite.algorithms.advantages.token import (
    discounted_returns,
    gae,
    kl_shaped_rewards,
    masked_whiten,
    optimal_token_advantages,
    reinforce_pp_advantages,
)
from rlite.algorithms.logits import entropy, gather_logprobs, gather_logprobs_entropy, sum_pi_squared
from rlite.algorithms.logprobs import (
    OnLogprobs,
    TokenLogprobs,
    importance_weights,
    kl_penalty,
    next_token,
    previous_token,
)
from rlite.algorithms.off_policy import (
    BehaviourWeights,
    behaviour_weights,
    binary_divergence,
    check_rejection,
    interpolated_proximal,
    off_policy_metrics,
    off_policy_sequence_mask,
    rejection_mask,
    weight_metrics,
)
from rlite.algorithms.policy_losses.base import (
    POLICY_LOSSES,
    SELECTIONS,
    LossInputs,
    PolicyLossFunction,
    WeightedTokenLoss,
    policy_loss,
    register_policy_loss,
)
from rlite.algorithms.policy_losses.cispo import cispo
from rlite.algorithms.policy_losses.clip_cov import clip_cov
from rlite.algorithms.policy_losses.decoupled_ppo import decoupled_ppo
from rlite.algorithms.policy_losses.dppo import dppo
from rlite.algorithms.policy_losses.dro import dro
from rlite.algorithms.policy_losses.gmpo import gmpo
from rlite.algorithms.policy_losses.gspo import gspo
from rlite.algorithms.policy_losses.kl_cov import kl_cov
from rlite.algorithms.policy_losses.m2po import m2po, second_moment_mask
from rlite.algorithms.policy_losses.ppo_clip import clipped_surrogate, ppo_clip
from rlite.algorithms.policy_losses.reinforce import reinforce
from rlite.algorithms.policy_losses.sapo import sapo
from rlite.algorithms.policy_losses.selection import is_selective, select_tokens
from rlite.algorithms.policy_losses.vespo import vespo
from rlite.algorithms.preference import (
    OF_PROBABILITIES,
    PREFERENCE_LOSSES,
    PairLoss,
    PreferenceLossFunction,
    ResponseLoss,
    aot_loss,
    desensitised_sums,
    kto_loss,
    kto_reference_point,
    orpo,
    preference_loss,
    register_preference_loss,
    reward_model_loss,
    simpo,
)
from rlite.algorithms.reduce import (
    Mean,
    PerToken,
    TokenLoss,
    aggregate,
    aggregation_weight,
    masked_mean,
    masked_variance,
    sequence_log_ratio,
    sequence_means,
    sequence_sums,
    to_tokens,
)
from rlite.algorithms.schedules import adaptive_kl_coef, lr_factor
from rlite.algorithms.token_losses import cross_entropy, on_logprobs, value_loss
