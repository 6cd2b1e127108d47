"""GRPO on an agent that speaks OpenAI's chats, with two sub-agents side by side. Every branch is trained on.

python examples/contracts/chat_agent.py
"""

import asyncio

import rlite
from rlite.rollout.openai import AgentWorkflow
from rlite.rollout.registry import register_workflow


async def agent(client, row):  # client: an openai.AsyncOpenAI, for any framework that takes one
    async def ask(text):
        messages = [{"role": "user", "content": text}]
        return (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message.content

    opinions = await asyncio.gather(ask(row["question"]), ask(f"{row['question']} Be brief."))
    return float(row["answer"] in await ask(f"{row['question']} Opinions: {opinions}"))


@register_workflow("chat_agent")
def chat_agent(gconfig, tokenizer):
    return AgentWorkflow(agent, gconfig, tokenizer)


if __name__ == "__main__":
    rows = [{"question": f"{a} + 17?", "answer": str(a + 17)} for a in range(100)]
    rlite.train("grpo", model="Qwen/Qwen3-0.6B", data=rows, rollout={"workflow": "chat_agent"})
