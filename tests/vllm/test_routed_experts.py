"""The experts that vLLM chose: from releases that return them, as the embedded engine does; others are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlite
from rlite import RliteInferenceEngine
from rlite.backends.serving.sampler import RequestRules
from rlite.backends.vllm import release
from rlite.backends.vllm.server import Server, Serving
from rlite.backends.vllm.worker import BACKEND
from rlite.data.packs import note_rows
from rlite.data.routing import ROUTED, RoutingShape, RoutingTable
from rlite.errors import ConfigError
from rlite.types import GenerationHyperparameters, LLMRequest, SequenceRequest, TokenChunk
from tests.vllm.test_stored_weights import checkpoint

SHAPE = RoutingShape(num_layers=2, top_k=2, num_experts=8)
TABLE = RoutingTable(SHAPE, layers=(1, 2), num_all=3)
OBSTACLE = release.routing_obstacle({})


class Sent:
    """A connection that keeps messages."""

    def __init__(self) -> None:
        self.chunks: list[TokenChunk] = []

    def send(self, message: tuple[str, list[TokenChunk]]) -> None:
        self.chunks += message[1]


def output(tokens: list[int], experts: np.ndarray | None, reason: Any = None) -> Any:
    """Make vLLM's own output of a step, with the table of log-probabilities that rlite's sampler writes."""
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsLists

    ids = np.array([[token, token + 1] for token in tokens], np.int32)
    logprobs = LogprobsLists(ids, -np.ones(ids.shape, np.float32), np.ones(len(ids), np.int32))
    made = EngineCoreOutput(request_id="7.0-abc", new_token_ids=tokens, new_logprobs=logprobs, finish_reason=reason)
    made.routed_experts = experts
    return made


def served(*outputs: Any) -> list[TokenChunk]:
    """Return what the server makes of outputs of a request for chosen experts, whose prompt has three tokens."""

    async def run() -> list[TokenChunk]:
        connection: Any = Sent()
        server = Server(connection)
        server._routing, server._rules = TABLE, RequestRules("/nonexistent", 50, 100, frozenset({9}))
        gconfig = GenerationHyperparameters(max_new_tokens=20)
        request = SequenceRequest(request_id=7, input_ids=[1, 2, 3], gconfig=gconfig, seed=0, extras=(ROUTED,))
        server._serving["7.0"] = Serving(request, "7.0", [])
        for each in outputs:
            server._take([each])
        return connection.chunks

    return asyncio.run(run())


def test_outputs_of_vllm_become_entries_of_their_tokens() -> None:
    chosen = np.stack([np.random.default_rng(seed).permutation(8)[:2] for seed in range(15)]).reshape(5, 3, 2)
    (first, last) = served(output([4], chosen[:3].astype(np.uint8)), output([5, 6], chosen[3:].astype(np.uint8)))
    assert [len(rows) for rows in first.extras[ROUTED]] == [3]
    assert [len(rows) for rows in last.extras[ROUTED]] == [1, 1]
    known = [b""] * 6
    note_rows(known, 3, [*first.extras[ROUTED], *last.extras[ROUTED]])
    assert [list(row) for row in known[:5]] == chosen[:, 1:].reshape(5, -1).tolist()
    assert served(output([4], None))[0].extras[ROUTED] == [[]]


def test_outputs_of_another_form_end_their_request_alone() -> None:
    (chunk,) = served(output([4, 5, 6], np.zeros((2, 3, 2), np.uint8)))
    assert "routed_experts of shape [2, 3, 2]; expected at least 3 tokens, 3 layers" in str(chunk.error)


@pytest.mark.skipif(not OBSTACLE, reason="this vLLM returns the experts that it chose")
def test_a_release_that_rlite_cannot_ask_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="records them in its second model runner, and rlite samples in the first"):
        release.VllmOptions(enable_return_routed_experts=True)
    with pytest.raises(ConfigError, match="second model runner"):
        BACKEND.capabilities.options_for(ROUTED, {})


@pytest.fixture
def session() -> Iterator[None]:
    rlite.init(num_devices=1, num_threads=2)
    yield
    rlite.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(840)
@pytest.mark.skipif(bool(OBSTACLE), reason=OBSTACLE)
def test_returned_experts_are_those_of_the_embedded_engine(tmp_path: Path, session: None) -> None:
    checkpoint("qwen3_moe", tmp_path, 0)
    gconfig = GenerationHyperparameters(max_new_tokens=20, greedy=True, ignore_eos=True)
    prompt, found = list(range(40, 60)), {}
    for executor in ("vllm", "torch"):
        engine = RliteInferenceEngine(tmp_path, executor=executor)
        engine.build(max_model_len=128, max_num_seqs=4, **engine.capabilities.options_for(ROUTED, {}))
        made = asyncio.run(engine.agenerate(LLMRequest(input_ids=prompt, gconfig=gconfig, extras=(ROUTED,))))
        known = [b""] * 40
        note_rows(known, 20, made.extras[ROUTED])
        found[executor] = made.output_tokens, known
        engine.release()
    assert found["vllm"] == found["torch"]
    assert all(found["vllm"][1][:39])
