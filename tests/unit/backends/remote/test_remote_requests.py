"""What the remote executor sends to a server, how it reads the answer, and which options it takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlite.backends.remote.replica import BACKEND, RemoteStream, generate_body, unmixed
from rlite.backends.remote.server import KEY_VARIABLE, RemoteOptions
from rlite.backends.serving.http import CallRefused, Endpoint
from rlite.errors import ConfigError, RliteError
from rlite.rollout.episode import mix
from rlite.types import GenerationHyperparameters, SequenceRequest

URL = "http://127.0.0.1:8000"


def request_of(done: tuple[int, ...] = (), **sampling: object) -> SequenceRequest:
    gconfig = GenerationHyperparameters(**{"max_new_tokens": 8, **sampling})  # type: ignore[arg-type]
    return SequenceRequest(request_id=3, input_ids=[1, 2], gconfig=gconfig, seed=mix(7, 0), output_ids=list(done))


def event(ids: list[int], **fields: object) -> str:
    content = [{"token": f"token_id:{id}", "token_id": id, "logprob": -0.5} for id in ids]
    return json.dumps({"choices": [{"index": 0, "token_ids": ids, "logprobs": {"content": content}, **fields}]})


@given(st.integers(0, 2**63 - 1))
def test_a_server_makes_the_seed_of_a_request_from_the_seed_that_is_sent(seed: int) -> None:
    assert mix(unmixed(seed), 0) == seed
    assert -(2**63) <= unmixed(seed) < 2**63


def test_a_request_continues_after_its_tokens_and_asks_for_what_is_left() -> None:
    body = generate_body(request_of((5, 6), min_new_tokens=3, temperature=0.7), "m", "id", 100)
    assert body["token_ids"] == [1, 2, 5, 6]
    assert body["sampling_params"]["max_tokens"] == 6
    assert body["sampling_params"]["min_tokens"] == 1
    assert generate_body(request_of((5, 6)), "m", "id", 6)["sampling_params"]["max_tokens"] == 2
    greedy = generate_body(request_of(greedy=True, top_p=0.5, top_k=4), "m", "id", 100)["sampling_params"]
    assert (greedy["temperature"], greedy["top_p"], greedy["top_k"]) == (0.0, 1.0, 0)


def test_tokens_get_the_versions_that_the_server_reports_at_the_end() -> None:
    versions = [4, 9, 9, 9]
    stream = RemoteStream(request_of((5,)), versions)
    assert stream.chunk(event([6, 7]), 9).token_ids == [6, 7]
    spans = [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 3}]
    last = stream.chunk(event([8], finish_reason="length", weight_versions=spans), 9)
    stream.restamp()
    assert (last.finish_reason, versions, stream.is_finished) == ("length", [4, 1, 1, 2], True)


def test_errors_and_aborts_of_a_server_are_no_answers() -> None:
    stream = RemoteStream(request_of(), [])
    with pytest.raises(CallRefused, match="too long") as refused:
        stream.chunk(json.dumps({"error": {"message": "too long", "code": 400}}), 0)
    assert refused.value.status == 400
    with pytest.raises(CallRefused) as refused:
        stream.chunk(json.dumps({"error": {"message": "the session has ended", "code": "session_closed"}}), 0)
    assert refused.value.status == 500
    with pytest.raises(OSError, match="'abort'"):
        stream.chunk(event([], finish_reason="abort"), 0)
    with pytest.raises(ValueError, match="zip"):
        stream.chunk(json.dumps({"choices": [{"index": 0, "token_ids": [5]}]}), 0)
    nothing = event([5]).replace("-0.5", "NaN")
    assert stream.chunk(nothing, 0).is_nonfinite


@pytest.mark.parametrize(
    ("addresses", "told"),
    [
        ([], "expected the URLs of running servers"),
        (["10.0.0.1:8000"], "expected URLs like"),
        (["http://user:secret@host:8000"], "without a key"),
        ([URL, f"{URL}/v1/"], "named twice"),
    ],
)
def test_addresses_that_are_none_are_refused_without_showing_a_key(addresses: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as refused:
        RemoteOptions(addresses=addresses)
    assert "secret" not in str(refused.value)


def test_the_key_comes_from_the_environment_or_a_file_that_nobody_else_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert RemoteOptions(addresses=[URL]).key() is None
    file = tmp_path / "key"
    file.write_text("of the file\n")
    options = RemoteOptions(addresses=[URL], api_key_file=str(file))
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=r"api_key_file=.*chmod 600"):
        options.key()
    file.chmod(0o600)
    assert options.key() == "of the file"
    monkeypatch.setenv(KEY_VARIABLE, "of the environment")
    assert options.key() == "of the environment"
    assert "environment" not in repr(Endpoint(URL, options.key()))
    with pytest.raises(RliteError, match="api_key"):
        RemoteOptions(addresses=[URL], api_key="in a config")  # type: ignore[call-arg]


def test_a_replica_is_one_server_and_its_model_is_not_divided() -> None:
    assert BACKEND.check is not None
    with pytest.raises(ConfigError, match="a replica is a running server"):
        BACKEND.check("", 2)
