"""The endpoint of agents, in OpenAI's interface; `rlite.rollout.openai` has its public names."""
