"""Options of `rlite view`. No torch here."""

from __future__ import annotations

from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from rlite.config import Count, Options


class ViewConfig(Options):
    """Options of `rlite view RUN [RUN2 ...]`."""

    help_arguments: ClassVar[str] = "RUN [RUN2 ...] [--export FILE.html]"
    help_example: ClassVar[str] = "runs/quickstart"

    runs: list[str] = []
    """folders of runs; the arguments without a key"""
    port: Annotated[int, Ge(0), Le(65535)] = 0
    """port on this machine; 0 takes a free one"""
    browser: bool = False
    """open the page in this machine's browser"""
    export: str | None = None
    """HTML file to write in place of serving the page; also `--export FILE`"""
    export_steps: list[int] = []
    """steps whose texts and tokens the exported file has; empty: the newest, as many as fit into export_mb"""
    export_mb: Count = 30
    """limit of the exported file's rows, texts and tokens before compression, in megabytes"""
