"""Self-play: two seats of one policy; each wants the larger number, and equal numbers lose for both.

    rlite env check examples/environments/self_play.py:bids
    rlite ppo --import examples/environments/self_play.py rollout.workflow=bids actor.model_name=MODEL \
        train_data.path=rows.jsonl
"""

from rlite.rollout import SeatsWorkflow
from rlite.rollout.registry import register_workflow


def number(text):
    return int(text.strip()) if text and text.strip().isdecimal() else -1


async def play(seats, data):
    left, right = [number(await seats[name].say("Write a number from 0 to 9.")) for name in ("left", "right")]
    if max(left, right) > 9 or left == right:
        return {"left": -1.0, "right": -1.0}
    return {"left": float(left > right), "right": float(right > left)}


@register_workflow("bids")
def bids(gconfig, tokenizer):
    return SeatsWorkflow(play, {"left": "policy", "right": "policy"}, gconfig, tokenizer)
