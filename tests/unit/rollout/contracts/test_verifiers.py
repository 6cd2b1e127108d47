"""The wire of verifiers without its package: the route of an episode, and the end of an episode as rows."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from array import array
from typing import Any

import pytest

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.errors import ConfigError
from rlite.rollout import GenerationHyperparameters, ScriptedEngine
from rlite.services.endpoint.dialects.generate import GENERATE
from rlite.services.endpoint.requests import ApiError
from rlite.services.endpoint.session import AgentSession
from rlite.services.environments.verifiers import VerifiersEnvironment, VerifiersEpisode, trajectory_of

TOKENIZER = byte_tokenizer()
PROMPTS = [[1, 2, 3], [1, 2, 3, 7, 8, 4], [1, 2, 3, 7, 8, 5], [9, 9]]


def session() -> AgentSession:
    engine = ScriptedEngine([[7, 8]], version=5)
    return AgentSession(engine, TOKENIZER, GenerationHyperparameters(max_new_tokens=2), is_sampling_fixed=True)


async def asked(own: AgentSession, **body: Any) -> Any:
    """Ask as verifiers' training client does."""
    params = {"max_tokens": 2, "temperature": 0.3, "stop_token_ids": [0], "logprobs": 1, "skip_special_tokens": False}
    whole = {"model": "policy", "sampling_params": params, "cache_salt": "1", **body}
    reply = await own.answer(GENERATE, json.dumps(whole).encode())
    return json.loads(b"".join([part async for part in reply.encoded()]))


def test_the_route_takes_and_returns_tokens_with_their_logprobs() -> None:
    own = session()
    answer = asyncio.run(asked(own, token_ids=[1, 2, 3]))
    [choice] = answer["choices"]
    assert (answer["prompt_token_ids"], choice["token_ids"]) == ([1, 2, 3], [7, 8])
    assert choice["logprobs"]["content"] == [
        {"token": f"token_id:{id}", "token_id": id, "logprob": -1.0} for id in (7, 8)
    ]
    assert own.recording.turns[0].versions == [5, 5]


@pytest.mark.parametrize("body", [{"token_ids": "text"}, {"token_ids": [1], "model": "other"}])
def test_a_body_that_cannot_be_honoured_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ApiError):
        asyncio.run(asked(session(), **body))


def ended(*branches: list[int], is_trainable: bool = True, errors: tuple[str, ...] = ()) -> list[Any]:
    lines = [array("I", tokens).tobytes() for tokens in branches]
    return [0.75, {"short": 0.5, "right": 0.25}, list(errors), is_trainable, lines]


def test_branches_are_rows_and_turns_of_other_traces_are_left_out() -> None:
    async def play() -> Any:
        own = session()
        for prompt in PROMPTS:
            await asked(own, token_ids=prompt)
        told = [[], [ended([*PROMPTS[1], 7, 8], [*PROMPTS[2], 7, 8]), ended([*PROMPTS[3], 7, 8], is_trainable=False)]]
        episode = VerifiersEpisode.read(told)
        assert episode is not None
        return trajectory_of(own, episode.traces)

    rows = asyncio.run(play())
    assert rows["input_ids"].tolist() == [[1, 2, 3, 7, 8, 4, 7, 8], [1, 2, 3, 7, 8, 5, 7, 8]]
    assert rows["loss_mask"].int().tolist() == [[0, 0, 0, 1, 1, 0, 1, 1], [0, 0, 0, 0, 0, 0, 1, 1]]
    assert rows["rewards"].tolist() == [0.75, 0.75]
    assert rows["reward/right"].tolist() == [0.25, 0.25]


def test_an_error_of_a_trace_is_the_failure_of_its_episode() -> None:
    episode = VerifiersEpisode.read([["EnvError: outer"], [ended([1], errors=("TaskError: no score",))]])
    assert episode is not None
    assert episode.failure == "TaskError: no score"


@pytest.mark.parametrize("answer", [None, [1], [[], [[float("nan"), {}, [], True, []]]], [[], [["x", 1]]]])
def test_another_answer_of_a_process_is_no_episode(answer: Any) -> None:
    assert VerifiersEpisode.read(answer) is None


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is not None, reason="verifiers is installed")
def test_a_missing_package_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'rlite\[verifiers\]'"):
        VerifiersEnvironment("words")
