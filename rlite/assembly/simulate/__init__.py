"""`rlite simulate`: the scheduling of asynchronous rollouts in virtual time, from a run's record or distributions."""
