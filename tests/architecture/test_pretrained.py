"""Model folders, which are the work of strangers, are opened in `rlite/nn/pretrained.py` alone."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
OPENING = {"from_pretrained", "from_config", "get_class_from_dynamic_module"}
OWN = {
    "rlite/backends/models/huggingface.py": "super().from_pretrained(path, *args, **kwargs)",
    "rlite/trainer/model/modules.py": "cls.from_pretrained(path)",
}
"""calls of the train module's own `from_pretrained`, which reads its config there"""


def calls(path: Path) -> list[str]:
    """Calls in a file that open a model's folder, or trust its code."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in OPENING or any(keyword.arg == "trust_remote_code" for keyword in node.keywords):
            found.append(ast.unparse(node))
    return found


def test_model_folders_are_opened_in_one_place() -> None:
    files = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "rlite").rglob("*.py")}
    found = {name: calls(path) for name, path in files.items() if name != "rlite/nn/pretrained.py"}
    assert {name: each for name, each in found.items() if each} == {name: [call] for name, call in OWN.items()}


def test_that_place_never_trusts_a_folders_code() -> None:
    text = (ROOT / "rlite/nn/pretrained.py").read_text()
    assert '_NO_CODE: Mapping[str, Any] = {"trust_remote_code": False}' in text
    assert text.count("trust_remote_code") == 2  # there, and in the message of a refusal
    opened = [call for call in calls(ROOT / "rlite/nn/pretrained.py") if call.split(".")[0] != "GenerationConfig"]
    assert len(opened) == 5
    assert [call for call in opened if "**_NO_CODE" not in call] == ["cls.from_pretrained(model, str(folder))"]  # PEFT
