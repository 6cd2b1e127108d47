"""Imports of optional packages stay in their places, and `import rlite` stays light."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ["torch", "ray", "vllm", "transformers", "tensordict"]

HOMES = {
    "ray": "rlite/runtime/cluster/ray/",
    "vllm": "rlite/backends/vllm/",
    "sglang": "rlite/backends/sglang/",
    "peft": "rlite/backends/models/lora.py",
    "liger_kernel": "rlite/backends/models/linear.py",
    "triton": ("rlite/backends/models/triton_head.py", "rlite/backends/embedded/triton_decode.py"),
    "lm_eval": "rlite/evaluation/lm_eval.py",
    "math_verify": "rlite/rollout/rewards/math.py",
    "aiohttp": (
        "rlite/services/endpoint/endpoint.py",
        "rlite/services/endpoint/connections.py",
        "rlite/services/environments/openenv.py",
        "rlite/services/environments/ors.py",
        "rlite/services/tinker/routes.py",
        "rlite/services/tinker/sampling_routes.py",
        "rlite/services/tinker/server.py",
        "rlite/services/tinker/training_routes.py",
        "rlite/services/tinker/weights_routes.py",
        "rlite/backends/serving/http.py",
        "rlite/backends/sglang/client.py",
        "rlite/rollout/rewards/llm_judge.py",
        "rlite/viewer/server.py",
    ),
    "tinker": "rlite/services/tinker/wire.py",
    "verifiers": "rlite/services/environments/verifiers_calls.py",
    "openai": "rlite/services/endpoint/client.py",
    "wandb": "rlite/services/console/sinks.py",
    "tensorboard": "rlite/services/console/sinks.py",
    "trackio": "rlite/services/console/sinks.py",
}
"""places that may import each optional package: everything else must work without it"""


@functools.cache
def imported_modules(path: Path) -> set[str]:
    """Dotted names of all modules that a file imports, at any depth of its code."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"import_module", "importlib.import_module"}:
            names |= {str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant)}
    return names


@pytest.mark.parametrize("package", HOMES)
def test_an_optional_package_is_imported_only_in_its_home(package: str) -> None:
    def imports_it(name: str) -> bool:
        return name.split(".")[0] == package or name.startswith(f"torch.utils.{package}")

    strangers = [
        relative
        for path in sorted((ROOT / "rlite").rglob("*.py"))
        if not (relative := path.relative_to(ROOT).as_posix()).startswith(HOMES[package])
        and any(map(imports_it, imported_modules(path)))
    ]
    assert strangers == [], f"{package} may be imported only in {HOMES[package]}"


def heavy_after(program: str) -> list[str]:
    """Heavy packages that a new Python process has imported after it ran a program, which may print."""
    program = f"import sys\n{program}\nprint('HEAVY', *[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.rpartition("HEAVY")[2].split()


@pytest.mark.parametrize("module", ["rlite", "rlite.types", "rlite.errors"])
def test_importing_the_public_surface_loads_nothing_heavy(module: str) -> None:
    assert heavy_after(f"import {module}\nassert 'pydantic' not in sys.modules") == []


def test_a_sandbox_process_loads_no_torch_for_what_it_runs() -> None:
    """Seconds and hundreds of megabytes for each process of a reward, an environment or a tool."""
    rewards = [path.stem for path in (ROOT / "rlite/rollout/rewards").glob("*.py")]
    in_the_program = {"__init__", "configured_rewards", "function", "groups", "judges", "models", "options", "weighted"}
    modules = [f"rlite.rollout.rewards.{name}" for name in rewards if name not in in_the_program]
    modules += [f"rlite.rollout.environments.{name}" for name in ("file", "gym_calls", "trl_calls", "trl_schemas")]
    modules += ["rlite.rollout.tools.response_template", "rlite.services.environments.verifiers_calls"]
    assert len(modules) >= 14
    checks = [f"import {name}\nassert 'torch' not in sys.modules, {name!r}" for name in modules]
    assert "torch" not in heavy_after("\n".join(checks))


def test_options_load_nothing_heavy() -> None:
    package = ROOT / "rlite"
    files = [*package.rglob("*options.py"), package / "control" / "spec.py"]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    assert len(modules) >= 12
    checks = [f"import {name}\nassert not {set(HEAVY)} & set(sys.modules), {name!r}" for name in modules]
    assert heavy_after("\n".join(checks)) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["schema", "ppo"],
        ["--help"],
        *([command, "--help"] for command in ("ppo", "dpo", "simpo", "kto", "generate", "merge", "doctor", "view")),
    ],
)
def test_a_command_that_only_describes_loads_nothing_heavy(arguments: list[str]) -> None:
    assert heavy_after(f"sys.argv = ['rlite', *{arguments}]\nfrom rlite.cli import main\nmain()") == []


@pytest.mark.parametrize("program", ["rlite.cli", "rlite.trainer.ppo"])
def test_the_first_line_of_a_run_comes_before_torch(program: str, tmp_path: Path) -> None:
    for name in ("rows.jsonl", "env.py"):
        (tmp_path / name).touch()
    settings = [
        *("actor.model_name=MODEL", "train_data.path=rows.jsonl", "rollout.env_path=env.py"),
        *("actor.policy_loss.name=gspo", "adv.estimator=rloo"),
    ]
    arguments = [*(["ppo"] if program == "rlite.cli" else []), *settings]
    stop_at_first_line = f"""
import os
import runpy

sys.path.insert(0, os.getcwd())
os.chdir({str(tmp_path)!r})

class Told(BaseException):
    pass

class Terminal:
    def write(self, text):
        if "rlite ppo: MODEL on rows.jsonl, into runs/ppo; loading torch" in text:
            raise Told

    def flush(self):
        pass

sys.argv, stdout, sys.stdout = ["rlite", *{arguments}], sys.stdout, Terminal()
try:
    runpy.run_module({program!r}, run_name="__main__")
    raise AssertionError("the line is missing")
except Told:
    sys.stdout = stdout
"""
    assert heavy_after(stop_at_first_line) == []
