"""Environments of other libraries, by the contracts that they speak; `rlite.rollout.contracts` has the public names."""
