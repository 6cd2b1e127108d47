"""Countdown: combine all the numbers, each once, with + - * / into an expression that has the value of the target.

    rlite ppo actor.model_name=MODEL rollout.env_path=examples/environments/countdown.py train_data.path=rows.jsonl

A row has a prompt or messages, and extra_info: {"numbers": [3, 5, 9], "target": 17}. The last
<answer>3 + 5 + 9</answer> counts. It is worth 1 if it is right, and 0.1 if it is there and wrong, as in TinyZero.
`recipes/countdown` prepares such rows.
"""

import ast
import operator
import re
from fractions import Fraction

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
MAX_CHARACTERS = 200
"""characters of an expression that are read"""


def value_of(node):
    """The exact value of an expression of whole numbers and the four operators; anything else is a ValueError."""
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return Fraction(number)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value_of(left), value_of(right))
    raise ValueError(f"not arithmetic: {ast.unparse(node)}")


def is_solution(expression, numbers, target):
    try:
        tree = ast.parse(expression.strip()[:MAX_CHARACTERS], mode="eval")
        value = value_of(tree.body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False
    used = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return value == target and sorted(used) == sorted(numbers)


async def step(state, action, extra_info):
    answers = re.findall(r"<answer>(.*?)</answer>", action, re.DOTALL)
    is_right = bool(answers) and is_solution(answers[-1], extra_info["numbers"], extra_info["target"])
    reward = 1.0 if is_right else 0.1 * bool(answers)
    return {"next_state": None, "reward": reward, "score": float(is_right), "done": True, "extra_info": extra_info}
