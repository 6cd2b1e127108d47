"""The dialects of the endpoint by route."""

from __future__ import annotations

from rlite.services.endpoint.dialects import generate, messages, openai, responses
from rlite.services.endpoint.exchange import Dialect

_ALL = [openai.CHAT, openai.COMPLETION, responses.RESPONSES, messages.MESSAGES, messages.COUNT, generate.GENERATE]
DIALECTS: dict[str, Dialect] = {dialect.path: dialect for dialect in _ALL}


def dialect_of(path: str) -> Dialect:
    """Return the dialect of a route. Errors of unknown routes are told in OpenAI's form."""
    return DIALECTS.get(path, openai.CHAT)
