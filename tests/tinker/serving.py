"""A server of the Tinker API in a thread, on engines that tests share."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.tinker.client import TOKENS, client_package


class Served:
    """Engines, and the server on them."""

    def __init__(self, model: Path, beside: Any = None, **options: Any) -> None:
        client_package()
        from rlite.assembly.commands.options import TinkerConfig
        from rlite.engine.inference import RliteInferenceEngine
        from rlite.engine.train import RliteTrainEngine
        from rlite.trainer.model.modules import policy_module

        self.config = TinkerConfig(model=str(model), port=0, **{"deterministic": True, **options})
        self.train = RliteTrainEngine(policy_module(model))
        self.train.build(colocate_with=beside, **self.config.train_options())
        self.serve = RliteInferenceEngine(model)
        self.serve.build(colocate_with=self.train, **self.config.serve_options())
        self._clients: dict[str, list[Any]] = {}

    @contextmanager
    def server(self, folder: Path, **options: Any) -> Iterator[str]:
        """The address of a server on a folder. At the end the engines forget everything, as a killed server's do."""
        from rlite.assembly.commands.tinker import make_server

        address: Future[str] = Future()
        loop = asyncio.new_event_loop()
        is_over = asyncio.Event()
        config = self.config.model_copy(update={"folder": str(folder), **options})

        async def run() -> None:
            async with make_server(self.train, self.serve, config, TOKENS) as server:
                address.set_result(server.url)
                await is_over.wait()

        def work() -> None:
            try:
                loop.run_until_complete(run())
            except BaseException as error:
                if not address.done():
                    address.set_exception(error)
                raise

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            yield address.result(60)
        finally:
            for client in self._clients.pop(address.result(), []):
                client.close("success").result(60)
            loop.call_soon_threadsafe(is_over.set)
            thread.join(60)
            for name in list(self.train.adapters):
                self.train.remove_adapter(name)
            for served in list(self.serve.adapters):
                self.serve.remove_adapter(served)

    def client(self, url: str, owner: str = "ann") -> Any:
        """A client of the real package, closed with its server: its heartbeat would log for as long as it lives."""
        client = client_package().ServiceClient(base_url=url, api_key=TOKENS[owner])
        self._clients.setdefault(url, []).append(client)
        return client

    def trained(self, service: Any, rank: int = 4, seed: int = 1) -> Any:
        """A training client."""
        return service.create_lora_training_client(self.config.model, rank=rank, seed=seed).result()


def step(client: Any, data: list[Any], loss: str = "cross_entropy", lr: float = 2e-2, **config: float) -> Any:
    """One step, whose two requests are sent before the first is answered."""
    forward = client.forward_backward(data, loss, config or None)
    optim = client.optim_step(client_package().types.AdamParams(learning_rate=lr))
    found = forward.result()
    optim.result()
    return found


def factors(served: Served, client: Any) -> list[torch.Tensor]:
    """Values of a client's adapter in the engine."""
    from rlite.engine.registry import AdapterTrainWorker

    (weights,) = served.train._workers.call(AdapterTrainWorker.adapter_weights, client.model_id)
    return [tensor for pair in weights.factors.values() for tensor in pair]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def ask(
    url: str, path: str, body: bytes | dict[str, Any], owner: str = "ann", timeout: float = 60, **headers: str
) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/api/v1/{path}", data, {"X-API-Key": TOKENS.get(owner, owner), **headers})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            is_json = answer.headers.get_content_type() == "application/json"
            return answer.status, json.loads(answer.read()) if is_json else answer.read()
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def settled(url: str, path: str, body: dict[str, Any]) -> Any:
    """The result of a request, waited for."""
    status, answer = ask(url, path, body)
    assert status == 200, answer
    while True:
        status, result = ask(url, "retrieve_future", {"request_id": answer["request_id"]})
        if status != 408:
            return result
