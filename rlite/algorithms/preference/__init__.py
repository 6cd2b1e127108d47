"""Compute losses over pairs of a chosen and a rejected response, and over single responses.

Pairs: `dpo`, `orpo`, `simpo` and `reward_model`; single responses: `kto`. `base` calls any loss of the DPO family. To
add a loss:

    @register_preference_loss("squared_margin")
    def squared_margin(chosen, rejected, *, beta, target: float = 1.0):
        return (beta * (chosen - rejected) - target).square()
"""
