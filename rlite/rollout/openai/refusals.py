"""Requests that are not HTTP, in a log of one line for each kind."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from aiohttp.http_exceptions import HttpProcessingError


class RefusalLog(logging.LoggerAdapter[logging.Logger]):
    """Log of aiohttp with one line for each kind of unreadable request: anyone who reaches the port can send them.

    Args:
        logger: gets the first request of each kind, and everything else.
        dropped: counts unreadable requests by kind; aiohttp closes their connections.
        owner: name of the server in messages.
        advice: end of the message about the first request of a kind.
    """

    def __init__(
        self,
        logger: logging.Logger,
        dropped: Counter[str],
        owner: str = "the agent endpoint",
        advice: str = "further ones are counted in AgentEndpoint.dropped",
    ) -> None:
        super().__init__(logger)
        self._dropped, self._owner, self._advice = dropped, owner, advice

    def exception(self, msg: object, *args: object, exc_info: Any = True, **options: Any) -> None:
        """Count a request that is not HTTP; log any other exception."""
        if not isinstance(exc_info, HttpProcessingError):
            super().exception(msg, *args, exc_info=exc_info, **options)
            return
        reason = f"a request that cannot be read ({type(exc_info).__name__})"
        if not self._dropped[reason]:
            self.warning("%s got %s; %s", self._owner, reason, self._advice)
        self._dropped[reason] += 1
