"""GRPO on a taskset of verifiers (0.4 or newer), unmodified. The harness `null` needs `uv`.

pip install "rlite[agents]" "verifiers>=0.4" uv
python examples/contracts/verifiers_words.py
"""

import verifiers.v1 as vf

import rlite

__all__ = ["Words"]


class WordTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def short(self, trace: vf.Trace) -> float:
        return float(0 < len(trace.last_reply) < 40)


class Words(vf.Taskset[WordTask]):
    def load(self):
        for word in ("tree", "river", "cloud"):
            yield WordTask(vf.TaskData(prompt=f"Describe a {word} in five words."), self.config.task)


if __name__ == "__main__":
    config = {"agent": {"harness": {"id": "null"}}, "renderer": {"name": "qwen3"}}
    rollout = {"env_path": f"verifiers:{__file__}", "env_config": config, "env_timeout": 600}
    rlite.train("grpo", model="Qwen/Qwen3-0.6B", data=[{"task": place} for place in range(3)], rollout=rollout)
