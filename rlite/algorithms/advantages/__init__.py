"""Compute advantages of outcomes in a group (`group`, further ones in `outcomes`) and of tokens (`token`).

An estimator is a function `(rewards, group_ids, *, ...) -> advantages` of one number per sequence. Its keyword
parameters are its options. To add an estimator:

    @register_advantage("best_of_batch")
    def best_of_batch(rewards, group_ids, *, margin: float = 0.0):
        return rewards - rewards.max() + margin
"""
