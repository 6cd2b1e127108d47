"""Marks of parametrised tests."""

from __future__ import annotations

from typing import Any

import pytest


def nightly(*values: Any) -> list[Any]:
    """Return values of a parameter that `make nightly` tries alone."""
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]
