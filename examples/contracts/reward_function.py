"""GRPO on a function that rewards an answer. Its names are those of the row's columns.

rlite grpo actor.model_name=MODEL train_data.path=sums.jsonl reward.path=examples/contracts/reward_function.py:correct
python examples/contracts/reward_function.py
"""

import rlite


def correct(prompt, completions, prompt_ids, completion_ids, answer, **row):
    return float(completions.strip().startswith(answer))


if __name__ == "__main__":
    rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(20) for b in range(20)]
    rlite.train("grpo", model="Qwen/Qwen3-0.6B", data=rows, reward=correct)
