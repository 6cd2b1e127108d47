"""transformers without its progress bars and its warnings to other libraries."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Show no progress bars of transformers inside the block, and no deprecation warnings.

    Yields:
        None.
    """
    has_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
            yield
    finally:
        if has_bars:
            logging.enable_progress_bar()
