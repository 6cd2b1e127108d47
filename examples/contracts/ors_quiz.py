"""GRPO on a server of the Open Reward Standard. The server runs in an environment with the package openreward.

python examples/contracts/ors_quiz.py serve & python examples/contracts/ors_quiz.py http://localhost:8080
"""

import sys

if sys.argv[1] != "serve":
    import rlite

    rows, rollout = [{"task": place} for place in range(100)], {"env_path": f"ors:{sys.argv[1]}", "max_turns": 4}
    rlite.train("grpo", model="Qwen/Qwen3-0.6B", data=rows, rollout=rollout)
else:
    from openreward.environments import Environment, Server, TextBlock, ToolOutput, tool
    from pydantic import create_model

    class Quiz(Environment):
        list_splits = classmethod(lambda cls: ["train"])
        list_tasks = classmethod(lambda cls, split: [{"a": a, "b": b} for a in range(10) for b in range(10)])

        def get_prompt(self):
            return [TextBlock(text=f"{self.task_spec['a']} + {self.task_spec['b']}? Call the tool with the sum.")]

        @tool
        def answer(self, params: create_model("Sum", sum=(int, ...))) -> ToolOutput:
            """Answer with the sum."""
            is_right = params.sum == self.task_spec["a"] + self.task_spec["b"]
            return ToolOutput(blocks=[TextBlock(text="thanks")], reward=float(is_right), finished=True)

    Server([Quiz]).run(port=8080)
