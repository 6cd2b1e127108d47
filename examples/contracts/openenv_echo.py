"""GRPO on a server of OpenEnv, which a container or a Space may also run.

pip install "rlite[agents]" openenv, in another environment for the server
python -m uvicorn openenv_echo:app --port 8000 &
python examples/contracts/openenv_echo.py http://localhost:8000
"""

import sys

if __name__ == "__main__":
    import rlite

    rollout = {"env_path": f"openenv:{sys.argv[1]}", "max_turns": 1}
    rlite.train("grpo", model="Qwen/Qwen3-0.6B", data=[{"seed": seed} for seed in range(1000)], rollout=rollout)
else:
    from openenv.core.env_server import Action, Environment, Observation, State, create_app

    Say, Heard = type("Say", (Action,), {"__annotations__": {"message": str}}), Observation

    class Echo(Environment):
        SUPPORTS_CONCURRENT_SESSIONS, state = True, State()

        def reset(self, seed=None, episode_id=None, **options):
            return Heard(metadata={"task": "Answer with few words."})

        def step(self, action, timeout_s=None, **options):
            return Heard(reward=float(len(action.message) < 40), done=True)

    app = create_app(Echo, Say, Heard, max_concurrent_envs=256)
