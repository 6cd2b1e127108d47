"""vLLM behind the doors: weights given to a running server, and a judge on an engine of its own."""

from __future__ import annotations

import asyncio
import json
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlite import RliteInferenceEngine
from rlite.services.endpoint.admin import ROUTE
from tests.integration.test_admin_weights import TOKEN, WRONG, Post, changed, generated, permuted, use
from tests.integration.test_engine_judges import ROW, chosen, judge_dir, served, workflow
from tests.integration.test_remote_servers import KEY, Server
from tests.integration.worlds import MARK, ray_session
from tests.tiny import build_model_dir
from tests.vllm.processes import servers

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(840)]


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with ray_session(2) as mark:
        yield
        assert servers(mark=MARK, value=mark) == [], "a released engine leaves no process"


def test_a_running_vllm_serves_loaded_weights_and_keeps_its_own_if_they_do_not_fit(tmp_path: Path) -> None:
    engine = RliteInferenceEngine(build_model_dir(tmp_path / "model", hidden=128), executor="vllm")
    engine.build(max_model_len=64, max_num_seqs=2, data_parallel_size=1)
    new, wrong = changed(engine, "new", permuted), changed(engine, "wrong", WRONG["shape"])

    async def work(post: Post, key: str) -> None:
        before, versions = await generated(post, key)
        assert versions == {"0"}
        status, answer = await post(ROUTE, TOKEN, {"path": str(wrong), "version": 6})
        assert (status, await generated(post, key)) == (400, (before, {"0"})), answer
        status, answer = await post(ROUTE, TOKEN, {"path": str(new), "version": 7})
        assert status == 200, answer
        after, versions = await generated(post, key)
        assert versions == {"7"}
        assert after != before

    use(engine, work)
    expected = RliteInferenceEngine(new, executor="vllm")
    asked: dict[str, Any] = {"greedy": True, "max_new_tokens": 6, "ignore_eos": True}
    loaded = engine.generate([[1, 2, 3]], asked)[0].outputs[0].token_ids
    engine.release()
    expected.build(max_model_len=64, max_num_seqs=2, data_parallel_size=1)
    assert loaded == expected.generate([[1, 2, 3]], asked)[0].outputs[0].token_ids
    expected.release()
    shutil.rmtree(new)


def test_vllm_judges_with_the_question_that_every_judge_reads(tmp_path: Path) -> None:
    made = workflow(chosen(judge_dir(tmp_path / "judge", hidden=128), executor="vllm", num_devices=1))
    engines = served(made)
    assert engines.build_apart(2, 0) == 1
    [judge] = engines.judges.values()
    arguments = {**ROW, "completions": "4", "prompt_ids": [1], "completion_ids": [2]}
    question = judge.judges[0].question(arguments)
    assert judge.judges[0].ask is not None
    reply = asyncio.run(judge.judges[0].ask(question))
    assert reply == judge.engine.chat(question, {"temperature": 0.0, "max_new_tokens": 8}).outputs[0].text
    engines.release()


def test_the_command_serves_vllm_until_it_is_ended(tmp_path: Path) -> None:
    model = build_model_dir(tmp_path / "model", hidden=128)
    server = Server(model, 0, "executor=vllm", "num_devices=1")

    def post(route: str, body: dict[str, Any]) -> Any:
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        url = server.url.removesuffix("/v1") + route
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60) as got:
            return json.load(got)

    asked = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    [choice] = post("/inference/v1/generate", {"token_ids": [1, 2, 3], "sampling_params": asked})["choices"]
    [again] = post("/v1/completions", {"model": "model", "prompt": [1, 2, 3], **asked, "return_token_ids": True})[
        "choices"
    ]
    assert len(choice["token_ids"]) == 6
    assert again["token_ids"] == choice["token_ids"]
    server.process.terminate()
    assert server.process.wait(60) in (0, 143)
