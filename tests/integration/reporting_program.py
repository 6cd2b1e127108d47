"""A program that a job starts by module path: `python -m tests.integration.reporting_program --config FILE`.

It makes a step each time a file `step-N` appears, notes its process, and fails as the options say.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import yaml

from rlite.errors import ConfigError
from rlite.services.recovery import record
from rlite.trainer.run.interruption import has_begun


def main() -> None:
    options = yaml.safe_load(Path(sys.argv[2]).read_text())
    out = Path(options["out"])
    if options.get("refuse"):
        record.report_final_error(ConfigError("no such model"))
        sys.exit("ConfigError: no such model")
    if "at_sigterm" in options:
        signal.signal(signal.SIGTERM, lambda *_: end(out, options["at_sigterm"]))
    starts = out / "starts"
    with starts.open("a") as file:
        file.write(f"{os.getpid()} {int(has_begun())}\n")
    print(f"start {len(starts.read_text().splitlines())}")
    done = len(list(out.glob("done-*")))
    for step in range(done, options["steps"]):
        record.report_step(step, options["steps"])
        while not (out / f"step-{step}").exists():
            if options.get("computes"):
                sum(range(10_000))
            else:
                time.sleep(0.02)
        if options.get("raises"):
            raise ValueError("the disk is on fire")
        (out / f"done-{step}").write_text("")
    record.report_step(options["steps"], options["steps"])


def end(out: Path, how: str) -> None:
    (out / "asked").write_text("")
    if how == "save":
        print("step 1 is saved", flush=True)
        sys.exit(143)


if __name__ == "__main__":
    main()
