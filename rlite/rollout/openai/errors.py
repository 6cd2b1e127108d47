"""Errors as OpenAI's interface reports them."""

from __future__ import annotations

from typing import Any

from rlite.errors import RliteError


class ApiError(RliteError, RuntimeError):
    """A request that cannot be served; what is wrong is the client's to read."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, status, param, code)
        self.message = message
        self.status = status
        self.param = param
        self.code = code

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        """The response's JSON."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def unknown_model(asked: Any, model: str) -> ApiError:
    """For a request that names another model than the one that there is."""
    return ApiError(f"the model {asked!r} does not exist; there is {model!r}", 404, "model", "model_not_found")
