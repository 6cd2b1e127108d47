"""Tokens of several steps that vLLM's scheduler sends at once."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from rlite.backends.vllm import release


class PauseState(Enum):
    UNPAUSED = 0
    PAUSED_ALL = 1


class LogprobsLists(NamedTuple):
    logprob_token_ids: np.ndarray
    logprobs: np.ndarray
    sampled_token_ranks: np.ndarray


def message() -> SimpleNamespace:
    return SimpleNamespace(outputs=[], finished_requests=None, scheduler_stats=None)


class Script:
    """The part of vLLM's scheduler that the mixin relies on: the tokens of each step are given."""

    def __init__(self) -> None:
        self.pause_state = PauseState.UNPAUSED
        self.requests: dict[str, Any] = {}
        self.is_busy = True

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request

    def has_requests(self) -> bool:
        return self.is_busy

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        by_client: dict[int, Any] = {}
        for name, token, client in model_runner_output.made:
            reason = "stop" if token == END else None
            output = SimpleNamespace(request_id=name, new_token_ids=[token], finish_reason=reason, new_logprobs=None)
            output.routed_experts = vars(model_runner_output).get("routed_experts")
            by_client.setdefault(client, message()).outputs.append(output)
        return by_client


class Scheduler(release.Holding, Script):
    pass


END = 9
Told = dict[str, tuple[list[int], list[float], list[list[int]]]]


def new(*, urgent: tuple[str, ...] = (), names: str = "abc") -> Scheduler:
    made = Scheduler()
    for name in names:
        asked = {"rlite": {"is_urgent": name in urgent}}
        made.add_request(SimpleNamespace(request_id=name, sampling_params=SimpleNamespace(extra_args=asked)))
    return made


def step(on: Scheduler, *made: tuple[str, int], client: int = 0, width: int = 2) -> dict[int, Told]:
    """Return by client what leaves at a step in which requests made these tokens, whose log-probability is -token."""
    rows = {name: row for row, (name, _) in enumerate(reversed(made))}  # not in the order of the outputs
    tokens = np.array([[token] for _, token in reversed(made)]).reshape(len(made), 1)
    table = LogprobsLists(np.repeat(tokens, width, 1), -np.repeat(tokens, 2, 1).astype(np.float32), tokens[:, 0])
    output = SimpleNamespace(
        made=[(name, token, client) for name, token in made],
        logprobs=table if made else None,
        req_id_to_index=rows,
    )
    by_client = on.update_from_output(SimpleNamespace(total_num_scheduled_tokens=len(made)), output)
    return {client: told(sent.outputs) for client, sent in by_client.items()}


def told(outputs: list[Any]) -> Told:
    """Return the tokens of each request, with their log-probabilities and kept ids as the server reads them."""
    whole, _, kept_ids = release.take_table(outputs)
    found, row = {}, 0
    for output in outputs:
        end = row + len(output.new_token_ids)
        found[output.request_id] = (list(output.new_token_ids), whole[row:end], kept_ids[row:end])
        row = end
    return found


def plain(*tokens: int) -> tuple[list[int], list[float], list[list[int]]]:
    return list(tokens), [-float(token) for token in tokens], [[]] * len(tokens)


def test_tokens_leave_together_after_some_steps() -> None:
    on = new()
    for number in range(1, release.HOLD_STEPS):
        assert step(on, ("a", 1), ("b", 2 + number % 2)) == {}
    assert on.has_requests()
    sent = step(on, ("b", 5), ("a", 4))
    assert sent[0]["a"] == plain(*[1] * (release.HOLD_STEPS - 1), 4)
    assert sent[0]["b"][0][-1] == 5
    assert step(on, ("a", 7)) == {}  # nothing is sent twice


def test_an_old_token_leaves_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "HOLD_S", -1.0)
    assert step(new(), ("a", 3)) == {0: {"a": plain(3)}}


def test_a_request_that_ends_leaves_alone_with_all_its_tokens() -> None:
    on = new()
    assert step(on, ("a", 1), ("b", 2)) == {}
    assert step(on, ("b", END), ("a", 3)) == {0: {"b": plain(2, END)}}
    on.pause_state = PauseState.PAUSED_ALL
    assert step(on) == {0: {"a": plain(1, 3)}}


def test_a_message_that_was_not_read_yet_stays_as_it_is() -> None:
    on = new()
    made = SimpleNamespace(made=[("a", 1, 0), ("b", END, 0)], logprobs=None, req_id_to_index={})
    (first,) = on.update_from_output(SimpleNamespace(total_num_scheduled_tokens=2), made).values()
    nothing = SimpleNamespace(made=[], logprobs=None, req_id_to_index={})
    (second,) = on.update_from_output(SimpleNamespace(total_num_scheduled_tokens=0), nothing).values()
    assert [output.request_id for output in second.outputs] == ["a"]
    assert [output.request_id for output in first.outputs] == ["b"]


def test_requests_with_stop_strings_leave_with_every_step() -> None:
    on = new(urgent=("b",))
    assert step(on, ("a", 1), ("b", 2)) == {0: {"b": plain(2)}}
    assert step(on, ("a", 1), ("b", 3)) == {0: {"b": plain(3)}}


def test_the_engine_is_not_idle_before_a_pause_has_sent_all_tokens() -> None:
    on = new()
    on.is_busy = False
    assert step(on, ("a", 1)) == {}
    assert on.has_requests()
    on.pause_state = PauseState.PAUSED_ALL
    assert step(on) == {0: {"a": plain(1)}}
    assert not on.has_requests()


def test_frontends_get_their_own_requests() -> None:
    on = new()
    assert step(on, ("a", 1), client=0) == {}
    assert step(on, ("b", 2), client=1) == {}
    on.pause_state = PauseState.PAUSED_ALL
    assert step(on) == {0: {"a": plain(1)}, 1: {"b": plain(2)}}


def test_kept_ids_of_steps_of_different_widths_stay_with_their_tokens() -> None:
    on = new()
    step(on, ("a", 1), ("b", 2), width=3)
    step(on, ("a", 5), width=2)
    on.pause_state = PauseState.PAUSED_ALL
    sent = step(on, ("b", 6), width=5)[0]
    assert sent["a"] == ([1, 5], [-1.0, -5.0], [[1], []])
    assert sent["b"] == ([2, 6], [-2.0, -6.0], [[2], [6, 6, 6]])


def test_the_experts_of_several_steps_leave_in_the_order_of_their_tokens() -> None:
    on = new(names="a")
    for token, rows in ((1, 3), (2, 1), (END, 1)):
        ids = np.array([[token, token]])
        made = SimpleNamespace(
            made=[("a", token, 0)],
            logprobs=LogprobsLists(ids, -ids.astype(np.float32), ids[:, 0]),
            req_id_to_index={"a": 0},
            routed_experts=np.full((rows, 2, 2), token, np.uint8),
        )
        sent = on.update_from_output(SimpleNamespace(total_num_scheduled_tokens=1), made)
    (output,) = sent[0].outputs
    assert output.new_token_ids == [1, 2, END]
    assert output.routed_experts[:, 0, 0].tolist() == [1, 1, 1, 2, END]
