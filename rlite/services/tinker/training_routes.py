"""Routes of models and of their training."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from pathlib import Path
from typing import Any

from rlite.errors import ConfigError, DataError
from rlite.imports import optional
from rlite.services.endpoint.requests import ApiError
from rlite.services.tinker import bodies
from rlite.services.tinker.losses import check
from rlite.services.tinker.routes import MAX_BODY, OWNER, Answer, Routes, Shop
from rlite.services.tinker.tenants import Request, Session, TenantModel, checked_name
from rlite.services.tinker.weights import link
from rlite.services.tinker.wire import PROTOBUF, read_forward, upgrade

with optional("rlite tinker needs", "tinker"):
    from aiohttp import web

    from rlite.services.endpoint.endpoint import read_body

ROUTES = Routes()


@ROUTES("POST", "create_model", bodies.NewModel)
async def _create_model(shop: Shop, owner: str, asked: bodies.NewModel) -> Answer:
    session = shop.tenants.session(owner, asked.session_id)
    shop.check_base(asked.base_model)
    if (lora := asked.lora_config) is None:
        raise DataError("lora_config: expected one; this server trains adapters, and no whole model")
    if not (lora.train_attn or lora.train_mlp):
        raise DataError("lora_config: expected train_attn or train_mlp; train_unembed alone trains nothing here")
    try:
        shop.check_rank(lora.rank)
    except ConfigError as error:
        raise DataError(f"lora_config.rank={lora.rank}: {error}") from error
    seed = secrets.randbelow(2**31) if lora.seed is None else lora.seed
    spec = {"rank": lora.rank, "train_attn": lora.train_attn, "train_mlp": lora.train_mlp, "asked_seed": lora.seed}
    answer = {"type": "create_model", "model_id": f"{session.session_id}:train:{asked.model_seq_id}"}
    further = {"seed": seed, "answer": answer, "user_metadata": asked.user_metadata}
    return _new_model(shop, session, asked.model_seq_id, spec, further)


def _new_model(
    shop: Shop, session: Session, number: int, spec: dict[str, Any], further: dict[str, Any], source: Path | None = None
) -> Answer:
    """Return the future of a new model. A retry changes nothing.

    Raises:
        DataError: the tenant has too many models, or the model exists in another form.
    """
    model = session.models.get(number)
    if model is None:
        since = time.monotonic() - shop.limits.idle_minutes * 60
        ends = {own.session_id for own in shop.tenants.sessions.values() if own.is_finished or own.used_at < since}
        live = [own for own in shop.tenants.models(session.owner) if not own.is_gone]
        live = [own for own in live if own.session_id not in ends]
        if len(live) >= (most := shop.limits.max_models):
            told = "unload one, or finish its session (ServiceClient.close())"
            raise DataError(f"tenant {session.owner!r} has {len(live)} models, and {most} are allowed; {told}")
        if source is not None:
            link(source, session.folder / f"train-{number}" / further["load"])
        model = shop.tenants.new_model(session, number, {**spec, **further})
        shop.desk.create(model, further["answer"])
    elif {key: model.spec.get(key) for key in spec} != spec:
        raise DataError(f"model {model.model_id} was already made in another form: one model has two writers")
    return {"request_id": f"{model.model_id}:0", "model_id": model.model_id}


@ROUTES("POST", "load_weights", bodies.LoadWeights)
async def _load_weights(shop: Shop, owner: str, asked: bodies.LoadWeights) -> Answer:
    source, folder = shop.tenants.weights(owner, asked.path, "weights")
    if asked.model_id is not None:
        given = {"path": asked.path, "optimizer": asked.optimizer}
        return await _accept(shop, shop.tenants.model(owner, asked.model_id), asked.seq_id, "load_weights", given)
    if asked.session_id is None or asked.model_seq_id is None:
        raise DataError("load_weights: expected model_id and seq_id, or session_id and model_seq_id")
    shop.check_base(asked.base_model)
    session = shop.tenants.session(owner, asked.session_id)
    model_id = f"{session.session_id}:train:{asked.model_seq_id}"
    answer = {"type": "load_weights", "path": asked.path, "model_id": model_id}
    spec = {key: source.spec[key] for key in ("rank", "train_attn", "train_mlp")}
    spec |= {"optimizer": asked.optimizer, "path": asked.path}
    further = {"load": "state-0", "answer": answer, "user_metadata": asked.user_metadata}
    return _new_model(shop, session, asked.model_seq_id, spec, further, folder)


@ROUTES("POST", "get_info", bodies.ModelBody)
async def _get_info(shop: Shop, owner: str, asked: bodies.ModelBody) -> Answer:
    model, name = shop.tenants.model(owner, asked.model_id), shop.model_name
    data = {"arch": "causal_lm", "model_name": name, "tokenizer_id": name}
    answer = {"type": "get_info", "model_data": data, "model_id": model.model_id, "model_name": name}
    return {**answer, "is_lora": True, "lora_rank": model.spec["rank"]}


@ROUTES("POST", "unload_model", bodies.ModelBody)
async def _unload_model(shop: Shop, owner: str, asked: bodies.ModelBody) -> Answer:
    model = shop.tenants.model(owner, asked.model_id)
    await shop.desk.unload(model)
    return {"type": "unload_model", "model_id": model.model_id}


async def _accept(
    shop: Shop, model: TenantModel, seq_id: int | None, kind: str, body: bytes | dict[str, Any]
) -> Answer:
    if seq_id is None:
        raise DataError("seq_id: expected the number of the request")
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request_id = await shop.desk.accept(model, seq_id, Request(kind, data))
    return {"request_id": request_id, "model_id": model.model_id}


@ROUTES("POST", "forward_backward", None)
async def _forward_backward(shop: Shop, owner: str, request: web.Request) -> Answer:
    body = await read_body(request, MAX_BODY)
    if request.content_type != PROTOBUF:
        raise DataError(f"expected {PROTOBUF}, found {request.content_type[:80]}; {upgrade('an older one')}")
    asked, canonical = await asyncio.to_thread(read_forward, body)
    model = shop.tenants.model(request[OWNER], asked.model_id)
    await asyncio.to_thread(check, asked, shop.vocab_size, shop.max_length)
    return await _accept(shop, model, asked.seq_id, "forward_backward", canonical)


@ROUTES("POST", "forward")
async def _forward(shop: Shop, owner: str, asked: bodies.Body) -> Answer:
    raise DataError(upgrade("an older one"))


@ROUTES("POST", "optim_step", bodies.OptimStep)
async def _optim_step(shop: Shop, owner: str, asked: bodies.OptimStep) -> Answer:
    if asked.adam_params is None:
        raise DataError("optim_step: expected adam_params; this server has AdamW alone")
    model = shop.tenants.model(owner, asked.model_id)
    return await _accept(shop, model, asked.seq_id, "optim_step", asked.adam_params.model_dump())


@ROUTES("POST", "save_weights", bodies.SaveWeights)
async def _save_weights(shop: Shop, owner: str, asked: bodies.SaveWeights) -> Answer:
    return await _save(shop, owner, asked, "save_weights")


@ROUTES("POST", "save_weights_for_sampler", bodies.SaveForSampler)
async def _save_for_sampler(shop: Shop, owner: str, asked: bodies.SaveForSampler) -> Answer:
    if (asked.path is None) == (asked.sampling_session_seq_id is None):
        raise DataError("save_weights_for_sampler: expected path or sampling_session_seq_id")
    return await _save(shop, owner, asked, "save_weights_for_sampler")


async def _save(shop: Shop, owner: str, asked: bodies.SaveWeights, kind: str) -> Answer:
    if asked.path is not None:
        checked_name(asked.path)
    model = shop.tenants.model(owner, asked.model_id)
    return await _accept(shop, model, asked.seq_id, kind, asked.model_dump(exclude={"model_id", "seq_id"}))


@ROUTES("POST", "save_weights_external")
async def _save_weights_external(shop: Shop, owner: str, asked: bodies.Body) -> Answer:
    raise ApiError("this server has no external storage; use save_state, and the server's folder", 501)
