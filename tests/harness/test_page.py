"""docs/evaluation-harnesses.md: what its programs import, and its commands against examples/serve.py."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from inspect_ai.log import read_eval_log

from tests.architecture import test_docs
from tests.architecture.test_docs import ROOT

PAGE = ROOT / "docs" / "evaluation-harnesses.md"
SERVE = runpy.run_path(str(ROOT / "examples" / "serve.py"))
PYTHON = shlex.quote(sys.executable)


def test_imports_of_the_page_exist() -> None:
    test_docs.test_imports_of_documented_programs_exist(PAGE)


def test_inspect_s_command_runs_the_task_of_the_page(path: Path, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    [program] = re.findall(r"```python\n# sums.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "sums.py").write_text(program)
    rows = [{"input": f"{a} + 2 =", "target": str(a + 2)} for a in range(3)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = (
        f"cd {tmp_path} && {PYTHON} -m inspect_ai eval sums.py --model openai-api/rlite/policy --max-tokens 8 "
        "--display none --max-connections 64 --log-dir logs"
    )
    assert SERVE["main"](str(path), command) == 0, capfd.readouterr().err
    [file] = (tmp_path / "logs").glob("*.eval")
    log = read_eval_log(str(file))
    assert log.status == "success"
    assert [sample.input for sample in log.samples or ()] == [row["input"] for row in rows]
    assert all(sample.output.usage and sample.output.usage.output_tokens for sample in log.samples or ())


def test_the_example_ends_as_its_command_does(path: Path) -> None:
    assert SERVE["main"](str(path), "exit 3") == 3
