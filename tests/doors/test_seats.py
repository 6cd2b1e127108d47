"""Several seats in one episode: the held-out rewards of each rise."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlite.rollout import SeatsWorkflow
from rlite.rollout.registry import register_workflow
from rlite.rollout.seats import Seat
from tests.doors.learning import HELD_OUT, ROWS, check_learning, imitating, share_of, tiny_model

SYSTEM = {"author": "Author: say many e.", "critic": "Critic: say many o."}


async def write_and_criticise(seats: Mapping[str, Seat], row: dict[str, Any]) -> dict[str, float]:
    text = await seats["author"].say(str(row["number"])) or ""
    verdict = await seats["critic"].say(text) or ""
    return {"author": share_of("e", text), "critic": share_of("o", verdict)}


@register_workflow("author_first")
def author_first(gconfig: Any, tokenizer: Any) -> SeatsWorkflow:
    seats: Any = {"author": "policy", "critic": "policy"}
    return SeatsWorkflow(write_and_criticise, seats, gconfig, tokenizer, system_prompts=SYSTEM)


@register_workflow("critic_first")
def critic_first(gconfig: Any, tokenizer: Any) -> SeatsWorkflow:
    """An evaluation scores the first seat."""
    seats: Any = {"critic": "policy", "author": "policy"}
    return SeatsWorkflow(write_and_criticise, seats, gconfig, tokenizer, system_prompts=SYSTEM)


def demonstrations(num_rows: int) -> list[dict[str, Any]]:
    """Return answers of a teacher who confuses the seats, so that neither seat begins with the other's habit."""
    draws = random.Random(0)
    said = ["".join(draws.choices("eo", k=8)) for _ in range(num_rows)]
    asked = [("author", str(number)) if number % 2 else ("critic", said[number - 1]) for number in range(num_rows)]
    return [
        {
            "messages": [
                {"role": "system", "content": SYSTEM[seat]},
                {"role": "user", "content": text},
                {"role": "assistant", "content": answer},
            ]
        }
        for (seat, text), answer in zip(asked, said, strict=True)
    ]


@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_held_out_rewards_of_both_seats_rise(tmp_path: Path) -> None:
    model = imitating(tiny_model(tmp_path), demonstrations(256))
    scored_as = ("author_first", "critic_first")
    check_learning(tmp_path, model, ROWS, HELD_OUT, lr=5e-4, workflow="author_first", scored_as=scored_as)
