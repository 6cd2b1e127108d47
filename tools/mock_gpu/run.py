"""Run one program on the mock GPU and write its figures: `python -m tools.mock_gpu.run NAME FILE`.

The rehearsal starts it, in the environment that `build.environment` returns.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path

from tools.mock_gpu import mock


def main(name: str, file: str) -> None:
    """Run the program and write its figures, with the violations of captures."""
    begun = time.perf_counter()
    figures = importlib.import_module(f"tools.mock_gpu.programs.{name}").measure()
    figures["capture violations"] = mock.total("capture_violations")
    for place in mock.violations():
        print("forbidden in a capture:", place)
    figures["seconds"] = time.perf_counter() - begun
    Path(file).write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main(*sys.argv[1:])
