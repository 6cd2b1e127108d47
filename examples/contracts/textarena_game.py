"""GRPO in a game of TextArena for one player. Ids that end with `-raw` do not repeat the game in each turn.

pip install textarena
python examples/contracts/textarena_game.py
"""


def make(name="GuessTheNumber-v0-raw"):  # runs in the environment's process
    import textarena

    return textarena.make(name)


if __name__ == "__main__":
    import rlite

    rows = [{"seed": seed} for seed in range(1000)]
    rlite.train("grpo", model="Qwen/Qwen3-0.6B", data=rows, rollout={"env_path": __file__, "max_turns": 10})
