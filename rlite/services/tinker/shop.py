"""Objects that the routes share: sessions, queues, samples, and facts of the base model."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlite.errors import DataError
from rlite.imports import optional
from rlite.services.tinker import bodies
from rlite.services.tinker.desk import Desk
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
    model_name: str
    """name of the base model in requests"""
    vocab_size: int
    max_length: int
    """longest prompt and answer, and longest datum, in tokens"""
    max_models: int
    """models of a tenant"""

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


async def read(request: web.Request, cls: type[bodies.B]) -> bodies.B:
    """Return the JSON body of a request.

    Args:
        request: the request.
        cls: the form of the body.
    """
    return bodies.read(cls, await read_body(request, MAX_BODY))
