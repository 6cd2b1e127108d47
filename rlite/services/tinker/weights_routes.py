"""Routes of saved weights, as the client's RestClient and `tinker` command call them."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from functools import partial
from typing import Any

from rlite.errors import DataError
from rlite.imports import optional
from rlite.services.tinker import bodies
from rlite.services.tinker.routes import Answer, Routes, Shop
from rlite.services.tinker.tenants import Kind, TenantModel
from rlite.services.tinker.weights import drop_weights, expiry, link, read_facts, saved_weights, write_facts

with optional("rlite tinker needs", "tinker"):
    from aiohttp import web

ROUTES = Routes()
KINDS: dict[Kind, str] = {"weights": "training", "sampler_weights": "sampler"}


@ROUTES("POST", "weights_info", bodies.WeightsInfo)
async def _weights_info(shop: Shop, owner: str, asked: bodies.WeightsInfo) -> Answer:
    spec = shop.tenants.weights(owner, asked.tinker_path)[0].spec
    layers = {"train_unembed": False, "train_attn": spec["train_attn"], "train_mlp": spec["train_mlp"]}
    return {"base_model": shop.model_name, "is_lora": True, "lora_rank": spec["rank"], **layers}


@ROUTES("POST", "copy_weights", bodies.CopyWeights)
async def _copy_weights(shop: Shop, owner: str, asked: bodies.CopyWeights) -> Answer:
    source, folder = shop.tenants.weights(owner, asked.source_path)
    if asked.session_id is None:  # the client names a project, and tenants have none here
        session, number = shop.tenants.open_session(owner), 0
    else:
        session, number = shop.tenants.session(owner, asked.session_id), asked.model_seq_id or 0
    if (found := session.models.get(number)) is not None and not found.is_gone:
        raise DataError(f"copy_weights: {found.model_id} is a model that learns; take another model_seq_id")

    def copy() -> str:
        model = found or shop.tenants.new_model(session, number, dict(source.spec), is_gone=True)
        kind: Any = folder.parent.name
        target = model.folder / kind / folder.name
        target.parent.mkdir(mode=0o700, exist_ok=True)
        link(folder, target)
        facts = read_facts(folder) or {}
        write_facts(target, {**facts, "time": time.time(), "expires": expiry(asked.ttl_seconds)})
        return model.path(kind, folder.name)

    return {"tinker_path": await shop.desk.do(copy)}


@ROUTES("GET", "training_runs", bodies.Page)
async def _runs(shop: Shop, owner: str, asked: bodies.Page) -> Answer:
    runs, cursor = _part(asked, list(shop.tenants.models(owner))[::-1])
    return {"training_runs": [_told(shop, model) for model in runs], "cursor": cursor}


@ROUTES("GET", "training_runs/{model_id}", bodies.ModelBody)
async def _run(shop: Shop, owner: str, asked: bodies.ModelBody) -> Answer:
    return _told(shop, shop.tenants.model(owner, asked.model_id))


def _told(shop: Shop, model: TenantModel) -> dict[str, Any]:
    last = {kind: next(reversed(_checkpoints(model, kind)), None) for kind in KINDS}
    return {
        "training_run_id": model.model_id,
        "base_model": shop.model_name,
        "model_owner": model.owner,
        "is_lora": True,
        "lora_rank": model.spec["rank"],
        "last_request_time": _moment(model.folder.stat().st_mtime),
        "last_checkpoint": last["weights"],
        "last_sampler_checkpoint": last["sampler_weights"],
        "user_metadata": model.spec.get("user_metadata"),
    }


@ROUTES("GET", "training_runs/{model_id}/checkpoints", bodies.Page)
@ROUTES("GET", "checkpoints", bodies.Page)
async def _list(shop: Shop, owner: str, asked: bodies.Page) -> Answer:
    own = [shop.tenants.model(owner, asked.model_id)] if asked.model_id else shop.tenants.models(owner)
    found = [each for model in own for kind in KINDS for each in _checkpoints(model, kind)]
    part, cursor = _part(asked, sorted(found, key=lambda each: str(each["time"]), reverse=True))
    return {"checkpoints": part, "cursor": cursor}


@ROUTES("DELETE", "training_runs/{model_id}/checkpoints/{kind}/{name}", bodies.SavedName)
async def _delete(shop: Shop, owner: str, asked: bodies.SavedName) -> Answer:
    _, folder = shop.tenants.weights(owner, asked.path)
    await shop.desk.do(partial(drop_weights, folder))
    return web.Response(status=204)


@ROUTES("PUT", "training_runs/{model_id}/checkpoints/{kind}/{name}/ttl", bodies.SavedName)
async def _set_ttl(shop: Shop, owner: str, asked: bodies.SavedName) -> Answer:
    _, folder = shop.tenants.weights(owner, asked.path)

    def change() -> None:
        if (facts := read_facts(folder)) is not None:
            write_facts(folder, {**facts, "expires": expiry(asked.ttl_seconds)})

    await shop.desk.do(change)
    return web.Response(status=204)


def _part(asked: bodies.Page, found: list[Any]) -> tuple[list[Any], dict[str, int]]:
    cursor = {"offset": asked.offset, "limit": asked.limit, "total_count": len(found)}
    return found[asked.offset : asked.offset + asked.limit], cursor


def _checkpoints(model: TenantModel, kind: Kind) -> list[dict[str, Any]]:
    """Return what the API tells of saved weights, the oldest first."""
    return [
        {
            "checkpoint_id": f"{kind}/{folder.name}",
            "checkpoint_type": KINDS[kind],
            "time": _moment(facts["time"]),
            "tinker_path": model.path(kind, folder.name),
            "size_bytes": sum(file.stat().st_size for file in folder.iterdir()),
            "user_metadata": facts["user_metadata"],
            "expires_at": facts["expires"] and _moment(facts["expires"]),
        }
        for folder, facts in saved_weights(model.folder / kind)
    ]


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
