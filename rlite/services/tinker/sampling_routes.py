"""Routes of samplers, and of the results of all requests."""

from __future__ import annotations

from collections import Counter

from rlite.errors import DataError
from rlite.imports import optional
from rlite.services.endpoint.requests import ApiError
from rlite.services.tinker import bodies
from rlite.services.tinker.desk import QueueFull
from rlite.services.tinker.samples import sequence_ids
from rlite.services.tinker.shop import FUTURE, OWNER, ROOT, Shop, read
from rlite.services.tinker.tenants import Result, Sampler, UnknownName
from rlite.services.tinker.wire import PROTOBUF

with optional("rlite tinker needs", "tinker"):
    from aiohttp import web


POLL_SECONDS = 30.0
"""seconds that retrieve_future waits; the client asks again after 45 s"""


class SamplingRoutes:
    """Answers requests that sample, and requests for results.

    Args:
        shop: what the routes work with.
    """

    def __init__(self, shop: Shop) -> None:
        self._shop = shop
        self._joined: Counter[str] = Counter()

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.post(f"{ROOT}/create_sampling_session", self._create_sampling_session),
            web.post(f"{ROOT}/join_sampling_session", self._join_sampling_session),
            web.post(f"{ROOT}/asample", self._asample),
            web.post(f"{ROOT}/retrieve_future", self._retrieve_future),
            web.post(f"{ROOT}/retrieve_futures", self._retrieve_futures),
            web.post(f"{ROOT}/cancel_future", self._cancel_future),
            web.get(f"{ROOT}/samplers/{{sampler}}", self._sampler),
            web.get(f"{ROOT}/token_versions/{{request}}", self._versions),
        ]

    async def _create_sampling_session(self, request: web.Request) -> web.Response:
        asked = await read(request, bodies.NewSampler)
        session = self._shop.tenants.session(request[OWNER], asked.session_id)
        self._shop.check_base(asked.base_model)
        sampler_id = f"{session.session_id}:sample:{asked.sampling_session_seq_id}"
        sampler = Sampler(sampler_id, None, None)
        if asked.model_path is not None:
            model, folder = self._shop.tenants.weights(request[OWNER], asked.model_path, "sampler_weights")
            sampler = Sampler(sampler_id, model.model_id, folder.name)
        elif asked.base_model is None:
            raise DataError("create_sampling_session: expected base_model or model_path")
        session.samplers[asked.sampling_session_seq_id] = sampler
        session.write()
        return web.json_response({"type": "create_sampling_session", "sampling_session_id": sampler_id})

    async def _sampler(self, request: web.Request) -> web.Response:
        sampler = self._shop.sampler(request[OWNER], request.match_info["sampler"])
        path = None if sampler.model_id is None else f"tinker://{sampler.model_id}/sampler_weights/{sampler.name}"
        answer = {"sampler_id": sampler.sampler_id, "base_model": self._shop.model_name, "model_path": path}
        return web.json_response(answer)

    async def _join_sampling_session(self, request: web.Request) -> web.Response:
        asked = await read(request, bodies.SamplerBody)
        sampler = self._shop.sampler(request[OWNER], asked.sampling_session_id)
        self._joined[sampler.sampler_id] += 1
        counter = self._joined[sampler.sampler_id]
        return web.json_response({"type": "join_sampling_session", "client_counter": counter})

    async def _asample(self, request: web.Request) -> web.Response:
        asked = await read(request, bodies.Sample)
        sampler = self._shop.sampler(request[OWNER], asked.sampling_session_id)
        request_id = f"{sampler.sampler_id}:{asked.seq_id}"
        if not self._shop.samples.submit(request_id, sampler, asked):
            raise QueueFull("too many samples are under way; try again later")
        ids = sequence_ids(request_id, asked.num_samples)
        return web.json_response({"request_id": request_id, "sample_sequence_ids": ids})

    async def _retrieve_future(self, request: web.Request) -> web.Response:
        asked = await read(request, bodies.Retrieve)
        result = await self._result(request[OWNER], asked.request_id)
        if result is None:
            again = {"type": "try_again", "request_id": asked.request_id, "queue_state": "active"}
            return web.json_response(again, status=408)
        kind = PROTOBUF if result.is_proto else "application/json"
        return web.Response(body=result.body, content_type=kind)

    async def _result(self, owner: str, request_id: str) -> Result | None:
        found = FUTURE.fullmatch(request_id)
        if found is None:
            raise UnknownName(f"request {request_id[:80]!r} does not exist")
        if found[2] == "train":
            return await self._shop.desk.result(self._shop.tenants.model(owner, found[1]), int(found[4]), POLL_SECONDS)
        self._shop.tenants.session(owner, found[1].partition(":")[0])
        try:
            return await self._shop.samples.result(request_id, POLL_SECONDS)
        except UnknownName as error:  # of a server before this one: the client gives the request again
            raise ApiError(str(error), 410) from error

    async def _retrieve_futures(self, request: web.Request) -> web.Response:
        asked = await read(request, bodies.RetrieveMany)
        sampler = self._shop.sampler(request[OWNER], asked.target.sampling_session_id)
        done, cursor = self._shop.samples.finished(f"{sampler.sampler_id}:", asked.prev_cursor)
        completions = [{"state": "finished", "request_id": name} for name in done]
        return web.json_response({"completions": completions, "cursor": cursor})

    async def _cancel_future(self, request: web.Request) -> web.Response:
        asked = await read(request, bodies.Retrieve)
        found = FUTURE.fullmatch(asked.request_id)
        if found is not None and found[2] == "sample":
            self._shop.tenants.session(request[OWNER], found[1].partition(":")[0])
            self._shop.samples.cancel(asked.request_id)
        return web.json_response({"type": "cancel_future"})

    async def _versions(self, request: web.Request) -> web.Response:
        """Return the version of the weights for each token of each sample of a request."""
        request_id = request.match_info["request"]
        await self._result(request[OWNER], request_id)
        return web.json_response({"versions": self._shop.samples.versions.get(request_id)})
