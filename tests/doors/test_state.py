"""Tools with state: a model that has learnt to call them gets higher held-out rewards, which the state decides."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from rlite.rollout import ToolUseWorkflow
from rlite.rollout.registry import register_workflow
from rlite.rollout.tools.toolbox import Toolbox
from tests.doors.learning import HELD_OUT, ROWS, check_learning, imitating, tiny_model

TURNS, LETTERS = 2, "abde"
TEMPLATE = (  # as Llama 3.2's, but short
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function.name }} {% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.name }}("
    "{% for name, value in call.function.arguments.items() %}{{ name }}={{ value | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %})]{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Basket:
    """Letters of one episode."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.letters, self.row = "", row

    def prompt(self) -> str:
        return f"Put many e, {self.row['number']}."

    def put(self, letter: str) -> str:
        """Put a letter.

        Args:
            letter: the letter
        """
        self.letters += letter
        return f"{len(self.letters)} put"

    def report(self) -> dict[str, str]:
        return {"letters": self.letters}


def share_of_e(letters: str, **row: Any) -> float:
    return letters.count("e") / max(TURNS, len(letters))


@register_workflow("basket")
def basket(gconfig: Any, tokenizer: Any) -> ToolUseWorkflow:
    return ToolUseWorkflow([Basket.put], share_of_e, gconfig, tokenizer, max_turns=TURNS, state=Basket)


def demonstrations(num_rows: int) -> list[dict[str, Any]]:
    """Return conversations of a teacher who puts any letters."""
    draws, tools = random.Random(0), Toolbox([Basket.put], has_state=True).schemas
    rows: list[dict[str, Any]] = []
    for number in range(num_rows):
        state = Basket({"number": number})
        messages: list[dict[str, Any]] = [{"role": "user", "content": state.prompt()}]
        for _ in range(TURNS):
            function = {"name": "put", "arguments": {"letter": draws.choice(LETTERS)}}
            call = {"type": "function", "function": function}
            result = state.put(**function["arguments"])  # type: ignore[arg-type]
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": result},
            ]
        rows.append({"messages": messages[:-1], "tools": tools})
    return rows


@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_held_out_rewards_of_tools_with_state_rise(tmp_path: Path) -> None:
    model = imitating(tiny_model(tmp_path, TEMPLATE), demonstrations(256))
    check_learning(tmp_path, model, ROWS, HELD_OUT, lr=5e-4, max_new_tokens=24, workflow="basket")
