"""Routes as functions of the server's objects, the tenant and the request's form.

    @ROUTES("POST", "optim_step", bodies.OptimStep)
    async def _optim_step(shop: Shop, owner: str, asked: bodies.OptimStep) -> Answer: ...

The JSON of the answer is what a function returns.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlite.errors import DataError
from rlite.imports import optional
from rlite.services.tinker import bodies
from rlite.services.tinker.desk import Desk
from rlite.services.tinker.options import TinkerLimits
from rlite.services.tinker.samples import Samples
from rlite.services.tinker.tenants import SESSION_ID, Sampler, Tenants, UnknownName

with optional("rlite tinker needs", "tinker"):
    from aiohttp import web

    from rlite.services.endpoint.endpoint import read_body

OWNER = web.RequestKey("owner", str)
"""key of a request's tenant"""
ROOT = "/api/v1"
MAX_BODY = 64 << 20
FUTURE = re.compile(rf"({SESSION_ID}:(train|sample):(\d{{1,9}})):(\d{{1,13}})")
"""id of a request: of a model or of a sampler, and its number"""


@dataclass(frozen=True)
class Shop:
    """Objects that the routes work with."""

    tenants: Tenants
    desk: Desk
    samples: Samples
    check_rank: Callable[[int], None]
    """refuses with a ConfigError a rank that cannot be sampled"""
    model_name: str
    """name of the base model in requests"""
    vocab_size: int
    max_length: int
    """longest prompt and answer, and longest datum, in tokens"""
    limits: TinkerLimits

    def check_base(self, name: str | None) -> None:
        """Check the base model of a request.

        Raises:
            DataError: the server has another one.
        """
        if name not in (None, self.model_name):
            raise DataError(f"base_model {str(name)[:120]!r}: this server has {self.model_name!r} alone")

    def sampler(self, owner: str, sampler_id: str) -> Sampler:
        """Return what a sampling session samples from.

        Raises:
            UnknownName: there is no such session, or it belongs to another tenant.
        """
        found = FUTURE.fullmatch(f"{sampler_id}:0")
        if found is None or found[2] != "sample":
            raise UnknownName(f"sampling session {sampler_id[:80]!r} does not exist")
        session = self.tenants.session(owner, found[1].partition(":")[0])
        if int(found[3]) not in session.samplers:
            raise UnknownName(f"sampling session {sampler_id!r} does not exist, or was too old (keep_samplers)")
        return session.samplers[int(found[3])]


Answer = dict[str, Any] | web.StreamResponse
Act = Callable[[Shop, str, Any], Awaitable[Answer]]


class Routes:
    """Routes of one file."""

    def __init__(self) -> None:
        self._found: list[tuple[str, str, type[bodies.Body] | None, Act]] = []

    def __call__(self, method: str, path: str, form: type[bodies.Body] | None = bodies.Body) -> Callable[[Act], Act]:
        """Add the function below as a route.

        Args:
            method: the HTTP method.
            path: the path below `ROOT`; names in braces are values of the form.
            form: form of the request; None leaves reading to the function.

        Returns:
            A decorator.
        """

        def add(act: Act) -> Act:
            self._found.append((method, path, form, act))
            return act

        return add

    def bound(self, shop: Shop) -> list[web.RouteDef]:
        """Return the routes for aiohttp.

        Args:
            shop: the objects that they work with.
        """
        return [
            web.route(method, f"{ROOT}/{path}", partial(_answer, shop, form, act))
            for method, path, form, act in self._found
        ]


async def _answer(shop: Shop, form: type[bodies.Body] | None, act: Act, request: web.Request) -> web.StreamResponse:
    asked: Any = request
    if form is not None:
        asked = bodies.read(form, await read_body(request, MAX_BODY), {**request.query, **request.match_info})
    answer = await act(shop, request.get(OWNER, ""), asked)
    return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)
