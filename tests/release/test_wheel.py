"""The wheel, built from the sdist and used outside of the checkout. `make wheel-check` takes an empty environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder), "--target", "sdist"]
    subprocess.run(build, cwd=ROOT, check=True, timeout=120)
    [sdist] = folder.iterdir()
    wheel = [*PIP, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder), str(sdist)]
    subprocess.run(wheel, cwd=folder, check=True, timeout=120)
    return folder


def contents(dist: Path) -> dict[str, dict[str, bytes]]:
    """The files of sdist and wheel by their paths."""
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        files = {name: wheel.read(name) for name in wheel.namelist()}
    with tarfile.open(next(dist.glob("*.tar.gz"))) as sdist:
        members = {each.name.partition("/")[2]: sdist.extractfile(each) for each in sdist if each.isfile()}
        sources = {name: opened.read() for name, opened in members.items() if opened is not None}
    return {"wheel": files, "sdist": sources}


def test_the_wheel_holds_every_file_of_the_package_and_no_other(dist: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z", "rlite"], cwd=ROOT, capture_output=True, text=True)
    assert listed.returncode == 0, "the test needs a git checkout"
    expected = {name for name in listed.stdout.split("\0") if name}
    names = {name for name in contents(dist)["wheel"] if not name.startswith("rlite-")}
    assert names == expected
    assert {"rlite/py.typed", "rlite/backends/serving/decode.c", "rlite/viewer/static/index.html"} <= names


def test_no_file_of_a_release_is_a_test_or_names_a_path_of_the_machine_that_built_it(dist: Path) -> None:
    own = [os.fsencode(path) for path in (ROOT, Path.home(), dist) if path != Path("/")]
    for kind, files in contents(dist).items():
        tests = [name for name in files if "tests" in Path(name).parts or Path(name).name.startswith("test_")]
        assert tests == [], kind
        assert [name for name, content in files.items() if any(path in content for path in own)] == [], kind


def test_the_metadata_name_the_version_and_the_pythons_that_ran_it(dist: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [metadata] = [text.decode() for name, text in contents(dist)["wheel"].items() if name.endswith("/METADATA")]
    head, _, readme = metadata.partition("\n\n")
    assert f"Version: {project['version']}" in head.splitlines()
    assert readme.strip() == (ROOT / "README.md").read_text().strip()
    pythons = [line.rpartition(" ")[2] for line in project["classifiers"] if "Python :: 3." in line]
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert re.findall(r"\d\.\d+", re.search(r"python: \[.*\]", workflow)[0]) == pythons, "each checks the wheel"


@pytest.mark.slow
def test_the_wheel_trains_and_shows_a_run_outside_of_the_checkout(dist: Path, tmp_path: Path) -> None:
    target, away = tmp_path / "packages", tmp_path / "away"
    away.mkdir()
    install = [*PIP, "install", "--no-deps", "--no-index", "--no-compile", "--target", str(target)]
    subprocess.run([*install, str(next(dist.glob("*.whl")))], check=True, timeout=120)
    shutil.copy(Path(__file__).with_name("smoke.py"), away)
    environment = {**os.environ, "PYTHONPATH": str(target), "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "smoke.py", str(target)]
    done = subprocess.run(command, cwd=away, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"works on Python {sys.version.split()[0]}, from {target / 'rlite'}" in done.stdout
