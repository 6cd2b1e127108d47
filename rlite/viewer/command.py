"""The pages of runs: what the model wrote, what it got for it, and where rollouts and time were lost.

rlite view RUN [RUN2 ...] [port=8000]            serve the pages on this machine
rlite view RUN --export run.html                 write them to one file
"""

from __future__ import annotations

import asyncio
import os
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from rlite import config
from rlite.errors import ConfigError
from rlite.key_value import spelled, split_positional
from rlite.viewer.export import export
from rlite.viewer.options import ViewConfig
from rlite.viewer.run import ViewedRun, open_runs


def main(argv: Sequence[str]) -> None:
    """Serve the pages until Ctrl-C, or write them to a file.

    Raises:
        ConfigError: no run is given, or a folder holds none.
    """
    folders, rest = split_positional(spelled(argv, {name: name for name in ViewConfig.model_fields}))
    options = config.load(ViewConfig, rest, given={"runs": folders} if folders else {})
    if not options.runs:
        raise ConfigError("runs: expected the folder of a run, as in `rlite view runs/quickstart`")
    runs = open_runs(options.runs)
    if options.export is not None:
        _export(runs, options, Path(options.export).expanduser())
    else:
        _serve(runs, options)


def _export(runs: Sequence[ViewedRun], options: ViewConfig, path: Path) -> None:
    if path.is_dir():
        raise ConfigError(f"export={path}: expected a file such as run.html, found a folder")
    if not path.parent.is_dir():
        raise ConfigError(f"export={path}: there is no folder {path.parent}; make it, or choose another file")
    told = export(runs, path, options.export_steps, options.export_mb)
    print(
        f"{path}: {told['bytes'] / 1e6:.1f} MB, {told['rollouts']:,} rollouts, {told['texts']:,} of them with texts "
        f"and tokens; open it in a browser"
    )
    for text in told["left_out"]:
        print(text)
    _tell_problems(runs)


def _serve(runs: Sequence[ViewedRun], options: ViewConfig) -> None:
    from rlite.viewer.server import serve  # aiohttp is optional

    def tell(url: str) -> None:
        print(f"{', '.join(run.name for run in runs)}: {url}", flush=True)
        if "SSH_CONNECTION" in os.environ:
            port = url.split(":")[2].split("/")[0]
            how = f"ssh -L {port}:127.0.0.1:{port} HOST, then open this address there"
            print(f"from your own machine: {how}", flush=True)
        _tell_problems(runs)
        if options.browser:
            webbrowser.open(url)

    asyncio.run(serve(runs, options.port, tell))
    print("closed")


def _tell_problems(runs: Sequence[ViewedRun]) -> None:
    for run in runs:
        for text in (*run.problems, *run.notes):
            print(f"{run.name}: {text}", flush=True)
