"""The route that gives a running server other weights, and who may use it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file

import rlite
from rlite.errors import ConfigError
from rlite.rollout.openai import AgentEndpoint, AgentSession
from rlite.services.endpoint.admin import ROUTE, Admin
from rlite.services.endpoint.guard import ADMIN_VARIABLE, find_admin_token
from tests.tiny import build_model_dir

TOKEN = "an-administrators-token"
Post = Callable[[str, str, Any], Awaitable[tuple[int, Any]]]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[rlite.RliteInferenceEngine]:
    rlite.init(num_devices=1, num_threads=1)
    engine = rlite.RliteInferenceEngine(build_model_dir(tmp_path / "model", hidden=64))
    engine.build(max_model_len=64, max_num_seqs=2)
    yield engine
    rlite.shutdown()


def changed(engine: rlite.RliteInferenceEngine, name: str, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of the engine's folder with other weights."""
    folder = Path(engine.path).parent / name
    shutil.copytree(engine.path, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def permuted(tensors: dict[str, Any]) -> None:
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()


def use(engine: rlite.RliteInferenceEngine, work: Callable[[Post, str], Awaitable[None]], is_open: bool = True) -> None:
    async def run() -> None:
        admin = Admin(engine, TOKEN) if is_open else None
        endpoint = AgentEndpoint(admin=admin)
        session = AgentSession(engine, engine.tokenizer, {"greedy": True, "max_new_tokens": 6}, is_recording=False)
        async with endpoint, endpoint.serving(session) as access, aiohttp.ClientSession(access.root) as client:

            async def post(path: str, token: str, body: Any) -> tuple[int, Any]:
                async with client.post(path, json=body, headers={"Authorization": f"Bearer {token}"}) as response:
                    return response.status, await response.json()

            await work(post, access.api_key)

    asyncio.run(asyncio.wait_for(run(), 100))


async def generated(post: Post, key: str) -> tuple[list[int], set[str]]:
    """Tokens of a greedy answer, and their versions."""
    status, answer = await post("/inference/v1/generate", key, {"token_ids": [1, 2, 3]})
    assert status == 200
    [choice] = answer["choices"]
    return choice["token_ids"], {span["version"] for span in choice["weight_versions"]}


def test_loaded_weights_serve_with_the_version_of_the_request(engine: rlite.RliteInferenceEngine) -> None:
    folder = changed(engine, "new", permuted)

    async def work(post: Post, key: str) -> None:
        before, versions = await generated(post, key)
        assert versions == {"0"}
        status, answer = await post(ROUTE, TOKEN, {"path": str(folder), "version": 7})
        assert (status, answer["version"]) == (200, 7)
        assert answer["num_tensors"] == len(load_file(folder / "model.safetensors"))
        after, versions = await generated(post, key)
        assert versions == {"7"}
        assert after != before
        await post(ROUTE, TOKEN, {"path": engine.path, "version": 8})
        assert await generated(post, key) == (before, {"8"})

    use(engine, work)


WRONG: dict[str, Callable[[dict[str, Any]], None]] = {
    "missing": lambda tensors: tensors.pop("model.norm.weight"),
    "more": lambda tensors: tensors.update(more=torch.zeros(2)),
    "shape": lambda tensors: tensors.update({"model.norm.weight": torch.ones(32)}),
    "not finite": lambda tensors: tensors["model.norm.weight"].fill_(float("nan")),
}


@pytest.mark.parametrize("what", [*WRONG, "no folder", "damaged"])
def test_weights_that_do_not_fit_leave_the_earlier_version_served(
    engine: rlite.RliteInferenceEngine, what: str
) -> None:
    folder = changed(engine, "secret-place", WRONG.get(what, permuted))
    if what == "no folder":
        shutil.rmtree(folder)
    if what == "damaged":
        (folder / "model.safetensors").write_bytes(b"no tensors")

    async def work(post: Post, key: str) -> None:
        before = await generated(post, key)
        status, answer = await post(ROUTE, TOKEN, {"path": str(folder), "version": 1})
        assert status == 400
        assert "version 0 is served on" in answer["error"]["message"]
        assert "secret-place" not in str(answer)
        assert await generated(post, key) == before

    use(engine, work)


def test_the_route_is_for_the_administrators_token_alone(engine: rlite.RliteInferenceEngine) -> None:
    body = {"path": engine.path, "version": 1}

    async def opened(post: Post, key: str) -> None:
        for token in ("", "wrong", key, TOKEN[:-1], TOKEN + "x"):
            assert (await post(ROUTE, token, body))[0] == 401
        assert (await post("/inference/v1/generate", TOKEN, {"token_ids": [1]}))[0] == 401
        for wrong in (
            {},
            {**body, "version": -1},
            {**body, "version": True},
            {**body, "path": 3},
            {**body, "x": 1},
            [],
        ):
            assert (await post(ROUTE, TOKEN, wrong))[0] == 400
        assert engine.get_version() == 0

    async def closed(post: Post, key: str) -> None:
        for token in (TOKEN, key):
            assert (await post(ROUTE, token, body))[0] == 404

    use(engine, opened)
    use(engine, closed, is_open=False)


def test_the_administrators_token_is_found_and_is_another_than_that_of_requests(tmp_path: Path) -> None:
    file = tmp_path / "admin"
    file.write_text(TOKEN + "\n")
    file.chmod(0o600)
    assert find_admin_token(None, {}, "x") is None
    assert find_admin_token(str(file), {}, "x") == TOKEN
    assert find_admin_token(str(file), {ADMIN_VARIABLE: "another-token-of-mine"}, "x") == "another-token-of-mine"
    with pytest.raises(ConfigError, match="the same token"):
        find_admin_token(str(file), {}, TOKEN)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        find_admin_token(str(file), {}, "x")
    with pytest.raises(ConfigError, match="16 or more"):
        find_admin_token(None, {ADMIN_VARIABLE: "short"}, "x")
