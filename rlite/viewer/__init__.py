"""The pages of a run in a browser, and its record as DataFrames."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlite import imports

# lazy: DataFrames need the pandas package, the pages do not
if TYPE_CHECKING:
    from rlite.viewer.frames import RunFrames, load

__all__, __getattr__, __dir__ = imports.exports(__name__, {"rlite.viewer.frames": "RunFrames load"})
