"""Routes of saved weights, as the client's RestClient and `tinker` command call them."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

from rlite.errors import DataError
from rlite.imports import optional
from rlite.services.tinker import bodies
from rlite.services.tinker.shop import OWNER, ROOT, Shop, read
from rlite.services.tinker.tenants import TenantModel
from rlite.services.tinker.trainer import drop_weights, facts_file, link, read_facts, saved_weights

with optional("rlite tinker needs", "tinker"):
    from aiohttp import web


class WeightsRoutes:
    """Answers requests about saved weights.

    Args:
        shop: what the routes work with.
    """

    def __init__(self, shop: Shop) -> None:
        self._shop = shop

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.post(f"{ROOT}/weights_info", self._weights_info),
            web.post(f"{ROOT}/copy_weights", self._copy_weights),
            web.get(f"{ROOT}/training_runs", self._runs),
            web.get(f"{ROOT}/training_runs/{{model}}", self._run),
            web.get(f"{ROOT}/training_runs/{{model}}/checkpoints", self._checkpoints),
            web.delete(f"{ROOT}/training_runs/{{model}}/checkpoints/{{kind}}/{{name}}", self._delete),
            web.get(f"{ROOT}/checkpoints", self._checkpoints),
        ]

    async def _weights_info(self, request: web.Request) -> web.Response:
        asked = await read(request, bodies.WeightsInfo)
        model, _ = self._shop.tenants.weights(request[OWNER], asked.tinker_path)
        spec = {key: model.spec[key] for key in ("train_attn", "train_mlp")}
        answer = {"base_model": self._shop.model_name, "is_lora": True, "train_unembed": False, **spec}
        return web.json_response({**answer, "lora_rank": model.spec["rank"]})

    async def _copy_weights(self, request: web.Request) -> web.Response:
        asked = await read(request, bodies.CopyWeights)
        source, folder = self._shop.tenants.weights(request[OWNER], asked.source_path)
        if asked.session_id is None or asked.model_seq_id is None:
            raise DataError("copy_weights: expected session_id and model_seq_id")
        session = self._shop.tenants.session(request[OWNER], asked.session_id)
        model = session.models.get(asked.model_seq_id)
        if model is None:
            model = self._shop.tenants.new_model(session, asked.model_seq_id, dict(source.spec))
            model.is_gone = True
            model.write()
        kind: Any = folder.parent.name
        target = model.folder / kind / folder.name
        target.parent.mkdir(mode=0o700, exist_ok=True)
        await asyncio.to_thread(link, folder, target)
        link_facts = facts_file(folder).read_bytes()
        facts_file(target).write_bytes(link_facts)
        return web.json_response({"tinker_path": model.path(kind, folder.name)})

    async def _runs(self, request: web.Request) -> web.Response:
        runs = [self._told(model) for model in self._shop.tenants.models(request[OWNER])]
        cursor = {"offset": 0, "limit": len(runs), "total_count": len(runs)}
        return web.json_response({"training_runs": runs, "cursor": cursor})

    async def _run(self, request: web.Request) -> web.Response:
        return web.json_response(self._told(self._shop.tenants.model(request[OWNER], request.match_info["model"])))

    def _told(self, model: TenantModel) -> dict[str, Any]:
        kinds = {"last_checkpoint": "weights", "last_sampler_checkpoint": "sampler_weights"}
        last = {key: _checkpoints(model, kind)[-1:] for key, kind in kinds.items()}
        told: dict[str, Any] = {
            "training_run_id": model.model_id,
            "base_model": self._shop.model_name,
            "model_owner": model.owner,
            "is_lora": True,
            "lora_rank": model.spec["rank"],
            "last_request_time": _moment(model.folder.stat().st_mtime),
        }
        return {**told, **{key: found[0] if found else None for key, found in last.items()}}

    async def _checkpoints(self, request: web.Request) -> web.Response:
        name = request.match_info.get("model")
        own = list(self._shop.tenants.models(request[OWNER])) if name is None else [
            self._shop.tenants.model(request[OWNER], name)
        ]  # fmt: skip
        found = [each for model in own for kind in ("weights", "sampler_weights") for each in _checkpoints(model, kind)]
        return web.json_response({"checkpoints": found})

    async def _delete(self, request: web.Request) -> web.Response:
        given = request.match_info
        path = f"tinker://{given['model']}/{given['kind']}/{given['name']}"
        _, folder = self._shop.tenants.weights(request[OWNER], path)
        drop_weights(folder)
        return web.Response(status=204)


def _checkpoints(model: TenantModel, kind: str) -> list[dict[str, Any]]:
    """Return what the API tells of saved weights, the oldest first."""
    found = []
    for folder in saved_weights(model.folder / kind):
        facts = read_facts(folder) or {}
        found.append(
            {
                "checkpoint_id": f"{kind}/{folder.name}",
                "checkpoint_type": "training" if kind == "weights" else "sampler",
                "time": _moment(facts["time"]),
                "tinker_path": f"tinker://{model.model_id}/{kind}/{folder.name}",
                "size_bytes": sum(file.stat().st_size for file in folder.iterdir()),
                "user_metadata": facts["user_metadata"],
                "expires_at": facts["expires"] and _moment(facts["expires"]),
            }
        )
    return found


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
