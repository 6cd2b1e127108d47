from functools import partial

import torch
from tensordict import TensorDict

from rlite.trainer.rl.filtering import VariedGroups, replace_uniform_groups
from rlite.trainer.rl.rollouts import Generated


def group(number, rewards, num_rows=1):
    """A group whose trajectories have `num_rows` sequences each."""
    count = len(rewards) * num_rows
    return TensorDict(
        {
            "input_ids": torch.full((count, 3), number),
            "attention_mask": torch.ones(count, 3, dtype=torch.bool),
            "rewards": torch.tensor(rewards).repeat_interleave(num_rows),
            "sequence_index": torch.arange(num_rows).repeat(len(rewards)),
            "group_ids": torch.full((count,), number),
        },
        batch_size=[count],
    )


class Stream:
    """Generates the groups that it was given, and remembers how many were asked for."""

    def __init__(self, *groups):
        self.groups, self.asked = list(groups), []

    def __call__(self, count):
        self.asked.append(count)
        taken, self.groups = self.groups[:count], self.groups[count:]
        return torch.cat(taken)


def test_groups_of_equal_rewards_are_replaced_until_the_batch_is_full():
    first = torch.cat([group(0, [0.0, 0.0]), group(1, [0.0, 1.0], num_rows=2), group(2, [0.7, 0.7])])
    more = Stream(group(3, [1.0, 1.0]), group(4, [1.0, 0.0]), group(5, [0.0, 1.0]))
    batch = replace_uniform_groups(first, 3, more, max_rounds=4)
    assert more.asked == [2, 1]
    assert batch["group_ids"].tolist() == [1, 1, 1, 1, 4, 4, 5, 5]
    assert batch["input_ids"][:, 0].tolist() == [1, 1, 1, 1, 4, 4, 5, 5]


def test_a_batch_that_cannot_be_filled_keeps_its_size():
    first = torch.cat([group(0, [0.0, 0.0]), group(1, [0.0, 1.0]), group(2, [0.0, 0.0])])
    more = Stream(group(3, [0.0, 0.0]), group(4, [0.0, 0.0]), group(5, [0.0, 0.0]))
    batch = replace_uniform_groups(first, 3, more, max_rounds=1)
    assert more.asked == [2]
    assert batch["group_ids"].tolist() == [1, 1, 0, 0, 2, 2]
    alone = replace_uniform_groups(group(0, [0.0, 0.0]), 1, more, max_rounds=0)
    assert alone["group_ids"].tolist() == [0, 0], "and one of nothing else is not empty"


def test_groups_that_were_lost_are_replaced_too():
    more = Stream(group(1, [0.0, 1.0]))
    batch = replace_uniform_groups(group(0, [0.0, 1.0]), 2, more, max_rounds=1)
    assert batch["group_ids"].tolist() == [0, 0, 1, 1]


def test_further_groups_that_are_lost_or_unlike_the_others_cost_themselves_alone():
    odd = group(1, [0.0, 1.0])
    odd["scores"] = odd["rewards"]
    answers = iter([None, odd, group(2, [0.0, 1.0])])
    batch = replace_uniform_groups(group(0, [0.0, 1.0]), 2, lambda count: next(answers), max_rounds=4)
    assert batch["group_ids"].tolist() == [0, 0, 2, 2]


def test_groups_that_teach_nothing_are_refused_until_that_has_cost_enough() -> None:
    group = TensorDict({"rewards": torch.ones(3), "loss_mask": torch.ones(3, 2)}, batch_size=[3])
    accept = VariedGroups(budget=2, refused=partial((generated := Generated()).add, is_one_group=True))
    assert [accept(group) for _ in range(4)] == [False, False, True, True]
    assert accept.next_batch() == 2
    found = generated.metrics()
    assert (found["reward"], found["uniform_groups"]) == (1.0, 1.0), "and count among what was generated"
    assert not accept(group)
    group["rewards"][0] = 0
    assert accept(group)
