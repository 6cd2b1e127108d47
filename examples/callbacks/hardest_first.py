"""A sampler of prompts of your own: asks the rows with the lowest reward so far, new rows first.

rlite ppo --import examples/callbacks/hardest_first.py train_data.sampler.name=hardest_first ...
"""

from rlite.trainer.sampling import PromptSampler, register_sampler


@register_sampler("hardest_first")
class HardestFirst(PromptSampler):
    def __init__(self, *, unseen: float = -1.0):
        self.rewards, self.unseen = {}, unseen

    def choose(self, count):
        return sorted(range(len(self.rows)), key=lambda n: self.rewards.get(n, self.unseen))[:count]

    def observe(self, result):
        self.rewards[result.number] = result.mean

    def state_dict(self):
        return {"rewards": list(self.rewards.items())}

    def load_state_dict(self, state):
        self.rewards = dict(map(tuple, state["rewards"]))
