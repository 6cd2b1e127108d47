"""Check an installed rlite from outside of its checkout: python smoke.py [FOLDER OF THE PACKAGES]

A program of its own: it is copied to where no checkout is, and needs no package but rlite with its extra quickstart.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata, resources
from pathlib import Path

import rlite

SMALL = ["steps=1", "warm_steps=2", "num_train=64", "num_held_out=4", "folder=small"]
FILES = ["py.typed", "backends/serving/decode.c", "viewer/static/index.html", "viewer/static/main.js"]


def ran(*arguments: str) -> str:
    """Return the standard output of a command of rlite, which has to succeed."""
    done = subprocess.run([sys.executable, "-m", "rlite.cli", *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"rlite {' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def main() -> None:
    """Check files, version, self-test, training, and the pages of a run."""
    packages = Path(sys.argv[1] if len(sys.argv) > 1 else sys.prefix).resolve()
    assert Path(rlite.__file__).resolve().is_relative_to(packages), f"{rlite.__file__} is not in {packages}"
    assert [name for name in FILES if not resources.files("rlite").joinpath(name).is_file()] == []
    assert ran("--version").strip() == metadata.version("rlite") == rlite.__version__
    if len(sys.argv) == 1:  # an environment of its own, whose packages nothing else has tried
        found = json.loads(ran("doctor", "--json"))
        assert not found["failed"], found
    ran("quickstart", *SMALL)
    ran("view", "small", "--export", "small.html")
    page = Path("small.html").read_text(encoding="utf-8")
    assert "<html" in page
    assert len(page) > 50_000, "the page holds its scripts and styles"
    print(f"rlite {rlite.__version__} works on Python {sys.version.split()[0]}, from {Path(rlite.__file__).parent}")


if __name__ == "__main__":
    main()
