"""The time that chat templates write: that of the clock, or a fixed time, so that a run has one date."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

_FUNCTION = "strftime_now"
"""function of the clock in templates"""
_FORMATS = [f"%{flag}{letter}" for flag in ("", "-") for letter in "aAbBcdDeFGhHIjmMnpSTuUVwWxXyYzZf"]


class TemplateClock:
    """The time that chat templates of this process write."""

    def __init__(self) -> None:
        self._fixed: datetime | None = None

    def now(self) -> datetime:
        """Return the fixed time, or the present if no time is fixed."""
        return self._fixed or datetime.now()

    @contextmanager
    def fixed(self, time: datetime) -> Iterator[None]:
        """Fix the time inside the `with` block, in all threads.

        Args:
            time: the time that templates write.

        Yields:
            None.
        """
        before, self._fixed = self._fixed, time
        try:
            yield
        finally:
            self._fixed = before

    def in_template(self, source: str) -> str:
        """Return a template that writes the fixed time. A template that writes no time, or the present, is unchanged.

        Args:
            source: the template. transformers lets a template see plain data alone, so a macro replaces the function.
        """
        if self._fixed is None or _FUNCTION not in source:
            return source
        values = {form: self._fixed.strftime(form) for form in _FORMATS}
        filters = "".join(f"|replace({form!r}, {value!r})" for form, value in values.items())
        # The newline after a tag is not written, so the template begins as it does without the macro.
        return f"{{%- macro {_FUNCTION}(form) %}}{{{{- form{filters} -}}}}{{%- endmacro %}}\n{source}"


CLOCK = TemplateClock()
