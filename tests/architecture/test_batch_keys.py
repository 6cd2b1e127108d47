"""The table of batch keys is complete: what the library writes into a batch or reads from one stands there.

python -m tests.architecture.test_batch_keys    write the table into docs/batches.md
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from rlite.batch import KEYS, NAMED_REWARD
from rlite.rollout import trajectory
from rlite.rollout.conversation import Transcript
from rlite.types import LLMResponse

ROOT = Path(__file__).parents[2]
DOC = ROOT / "docs" / "batches.md"
BEGIN, END = "<!-- batch keys: python -m tests.architecture.test_batch_keys -->", "<!-- end of batch keys -->"
BATCHES = {"batch", "packed", "trajectory", "rows", "row", "joined", "spare", "columns", "found.batch", "group"}
PACKS = {"data"}
"""name of a pack in losses and modules; elsewhere it is an item"""
OTHERS = {
    "rlite/data/sft.py": {"completion", "messages", "prompt", "tools"},
    "rlite/backends/fsdp2/batch_runner.py": {"params"},
    "rlite/evaluation/metrics.py": {
        *("answer", "failed_attempts", "item", "reason", "redrawn", "response_tokens", "reward", "sample", "score"),
    },
    "rlite/evaluation/record.py": {"group", "response_tokens", "sample", "tokens"},
    "rlite/services/record/recorder.py": {"ids", "mask", "offsets", "text"},
    "rlite/rollout/environments/trl.py": {"environment"},
    "rlite/rollout/environments/trl_calls.py": {"environment"},
    "rlite/trainer/rl/rollouts.py": {"data", "item"},
}
"""keys of data rows, records, saved groups and optimizers, in variables with the names of batches"""


def keys_in(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each key that a module reads from or writes into a batch, with the place."""
    folder = path.relative_to(ROOT).parts[1]
    batches = BATCHES | (PACKS if folder in ("trainer", "engine", "backends", "nn", "algorithms") else set())
    for node in ast.walk(ast.parse(path.read_text())):
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(node, ast.Subscript):
            pairs = [(node.value, node.slice)]
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            pairs = [(node.comparators[0], node.left)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if node.func.attr in ("get", "exclude", "select", "pop"):
                pairs = [(node.func.value, argument) for argument in node.args]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "with_keys":
            yield from ((keyword.arg, f"{path}:{node.lineno}") for keyword in node.keywords if keyword.arg)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            is_batch = ast.unparse(node.targets[0]) == "columns"
            pairs = [(node.targets[0], key) for key in node.value.keys if key is not None and is_batch]
        for base, key in pairs:
            if isinstance(key, ast.Constant) and isinstance(key.value, str) and ast.unparse(base) in batches:
                yield key.value, f"{path}:{node.lineno}"


def modules() -> list[Path]:
    parts = ("rollout/chat", "rollout/collector", "rollout/environments", "rollout/tools", "services/endpoint")
    folders = (*parts, "assembly/evaluate", "evaluation", "trainer", "engine", "backends", "nn", "algorithms")
    files = ["rollout/workflow.py", "data/packs.py", "data/tokens.py", "data/sft.py"]
    files += ["services/record/recorder.py", "trainer/run/checkpoints.py"]
    found = [path for folder in folders for path in (ROOT / "rlite" / folder).rglob("*.py")]
    return [*found, *(ROOT / "rlite" / name for name in files)]


def test_every_key_of_a_batch_is_in_the_table() -> None:
    unknown = {
        place: key
        for path in modules()
        for key, place in keys_in(path)
        if key not in KEYS and key not in OTHERS.get(str(path.relative_to(ROOT)), set())
    }
    assert unknown == {}, "add these keys to the table of rlite/batch.py"


def test_every_key_of_the_table_is_used() -> None:
    sources = [path.read_text() for path in (ROOT / "rlite").rglob("*.py") if path != ROOT / "rlite" / "batch.py"]
    names = set(KEYS) - {f"{NAMED_REWARD}NAME"}
    assert [name for name in names if not any(f'"{name}"' in text or f"{name}=" in text for text in sources)] == []


def test_trajectories_have_the_shapes_and_types_of_the_table() -> None:
    response = LLMResponse(
        input_tokens=[1, 2],
        output_tokens=[3, 4],
        output_logprobs=[-1.0, -2.0],
        output_versions=[0, 0],
        stop_reason="length",
        latency=0.0,
        ttft=0.0,
    )
    transcript = Transcript([1, 2])
    transcript.write(response)
    transcript.reward(0.5)
    for made in (
        trajectory(response, reward=1.0),
        transcript.trajectory(scores=1.0),
        transcript.trajectory(1.0, num_tool_calls=1, num_tool_errors=0),
    ):
        for name, value in made.items():
            shape = {1: "[N]", 2: "[N, L]"}[value.dim()]
            assert shape in KEYS[name].shape, name
            assert str(value.dtype) == f"torch.{KEYS[name].dtype}", name


def rendered() -> str:
    """Return the table as Markdown."""
    head = ["| key | shape | type | written by | read by | |", "|---|---|---|---|---|---|"]
    rows = [
        f"| `{key.name}` | {key.shape} | {key.dtype} | {key.writer} | {key.readers} | {key.meaning} |"
        for key in KEYS.values()
    ]
    return "\n".join([BEGIN, "", *head, *rows, "", END])


def test_the_page_has_the_table() -> None:
    text = DOC.read_text()
    assert text[text.index(BEGIN) : text.index(END) + len(END)] == rendered(), "python -m " + BEGIN.split()[-2]


if __name__ == "__main__":
    text = DOC.read_text()
    DOC.write_text(text[: text.index(BEGIN)] + rendered() + text[text.index(END) + len(END) :])
