"""Routes of models and of their training."""

from __future__ import annotations

import asyncio
import json
import secrets
from pathlib import Path
from typing import Any

from rlite.errors import DataError
from rlite.imports import optional
from rlite.services.endpoint.requests import ApiError
from rlite.services.tinker import bodies
from rlite.services.tinker.losses import check
from rlite.services.tinker.shop import MAX_BODY, OWNER, ROOT, Shop, read
from rlite.services.tinker.tenants import Request, Session, TenantModel, checked_name
from rlite.services.tinker.trainer import link
from rlite.services.tinker.wire import PROTOBUF, read_forward, upgrade

with optional("rlite tinker needs", "tinker"):
    from aiohttp import web

    from rlite.services.endpoint.endpoint import read_body


class TrainingRoutes:
    """Answers requests that make and train models.

    Args:
        shop: what the routes work with.
    """

    def __init__(self, shop: Shop) -> None:
        self._shop = shop

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.post(f"{ROOT}/create_model", self._create_model),
            web.post(f"{ROOT}/load_weights", self._load_weights),
            web.post(f"{ROOT}/get_info", self._get_info),
            web.post(f"{ROOT}/unload_model", self._unload_model),
            web.post(f"{ROOT}/forward_backward", self._forward_backward),
            web.post(f"{ROOT}/forward", self._forward),
            web.post(f"{ROOT}/optim_step", self._optim_step),
            web.post(f"{ROOT}/save_weights", self._save_weights),
            web.post(f"{ROOT}/save_weights_for_sampler", self._save_weights_for_sampler),
            web.post(f"{ROOT}/create_custom_loss", self._create_custom_loss),
            web.post(f"{ROOT}/save_weights_external", self._save_weights_external),
        ]

    async def _create_model(self, request: web.Request) -> web.Response:
        asked = await read(request, bodies.NewModel)
        session = self._shop.tenants.session(request[OWNER], asked.session_id)
        self._shop.check_base(asked.base_model)
        if (lora := asked.lora_config) is None:
            raise DataError("lora_config: expected one; this server trains adapters, and no whole model")
        if not (lora.train_attn or lora.train_mlp):
            raise DataError("lora_config: expected train_attn or train_mlp; train_unembed alone trains nothing here")
        seed = secrets.randbelow(2**31) if lora.seed is None else lora.seed
        spec = {"rank": lora.rank, "train_attn": lora.train_attn, "train_mlp": lora.train_mlp, "asked_seed": lora.seed}
        model_id = f"{session.session_id}:train:{asked.model_seq_id}"
        answer = {"type": "create_model", "model_id": model_id}
        return self._new_model(session, asked.model_seq_id, spec, {"seed": seed, "answer": answer})

    def _new_model(
        self, session: Session, number: int, spec: dict[str, Any], further: dict[str, Any], source: Path | None = None
    ) -> web.Response:
        """Return the future of a new model. A retry changes nothing.

        Raises:
            DataError: the tenant has too many models, or the model exists in another form.
        """
        model = session.models.get(number)
        if model is None:
            live = [own for own in self._shop.tenants.models(session.owner) if not own.is_gone]
            live = [own for own in live if not self._shop.tenants.sessions[own.folder.parent.name].is_finished]
            if len(live) >= (most := self._shop.max_models):
                told = "unload one, or finish its session (ServiceClient.close())"
                raise DataError(f"tenant {session.owner!r} has {len(live)} models, and {most} are allowed; {told}")
            if source is not None:
                link(source, session.folder / f"train-{number}" / further["load"])
            model = self._shop.tenants.new_model(session, number, {**spec, **further})
            self._shop.desk.create(model, further["answer"])
        elif {key: model.spec.get(key) for key in spec} != spec:
            raise DataError(f"model {model.model_id} was already made in another form: one model has two writers")
        return web.json_response({"request_id": f"{model.model_id}:0", "model_id": model.model_id})

    async def _load_weights(self, request: web.Request) -> web.Response:
        asked = await read(request, bodies.LoadWeights)
        source, folder = self._shop.tenants.weights(request[OWNER], asked.path, "weights")
        if asked.model_id is not None:
            model = self._shop.tenants.model(request[OWNER], asked.model_id)
            body = json.dumps({"path": asked.path, "optimizer": asked.optimizer}).encode()
            return await self._accept(model, asked.seq_id, "load_weights", body)
        if asked.session_id is None or asked.model_seq_id is None:
            raise DataError("load_weights: expected model_id and seq_id, or session_id and model_seq_id")
        self._shop.check_base(asked.base_model)
        session = self._shop.tenants.session(request[OWNER], asked.session_id)
        model_id = f"{session.session_id}:train:{asked.model_seq_id}"
        answer = {"type": "load_weights", "path": asked.path, "model_id": model_id}
        spec = {key: source.spec[key] for key in ("rank", "train_attn", "train_mlp")}
        spec |= {"optimizer": asked.optimizer, "path": asked.path}
        return self._new_model(session, asked.model_seq_id, spec, {"load": "state-0", "answer": answer}, folder)

    async def _get_info(self, request: web.Request) -> web.Response:
        asked = await read(request, bodies.ModelBody)
        model = self._shop.tenants.model(request[OWNER], asked.model_id)
        name, rank = self._shop.model_name, model.spec["rank"]
        data = {"arch": "causal_lm", "model_name": name, "tokenizer_id": name}
        answer = {"type": "get_info", "model_data": data, "model_id": model.model_id, "model_name": name}
        return web.json_response({**answer, "is_lora": True, "lora_rank": rank})

    async def _unload_model(self, request: web.Request) -> web.Response:
        asked = await read(request, bodies.ModelBody)
        model = self._shop.tenants.model(request[OWNER], asked.model_id)
        await self._shop.desk.unload(model)
        return web.json_response({"type": "unload_model", "model_id": model.model_id})

    async def _accept(self, model: TenantModel, seq_id: int | None, kind: str, body: bytes) -> web.Response:
        if seq_id is None:
            raise DataError("seq_id: expected the number of the request")
        request_id = await self._shop.desk.accept(model, seq_id, Request(kind, body))
        return web.json_response({"request_id": request_id, "model_id": model.model_id})

    async def _forward_backward(self, request: web.Request) -> web.Response:
        body = await read_body(request, MAX_BODY)
        if request.content_type != PROTOBUF:
            raise DataError(f"expected {PROTOBUF}, found {request.content_type[:80]}; {upgrade('an older one')}")
        asked, canonical = await asyncio.to_thread(read_forward, body)
        model = self._shop.tenants.model(request[OWNER], asked.model_id)
        check(asked, self._shop.vocab_size, self._shop.max_length)
        return await self._accept(model, asked.seq_id, "forward_backward", canonical)

    async def _forward(self, request: web.Request) -> web.Response:
        raise DataError(upgrade("an older one"))

    async def _optim_step(self, request: web.Request) -> web.Response:
        asked = await read(request, bodies.OptimStep)
        if asked.adam_params is None:
            raise DataError("optim_step: expected adam_params; this server has AdamW alone")
        model = self._shop.tenants.model(request[OWNER], asked.model_id)
        body = json.dumps({"adam_params": asked.adam_params.model_dump()}).encode()
        return await self._accept(model, asked.seq_id, "optim_step", body)

    async def _save_weights(self, request: web.Request) -> web.Response:
        asked = await read(request, bodies.SaveWeights)
        return await self._save(request, asked, "save_weights")

    async def _save_weights_for_sampler(self, request: web.Request) -> web.Response:
        asked = await read(request, bodies.SaveForSampler)
        if (asked.path is None) == (asked.sampling_session_seq_id is None):
            raise DataError("save_weights_for_sampler: expected path or sampling_session_seq_id")
        return await self._save(request, asked, "save_weights_for_sampler")

    async def _save(self, request: web.Request, asked: bodies.SaveWeights, kind: str) -> web.Response:
        if asked.path is not None:
            checked_name(asked.path)
        model = self._shop.tenants.model(request[OWNER], asked.model_id)
        body = json.dumps(asked.model_dump(exclude={"model_id", "seq_id"})).encode()
        return await self._accept(model, asked.seq_id, kind, body)

    async def _create_custom_loss(self, request: web.Request) -> web.Response:
        raise ApiError("custom losses run in the client here (custom_loss_server_side is false)", 501)

    async def _save_weights_external(self, request: web.Request) -> web.Response:
        raise ApiError("this server has no external storage; use save_state, and the server's folder", 501)
