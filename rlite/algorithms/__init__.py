"""Compute log-probabilities, advantages, KL, losses and preferences, and their reduction, by pure functions on tensors.

The functions know no config, logger or rank. Per-token tensors come in two layouts. Packed is `[T]` with
`cu_seqlens [N + 1]`, in which sequence i is `x[cu_seqlens[i]:cu_seqlens[i + 1]]`. Padded is `[B, L]` without
`cu_seqlens`. Losses are per token; `aggregate` makes the scalar. If the batch is split, it uses the counts of the whole
batch.
"""

from rlite.algorithms.advantages import (
    ADVANTAGES,
    AdvantageFunction,
    check_advantage,
    discounted_returns,
    gae,
    gdpo_advantages,
    gpg_advantages,
    group_advantages,
    is_of_group_alone,
    last_action_rewards,
    masked_whiten,
    normalize_rewards,
    opo_advantages,
    optimal_token_advantages,
    outcome_advantages,
    pass_at_k_advantages,
    register_advantage,
    reinforce_pp_advantages,
    remax_advantages,
    rloo_advantages,
)
from rlite.algorithms.corrections import (
    BehaviourWeights,
    behaviour_weights,
    check_rejection,
    importance_weights,
    interpolated_proximal,
    off_policy_metrics,
    off_policy_sequence_mask,
    rejection_mask,
    weight_metrics,
)
from rlite.algorithms.kl import KL_ESTIMATORS, adaptive_kl_coef, binary_divergence, kl_penalty, kl_shaped_rewards
from rlite.algorithms.logprobs import (
    entropy,
    gather_logprobs,
    gather_logprobs_entropy,
    next_token,
    previous_token,
    sum_pi_squared,
)
from rlite.algorithms.on_logprobs import OnLogprobs, TokenLogprobs, on_logprobs
from rlite.algorithms.policy_losses import (
    POLICY_LOSSES,
    SELECTIONS,
    LossInputs,
    PolicyLossFunction,
    TokenLoss,
    WeightedTokenLoss,
    check_policy_loss,
    cispo,
    clip_cov,
    clipped_surrogate,
    decoupled_ppo,
    dppo,
    dro,
    gmpo,
    gspo,
    is_selective,
    kl_cov,
    m2po,
    policy_loss,
    ppo_clip,
    register_policy_loss,
    reinforce,
    sapo,
    second_moment_mask,
    select_tokens,
    vespo,
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
    sequence_log_ratio,
    sequence_means,
    sequence_sums,
    to_tokens,
)
from rlite.algorithms.schedules import Schedule, lr_factor
from rlite.algorithms.sft import cross_entropy
from rlite.algorithms.value import value_loss
