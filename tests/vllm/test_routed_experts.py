"""The experts that vLLM chose: its own outputs become entries of tokens, and builds without a record are refused."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlite import RliteInferenceEngine
from rlite.backends.serving.sampler import RequestRules
from rlite.backends.vllm import release
from rlite.backends.vllm.server import Server, Serving
from rlite.backends.vllm.worker import BACKEND
from rlite.data.packs import note_rows
from rlite.data.routing import ROUTED, RoutingShape, RoutingTable
from rlite.errors import ConfigError
from rlite.trainer.model.modules import policy_module
from rlite.trainer.rl.routing import RoutingReplay
from rlite.types import GenerationHyperparameters, SequenceRequest, TokenChunk
from tests.vllm.test_stored_weights import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of vLLM's imports
SHAPE = RoutingShape(num_layers=2, top_k=2, num_experts=8)
TABLE = RoutingTable(SHAPE, layers=(1, 2), num_all=3)


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
        server._serving["7.0"] = Serving(request, "7.0", [], None)
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


def test_the_cpu_build_is_refused_before_a_process_starts() -> None:
    with pytest.raises(ConfigError, match=r"enable_return_routed_experts=true: vLLM .* inside of its CPU kernel"):
        release.VllmOptions(enable_return_routed_experts=True)
    with pytest.raises(ConfigError, match="records nothing"):
        BACKEND.capabilities.options_for(ROUTED, {})


def test_auto_says_why_the_choices_of_vllm_are_not_replayed(tmp_path: Path) -> None:
    checkpoint("qwen3_moe", tmp_path, 0)
    module = policy_module(str(tmp_path))
    found = RoutingReplay.of("auto", module, RliteInferenceEngine(tmp_path, executor="vllm"))
    assert (found.source, found.engine_options) == ("off", {})
    assert re.match(
        r"rollout.executor=vllm does not return the experts that it chose \(vLLM .* CPU kernel", found.reason
    )
    with pytest.raises(ConfigError, match=r"routing_replay=rollout: .*use rollout.executor=torch, old_policy or auto"):
        RoutingReplay.of("rollout", module, RliteInferenceEngine(tmp_path, executor="vllm"))
