"""GRPO on a program that sends and reads tokens (`/inference/v1/generate`), in any language and with any renderer.

pip install "rlite[agents]"
python examples/contracts/tokens_agent.py
"""

import aiohttp

import rlite
from rlite.rollout.openai import AgentWorkflow
from rlite.rollout.registry import register_workflow


@register_workflow("tokens_agent")
def tokens_agent(gconfig, tokenizer):
    async def agent(access, row):
        body = {"token_ids": tokenizer(row["question"])["input_ids"], "sampling_params": {"max_tokens": 64}}
        headers = {"Authorization": f"Bearer {access.api_key}"}
        url = f"{access.root}/inference/v1/generate"
        async with aiohttp.request("POST", url, json=body, headers=headers, raise_for_status=True) as response:
            (choice,) = (await response.json())["choices"]
        return float(row["answer"] in tokenizer.decode(choice["token_ids"]))

    return AgentWorkflow(agent, gconfig, tokenizer, interface="http")


if __name__ == "__main__":
    rows = [{"question": f"{a} + 17 =", "answer": str(a + 17)} for a in range(100)]
    rlite.train("grpo", model="Qwen/Qwen3-0.6B", data=rows, rollout={"workflow": "tokens_agent"})
