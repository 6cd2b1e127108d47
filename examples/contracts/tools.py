"""GRPO on a model that may call functions: `python examples/contracts/tools.py`."""

import rlite
from rlite.rollout import ToolUseWorkflow
from rlite.rollout.registry import register_workflow


def square(number: int) -> int:
    """Multiply a number with itself.

    Args:
        number: what to multiply
    """
    return number * number


def correct(prompt, completions, answer, **row):
    return float(answer in completions)


@register_workflow("calculator")
def calculator(gconfig, tokenizer):
    return ToolUseWorkflow([square], correct, gconfig, tokenizer, max_turns=4, tool_timeout=5)


if __name__ == "__main__":
    rows = [{"prompt": [{"role": "user", "content": f"{a} squared?"}], "answer": str(a * a)} for a in range(40, 99)]
    rlite.train("grpo", model="Qwen/Qwen3-0.6B", data=rows, rollout={"workflow": "calculator"})
