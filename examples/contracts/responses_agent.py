"""GRPO on an agent that speaks OpenAI's Responses.

pip install "rlite[agents]"
python examples/contracts/responses_agent.py
"""

import openai

import rlite
from rlite.rollout.openai import AgentWorkflow
from rlite.rollout.registry import register_workflow


async def agent(access, row):  # access: the address and the key of this episode
    async with openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key) as client:
        response = await client.responses.create(model=access.model, input=row["question"])
        return float(row["answer"] in response.output_text)


@register_workflow("responses_agent")
def responses_agent(gconfig, tokenizer):
    return AgentWorkflow(agent, gconfig, tokenizer, interface="http")


if __name__ == "__main__":
    rows = [{"question": f"{a} + 17?", "answer": str(a + 17)} for a in range(100)]
    rlite.train("grpo", model="Qwen/Qwen3-0.6B", data=rows, rollout={"workflow": "responses_agent"})
