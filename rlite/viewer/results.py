"""The results of `rlite eval`, from `results.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlite import files

RESULTS = "results.json"
MAX_BYTES = 64 << 20
"""bytes of a file that are read; a longer one is no JSON"""


class ResultsFile:
    """Reader of the results of an evaluation.

    Args:
        path: the file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""
        """why the file cannot be read"""
        self._content: Mapping[str, Any] = {}
        self._stamp: tuple[int, int] | None = None

    def refresh(self) -> bool:
        """Read the file if it has changed.

        Returns:
            True if it has changed.
        """
        stamp = files.stamp(self.path) if self.path.is_file() else None
        if stamp == self._stamp:
            return False
        self._stamp, self._content, self.problem = stamp, {}, ""
        if stamp:
            try:
                with files.reading(self.path, self.path.parent) as file:
                    self._content = _checked(json.loads(file.read(MAX_BYTES)))
            except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                self.problem = f"{RESULTS}: cannot be read: {type(error).__name__}: {str(error)[:200]}"
        return True

    @property
    def models(self) -> dict[str, dict[str, float]]:
        """Metrics of each model by its name; empty without results."""
        return {name: dict(about["metrics"]) for name, about in self._content.get("models", {}).items()}

    @property
    def comparison(self) -> Mapping[str, Any] | None:
        """The difference of two models: the second less the first."""
        return self._content.get("comparison")

    @property
    def no_comparison(self) -> str:
        """Why two models are not compared; "" without a reason."""
        return str(self._content.get("no_comparison", ""))

    def questions(self, model: str) -> str | None:
        """Return the identity of the questions that a model answered; None if the results lack it."""
        settings = self._content.get("settings", {}).get(model, {})
        content = (settings.get("questions") or {}).get("content")
        return None if content is None else str(content)


def _checked(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the results if they have the form that the pages read."""
    for about in content["models"].values():
        for value in about["metrics"].values():
            float(value)
    for settings in content.get("settings", {}).values():
        (settings.get("questions") or {}).get("content")
    if (comparison := content.get("comparison")) is not None:
        for name in ("first", "second", "difference", "low", "high", "p_value"):
            comparison[name]
    return content
