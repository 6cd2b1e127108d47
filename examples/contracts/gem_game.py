"""GRPO in a game of GEM. `env_options` of a row are arguments of `make`.

pip install gem-llm
python examples/contracts/gem_game.py
"""


def make(name="game:GuessTheNumber-v0-easy", **options):  # runs in the environment's process
    import gem

    return gem.make(name, **options)


if __name__ == "__main__":
    import rlite

    rows = [{"seed": seed, "env_options": {"max_turns": 6}} for seed in range(1000)]
    rlite.train("grpo", model="Qwen/Qwen3-0.6B", data=rows, rollout={"env_path": __file__, "max_turns": 6})
