"""GRPO on an agent that speaks Anthropic's Messages, such as a program that reads ANTHROPIC_BASE_URL.

pip install "rlite[agents]" anthropic
python examples/contracts/messages_agent.py
"""

import anthropic

import rlite
from rlite.rollout.openai import AgentWorkflow
from rlite.rollout.registry import register_workflow


async def agent(access, row):  # access.root is the address without /v1
    messages = [{"role": "user", "content": row["question"]}]
    async with anthropic.AsyncAnthropic(base_url=access.root, api_key=access.api_key) as client:
        message = await client.messages.create(model=access.model, messages=messages, max_tokens=256)
        return float(row["answer"] in "".join(block.text for block in message.content if block.type == "text"))


@register_workflow("messages_agent")
def messages_agent(gconfig, tokenizer):
    return AgentWorkflow(agent, gconfig, tokenizer, interface="http")


if __name__ == "__main__":
    rows = [{"question": f"{a} + 17?", "answer": str(a + 17)} for a in range(100)]
    rlite.train("grpo", model="Qwen/Qwen3-0.6B", data=rows, rollout={"workflow": "messages_agent"})
