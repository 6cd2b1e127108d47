"""The route by which the owner of a server gives its engine other weights.

    POST /admin/weights {"path": folder on the server's disk, "version": 3} -> {"version", "num_tensors", "seconds"}

A folder that does not fit is refused before generation pauses. If reading it fails later, the earlier weights are read
again. Either way the earlier version is served on.
"""

from __future__ import annotations

import asyncio
import hmac
import threading
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel, NonNegativeInt, ValidationError

from rlite.engine.texts import TextEngine
from rlite.errors import CheckpointError
from rlite.runtime.parallel.shards import CheckpointReader
from rlite.services.endpoint.exchange import log_failure
from rlite.services.endpoint.guard import digest
from rlite.services.endpoint.requests import ApiError, parse_json

ROUTE = "/admin/weights"
_TIED = "lm_head.weight"
"""a folder may leave it out, or hold it beside the equal embedding"""


class _Body(BaseModel, extra="forbid", strict=True):
    path: str
    version: NonNegativeInt


class Admin:
    """Changes the weights of an engine for requests that have the administrator's token."""

    def __init__(self, engine: TextEngine, token: str) -> None:
        self._engine, self._folder, self._digest = engine, Path(engine.path), digest(token)
        self._turn = threading.Lock()
        self._own: dict[str, tuple[int, ...]] = {}
        """shapes of the weights that are served: their folder may be gone when the next is read"""

    def check(self, token: str) -> None:
        """Check the token of a request, in a time that tells nothing of it."""
        if not hmac.compare_digest(digest(token), self._digest):
            raise ApiError("the token is not that of the administrator", 401, code="invalid_api_key")

    async def load(self, body: bytes) -> dict[str, Any]:
        """Load weights; tokens from then on carry the version of the request.

        `body`: JSON with `path` and `version`. Returns the version, the number of tensors and the seconds.
        """
        try:
            asked = _Body.model_validate(parse_json(body))
        except ValidationError as error:
            expected = 'the body: expected {"path": a folder on the server, "version": a number from 0}'
            raise ApiError(expected, code="invalid_value") from error
        return await asyncio.to_thread(self._load, Path(asked.path), asked.version)

    def _load(self, folder: Path, version: int) -> dict[str, Any]:
        with self._turn:
            began, engine, earlier = time.monotonic(), self._engine, self._engine.get_version()
            num_tensors = self._check_fit(folder)
            engine.pause()
            try:
                engine.load(folder)
                engine.set_version(version)
                self._folder = folder
            except Exception as error:
                log_failure("weights could not be loaded", error)
                engine.load(self._folder)
                engine.set_version(earlier)
                raise _refused(f"reading them failed with {type(error).__name__}", earlier) from error
            finally:
                engine.resume()
            return {"version": version, "num_tensors": num_tensors, "seconds": time.monotonic() - began}

    def _check_fit(self, folder: Path) -> int:
        """Return the number of tensors of a folder, which has the names and shapes of the weights that are served."""
        version = self._engine.get_version()
        try:
            self._own = own = self._own or _shapes(CheckpointReader(self._folder))
            new = _shapes(CheckpointReader(folder))
        except CheckpointError as error:
            raise _refused("the path is no folder of readable safetensors", version) from error
        for name in sorted((own.keys() | new.keys()) - {_TIED}):
            has, needs = (shapes.get(name, "no such tensor") for shapes in (new, own))
            if has != needs:
                raise _refused(f"{name}: the folder has {has}, the model {needs}", version)
        return len(new)


def _refused(why: str, version: int) -> ApiError:
    return ApiError(f"the weights were not loaded: {why}; version {version} is served on", code="weights_refused")


def _shapes(reader: CheckpointReader) -> dict[str, tuple[int, ...]]:
    return {name: reader.shape(name) for name in reader.names()}
