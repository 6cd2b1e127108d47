"""List the core path of a GRPO step: the files that a reader opens to understand one step, in the order of use.

    make core
    python -m benchmarks.core_path [OTHER_CHECKOUT]
    python -m benchmarks.core_path --docs    # writes the list of docs/read-the-core.md

A GRPO run of three steps on one CPU device (`launcher=inprocess`, observers off) is traced from the beginning of its
second batch to the beginning of its third. The path is every file of rlite outside of `backends` and `runtime` of which
a function is entered. Its lines are those of whole files, without blank lines, comments and docstrings.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.sloc import source_lines

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "read-the-core.md"
BEGIN, END = "<!-- core path: begin -->", "<!-- core path: end -->"
"""lines of the page around its list"""
OUTSIDE = ("backends/", "runtime/")
BEGINS = "next_batch"
"""function that begins a step"""
OPTIONS = (
    *("actor.model_name=model", "train_data.path=prompts.jsonl", "reward.path=reward.py:length", "num_devices=1"),
    *("train_data.prompts_per_rollout=2", "train_data.responses_per_prompt=4", "reward.in_process=true"),
    *("rollout.train_sampling_params.max_new_tokens=6", "rollout.dynamic_filtering=false"),
    *("trainer.total_steps=3", "trainer.save_freq=1000", "trainer.record=none"),
)
REWARD = """
def length(prompt, completions, prompt_ids, completion_ids, **row):
    return len(set(completion_ids)) / 6
"""


class Tracer:
    """Gathers the functions of a package that are entered during the second step, in any thread."""

    def __init__(self, package: Path) -> None:
        self.entered: dict[str, list[str]] = {}
        """names of functions by file, in the order of their first use"""
        self._root = f"{package}/"
        self._num_begun = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Take an event of the interpreter, as `sys.setprofile` gives it."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self._root):
            return
        file = code.co_filename[len(self._root) :]
        if code.co_name == BEGINS and file.startswith("trainer/"):
            self._num_begun += 1
        if self._num_begun == 2 and code.co_name != "<module>":
            names = self.entered.setdefault(file, [])
            if code.co_qualname not in names:
                names.append(code.co_qualname)


def trace(checkout: Path) -> dict[str, list[str]]:
    """Return the functions that a step of another process enters, by file."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}
        command = [sys.executable, __file__, "--traced", str(checkout)]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        found = Path(folder) / "path.json"
        if not found.exists():
            raise RuntimeError(f"the run failed:\n{done.stderr[-3000:]}")
        return dict(json.loads(found.read_text()))


def run_traced(checkout: Path) -> None:
    """Run the steps in this process and folder, and write path.json."""
    import transformers

    from rlite.trainer import grpo
    from tests.tiny import build_model_dir

    build_model_dir(Path("model"))
    Path("reward.py").write_text(REWARD)
    tokenizer = transformers.AutoTokenizer.from_pretrained("model")
    prompts = [tokenizer.decode([token, token + 1]) for token in range(10, 26)]
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))

    class Silent(grpo.GrpoTrainer):
        def observers(self) -> tuple[()]:
            """Return nobody who observes the run. An earlier version does not ask."""
            return ()

    tracer = Tracer(checkout / "rlite")
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    Silent.main(OPTIONS)
    sys.setprofile(None)
    Path("path.json").write_text(json.dumps(tracer.entered))


def lines_of(checkout: Path, entered: Mapping[str, Any]) -> dict[str, int]:
    """Return the source lines of each file of the path, in the order of use."""
    files = [file for file in entered if not file.startswith(OUTSIDE)]
    return {file: len(source_lines((checkout / "rlite" / file).read_text(encoding="utf-8"))) for file in files}


def listed() -> list[str]:
    """Return the files that the page lists, in its order."""
    return re.findall(r"^\d+\. `rlite/(\S+)`", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def sentence_of(file: Path) -> str:
    """Return the first sentence of a module's docstring, on one line."""
    first = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n\n")[0]
    return re.split(r"(?<=[.:]) ", " ".join(first.split()))[0].rstrip(".:")


def write_page(files: Iterable[str]) -> None:
    """Write the list of the page. Files that it lists keep their order, and new files follow in the order of use."""
    found = list(files)
    order = [*(file for file in listed() if file in found), *(file for file in found if file not in listed())]
    lines = [f"{n}. `rlite/{file}`: {sentence_of(ROOT / 'rlite' / file)}" for n, file in enumerate(order, 1)]
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text("\n".join([before + BEGIN, *lines, END + rest.partition(END)[2]]), encoding="utf-8")


def main(arguments: list[str]) -> None:
    """Print the path of this checkout, and of another one; or write the page."""
    if arguments == ["--docs"]:
        write_page(lines_of(ROOT, trace(ROOT)))
        return
    for checkout in [*(Path(each).resolve() for each in arguments), ROOT]:
        entered = trace(checkout)
        lines = lines_of(checkout, entered)
        print(f"\n{checkout}: {len(lines)} files, {sum(lines.values())} source lines")
        for file, number in lines.items():
            print(f"{number:6}  {file:44} {', '.join(name for name in entered[file] if '<' not in name)[:120]}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--traced"]:
        run_traced(Path(sys.argv[2]))
    else:
        main(sys.argv[1:])
