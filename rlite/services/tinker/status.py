"""The state of a server in one file of its folder, which `rlite view` shows."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

from rlite.files import replace
from rlite.services.tinker.routes import Shop

FILE = "tinker.json"
SECONDS = 2.0
MAX_SHOWN = 32
"""models, those that were used last"""


async def keep_status(shop: Shop) -> None:
    """Write the state whenever it has changed, until cancelled.

    Args:
        shop: objects of the server.
    """
    before = b""
    while True:
        now = json.dumps(status(shop)).encode()
        if now != before:
            with suppress(OSError):  # a full disk: journals say so
                await asyncio.to_thread(replace, shop.tenants.folder / FILE, now, 0o600)
                before = now
        await asyncio.sleep(SECONDS)


def status(shop: Shop) -> dict[str, Any]:
    """Return models with their tenants, queues and newest metrics. It has no names of weights and no data."""
    models = sorted(shop.tenants.models(), key=lambda each: each.used_at, reverse=True)
    told = [
        {
            "model": model.model_id,
            "tenant": model.owner,
            "rank": model.spec["rank"],
            "state": "ended" if model.is_gone else "in memory" if model.is_resident else "on disk",
            "waiting": len(model.pending),
            "steps": model.num_steps,
            "problem": model.broken,
            "points": list(model.points),
        }
        for model in models[:MAX_SHOWN]
    ]
    return {"base": shop.model_name, "samples": shop.samples.num_running, "num_models": len(models), "models": told}
