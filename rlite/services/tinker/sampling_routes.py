"""Routes of samplers, and of the results of all requests."""

from __future__ import annotations

import itertools

from rlite.errors import DataError
from rlite.imports import optional
from rlite.services.endpoint.requests import ApiError
from rlite.services.tinker import bodies
from rlite.services.tinker.routes import FUTURE, Answer, Routes, Shop
from rlite.services.tinker.tenants import Result, Sampler, UnknownName
from rlite.services.tinker.wire import PROTOBUF

with optional("rlite tinker needs", "tinker"):
    from aiohttp import web

ROUTES = Routes()
POLL_SECONDS = 30.0
"""seconds that retrieve_future waits; the client asks again after 45 s"""
_joined = itertools.count(1)


@ROUTES("POST", "create_sampling_session", bodies.NewSampler)
async def _create_sampling_session(shop: Shop, owner: str, asked: bodies.NewSampler) -> Answer:
    session = shop.tenants.session(owner, asked.session_id)
    shop.check_base(asked.base_model)
    sampler_id = f"{session.session_id}:sample:{asked.sampling_session_seq_id}"
    sampler = Sampler(sampler_id, None, None)
    if asked.model_path is not None:
        model, folder = shop.tenants.weights(owner, asked.model_path, "sampler_weights")
        sampler = Sampler(sampler_id, model.model_id, folder.name)
    elif asked.base_model is None:
        raise DataError("create_sampling_session: expected base_model or model_path")
    session.add_sampler(asked.sampling_session_seq_id, sampler)
    return {"type": "create_sampling_session", "sampling_session_id": sampler_id}


@ROUTES("GET", "samplers/{sampling_session_id}", bodies.SamplerBody)
async def _sampler(shop: Shop, owner: str, asked: bodies.SamplerBody) -> Answer:
    sampler = shop.sampler(owner, asked.sampling_session_id)
    path = None if sampler.model_id is None else f"tinker://{sampler.model_id}/sampler_weights/{sampler.name}"
    return {"sampler_id": sampler.sampler_id, "base_model": shop.model_name, "model_path": path}


@ROUTES("POST", "join_sampling_session", bodies.SamplerBody)
async def _join_sampling_session(shop: Shop, owner: str, asked: bodies.SamplerBody) -> Answer:
    shop.sampler(owner, asked.sampling_session_id)
    return {"type": "join_sampling_session", "client_counter": next(_joined)}


@ROUTES("POST", "asample", bodies.Sample)
async def _asample(shop: Shop, owner: str, asked: bodies.Sample) -> Answer:
    sampler = shop.sampler(owner, asked.sampling_session_id)
    request_id = f"{sampler.sampler_id}:{asked.seq_id}"
    if not shop.samples.submit(request_id, sampler, asked):
        raise ApiError("too many samples are under way; try again later", 429)
    ids = [f"{request_id}:{number}" for number in range(asked.num_samples)]
    return {"request_id": request_id, "sample_sequence_ids": ids}


@ROUTES("POST", "retrieve_future", bodies.Retrieve)
async def _retrieve_future(shop: Shop, owner: str, asked: bodies.Retrieve) -> Answer:
    result = await _result(shop, owner, asked.request_id)
    if result is None:
        again = {"type": "try_again", "request_id": asked.request_id, "queue_state": "active"}
        return web.json_response(again, status=408)
    return web.Response(body=result.body, content_type=PROTOBUF if result.is_proto else "application/json")


async def _result(shop: Shop, owner: str, request_id: str) -> Result | None:
    found = FUTURE.fullmatch(request_id)
    if found is None:
        raise UnknownName(f"request {request_id[:80]!r} does not exist")
    if found[2] == "train":
        return await shop.desk.result(shop.tenants.model(owner, found[1]), int(found[4]), POLL_SECONDS)
    shop.tenants.session(owner, found[1].partition(":")[0])
    try:
        return await shop.samples.result(request_id, POLL_SECONDS)
    except UnknownName as error:  # of a server before this one: the client gives the request again
        raise ApiError(str(error), 410) from error


@ROUTES("POST", "cancel_future", bodies.Retrieve)
async def _cancel_future(shop: Shop, owner: str, asked: bodies.Retrieve) -> Answer:
    found = FUTURE.fullmatch(asked.request_id)
    if found is not None and found[2] == "sample":
        shop.tenants.session(owner, found[1].partition(":")[0])
        shop.samples.cancel(asked.request_id)
    return {"type": "cancel_future"}


@ROUTES("GET", "token_versions/{request_id}", bodies.Retrieve)
async def _versions(shop: Shop, owner: str, asked: bodies.Retrieve) -> Answer:
    """Return the version of the weights for each token of each sample of a request."""
    await _result(shop, owner, asked.request_id)
    return {"versions": shop.samples.versions.get(asked.request_id)}
