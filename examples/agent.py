"""GRPO on an agent: ordinary code for OpenAI's client, whose every answer is trained on.

    pip install "rlite[agents]"
    python examples/agent.py [STEPS]

The agent asks, looks at the answer, asks again, and returns what the conversation was worth.
"""

import sys

import rlite
from rlite.assembly.quickstart.run import build_tiny_qwen3, byte_tokenizer
from rlite.rollout.openai import AgentWorkflow
from rlite.trainer.options import TrainerOptions
from rlite.trainer.ppo import PpoTrainer
from rlite.trainer.rl.options import ActorOptions, PpoConfig, PromptOptions
from rlite.types import GenerationHyperparameters


def digits(text):
    """Share of digits."""
    return sum(character.isdigit() for character in text) / max(len(text), 1)


async def agent(client, data):
    """`client` is an `openai.AsyncOpenAI`: hand it to any framework that takes one."""
    messages = [{"role": "user", "content": data["prompt"]}]
    first = await client.chat.completions.create(model="policy", messages=messages)
    messages += [first.choices[0].message, {"role": "user", "content": "Numbers only!"}]
    second = await client.chat.completions.create(model="policy", messages=messages)
    client.set_reward(first.id, digits(first.choices[0].message.content) / 2)
    client.set_reward(second.id, digits(second.choices[0].message.content) / 2)


def main(steps: int) -> None:
    rlite.init(num_devices=1)
    model = str(build_tiny_qwen3("runs/example-agent/model", seed=0))
    rows = [{"prompt": f"{a}+{b}="} for a in range(10) for b in range(10)]
    workflow = AgentWorkflow(agent, GenerationHyperparameters(max_new_tokens=12), byte_tokenizer())
    options = PpoConfig(
        actor=ActorOptions(model_name=model, lr=3e-3),
        train_data=PromptOptions(prompts_per_rollout=8, responses_per_prompt=8),
        trainer=TrainerOptions(save_dir="runs/example-agent/run", total_steps=steps),
    )
    print(PpoTrainer(options, workflow, rows).fit())
    rlite.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
