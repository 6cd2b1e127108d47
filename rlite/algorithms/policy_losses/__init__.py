"""Compute policy losses: one file per loss, named after it; `base` calls any of them.

A policy loss is a function of one `LossInputs`. Its keyword parameters are its options. To add a loss:

    @register_policy_loss("squared")
    def squared(inputs: LossInputs, *, strength: float = 1.0) -> TokenLoss:
        penalty = (inputs.logprobs - inputs.old_logprobs).square()
        return TokenLoss(strength * penalty - inputs.advantages * inputs.logprobs, metrics={})
"""
