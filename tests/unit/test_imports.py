"""`--import`: files and modules of the user are imported before options are checked, and fail with their traceback."""

from __future__ import annotations

import sys
from pathlib import Path

import cloudpickle
import pytest

from rlite.assembly.commands.options import PlanConfig
from rlite.config import load, save
from rlite.errors import ConfigError, ImportFailed
from rlite.trainer.callbacks import CALLBACKS
from rlite.trainer.supervised_options import SftConfig

NEEDED = ["actor.model_name=x", "data.path=x"]
OWN = """
from __future__ import annotations
from dataclasses import dataclass
from rlite.trainer.callbacks import Callback, register_callback

@dataclass
class Strength:
    value: float = 2.0

STRENGTH = Strength()

def doubled(x: float) -> float:
    return STRENGTH.value * x

@register_callback({name!r})
class Own(Callback):
    doubled = staticmethod(doubled)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder. Names that a test registers are gone after it."""
    before = dict(CALLBACKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in CALLBACKS.keys() - before:
        del CALLBACKS[name]


def test_names_of_imported_files_and_modules_are_known_to_the_options(folder: Path) -> None:
    (folder / "one.py").write_text(OWN.format(name="one"))
    (folder / "own_package").mkdir()
    (folder / "own_package" / "two.py").write_text(OWN.format(name="two"))
    (folder / "run.yaml").write_text("imports: [one.py]")
    config = load(
        SftConfig, [*NEEDED, "--config", "run.yaml", "--import", "own_package.two", "trainer.callbacks=[one, two]"]
    )
    assert config.imports == ["one.py", "own_package.two"]
    save(config, "saved.yaml")
    assert load(SftConfig, ["--config", "saved.yaml", "--import=one.py"]) == config


def test_code_of_a_file_travels_by_value(folder: Path) -> None:
    (folder / "elsewhere.py").write_text(OWN.format(name="by value"))
    load(SftConfig, [*NEEDED, "--import", "elsewhere.py"])
    sent = cloudpickle.dumps(CALLBACKS["by value"].doubled)
    assert "elsewhere" not in sys.modules
    (folder / "elsewhere.py").unlink()
    assert cloudpickle.loads(sent)(3.0) == 6.0


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def f():\n    return 1 / 0\nf()", 'own.py", line 2, in f'),
        ("def (:", "SyntaxError: invalid syntax"),
        ("import not_installed", "ModuleNotFoundError: No module named 'not_installed'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_a_file_that_fails_shows_its_own_traceback_alone(folder: Path, source: str, said: str) -> None:
    (folder / "own.py").write_text(source)
    with pytest.raises(ImportFailed, match=r"--import own\.py: it raised") as failure:
        load(SftConfig, ["--import", "own.py", "data.pth=typo"])
    assert said in str(failure.value)
    assert "importlib" not in str(failure.value)
    assert "rlite/" not in str(failure.value).replace(str(folder), "")


def test_missing_files_and_modules_are_named(folder: Path) -> None:
    with pytest.raises(ImportFailed, match=r"--import nowhere\.py: no such file in "):
        load(SftConfig, [*NEEDED, "--import", "nowhere.py"])
    with pytest.raises(ImportFailed, match=r"--import nowhere\.own: no module 'nowhere'; expected a file such as"):
        load(SftConfig, [*NEEDED, "--import", "nowhere.own"])
    with pytest.raises(ConfigError, match="argument '--import': expected key=value, --config FILE or --help"):
        load(PlanConfig, ["--import", "own.py"])
