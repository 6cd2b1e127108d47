"""Reward functions of other libraries, called by their own trainers and by us."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from rlite.rollout import RewardFunction, from_trl, from_verl

Peer = Callable[[str], ModuleType]

COMPLETIONS = [
    "<think>\n2 and 2\n</think>\nThe answer is #### 4",
    "<think>\n2 and 2\n</think>\nThe answer is #### 5",
    "no thought, #### 4",
    "no thought and no answer " * 20,
]


def rows(**columns: Any) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": "2+2="}]
    return [
        {
            "prompt": "2+2=",
            "completions": text,
            "prompt_ids": [1],
            "completion_ids": list(range(len(text))),
            "messages": messages,
            **columns,
        }
        for text in COMPLETIONS
    ]


def test_sum_of_trl_functions_equals_its_trainer(peer: Peer) -> None:
    theirs = peer("trl.rewards")
    trainer = peer("trl.trainer.grpo_trainer").GRPOTrainer

    def if_answered(completions: list, answer: list, log_metric: Any, **columns: Any) -> list[float | None]:
        log_metric("answered", 1.0)
        return [
            float(text[-1]["content"].endswith(own)) if "####" in text[-1]["content"] else None
            for text, own in zip(completions, answer, strict=True)
        ]

    functions = [theirs.think_format_reward, theirs.get_soft_overlong_punishment(60, 30), if_answered]
    weights = [1.0, 0.5, 2.0]
    mine = rows(answer="4")
    itself = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", gather=lambda value: value, is_main_process=False),
        args=SimpleNamespace(report_to=[]),
        reward_funcs=functions,
        reward_processing_classes=[None] * len(functions),
        reward_func_names=["thought", "length", "answer"],
        environments=None,
        state=SimpleNamespace(global_step=0),
        _log_completion_extra=lambda *args: None,
        _log_metric=lambda *args: None,
    )
    by_function = trainer._calculate_rewards(
        itself,
        [{"prompt": row["messages"], "answer": row["answer"]} for row in mine],
        [row["messages"] for row in mine],
        [[{"role": "assistant", "content": row["completions"]}] for row in mine],
        [row["completion_ids"] for row in mine],
    )
    expected = (by_function * torch.tensor(weights)).nansum(1).tolist()
    assert len(set(expected)) > 2

    reward = RewardFunction(from_trl(functions, is_conversational=True, weights=weights), in_process=True)
    assert torch.allclose(torch.tensor([asyncio.run(reward(**row)) for row in mine]), torch.tensor(expected))
    assert torch.allclose(torch.tensor(asyncio.run(reward.batch(mine))), torch.tensor(expected))


def test_scores_equal_those_of_verls_own_function(peer: Peer) -> None:
    compute_score = peer("verl.utils.reward_score").default_compute_score
    reward = RewardFunction(from_verl(compute_score), in_process=True)
    for source, truth in (("openai/gsm8k", "4"), ("math_dapo", "4")):
        mine = rows(data_source=source, reward_model={"style": "rule", "ground_truth": truth})
        for row in mine:
            theirs = compute_score(source, row["completions"], truth, {})
            expected = theirs["score"] if isinstance(theirs, dict) else theirs
            assert asyncio.run(reward(**row)) == expected
    found = [asyncio.run(reward(**row)) for row in rows(data_source="openai/gsm8k", ground_truth="4")]
    assert found == [1.0, 0.0, 1.0, 0.0]
