"""Tenants that mean harm: bodies that are bombs, names that are paths, and a server killed at each moment of a save."""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlite.errors import DataError
from tests.tinker.client import client_package, counting
from tests.tinker.serving import Served, ask, equal, factors, settled, step

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning:tinker")


def request_with(**tensor: Any) -> bytes:
    """A `ForwardBackwardRequest` with one tensor of the given parts."""
    client_package()
    from tinker.proto import tinker_public_pb2 as messages

    message = messages.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.asarray([1, 2], np.int32).tobytes()
    weights = datum.loss_fn_inputs["weights"]
    weights.dtype = messages.DTYPE_FLOAT32
    weights.shape.extend(tensor["shape"])
    if "dense" in tensor:
        weights.dense = tensor["dense"]
    else:
        weights.sparse_csr.values = np.zeros(tensor.get("num", 1), np.float32).tobytes()
        weights.sparse_csr.crow_indices = np.asarray(tensor["crow"], np.int64).tobytes()
        weights.sparse_csr.col_indices = np.asarray(tensor["columns"], np.int64).tobytes()
    return bytes(message.SerializeToString())


@pytest.mark.parametrize(
    "tensor",
    [
        {"shape": [1 << 20, 1 << 20], "crow": [0, 1], "columns": [0]},
        {"shape": [-(1 << 20), -(1 << 20)], "crow": [0, 1], "columns": [0]},
        {"shape": [1, 4], "crow": [0, 1 << 60], "columns": [0]},
        {"shape": [3, 4], "crow": [0, 2**63 - 1, -2, 1], "columns": [0]},
        {"shape": [1, 4], "crow": [0, 1], "columns": [-1]},
        {"shape": [1, 4], "crow": [0, 1], "columns": [4]},
        {"shape": [1, 4], "crow": [1, 2], "columns": [0]},
        {"shape": [2, 4], "crow": [], "columns": []},
        {"shape": [4], "crow": [0, 1], "columns": [0]},
        {"shape": [1 << 40], "dense": b"\0" * 8},
        {"shape": [-3], "dense": b"\0" * 8},
        {"shape": [2], "dense": b"\0" * 7},
    ],
)
def test_tensors_that_lie_of_their_size_are_refused_before_memory_is_taken(tensor: dict[str, Any]) -> None:
    body = request_with(**tensor)
    from rlite.services.tinker.wire import read_forward

    with pytest.raises(DataError):
        read_forward(body)


def test_odd_requests_get_a_reason_and_the_server_goes_on(served: Served, tmp_path: Path) -> None:
    with served.server(tmp_path) as url:
        client = served.trained(served.client(url))
        session, model = client.model_id.partition(":")[0], {"model_id": client.model_id, "seq_id": 1}
        base = {"session_id": session, "base_model": served.config.model}
        ask(url, "create_sampling_session", {**base, "sampling_session_seq_id": 0})
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
        sample: dict[str, Any] = {"sampling_session_id": f"{session}:sample:0", "seq_id": 1, "prompt": prompt}
        odd: list[tuple[str, Any]] = [
            ("create_model", {**base, "model_seq_id": 10**9, "lora_config": {"rank": 2}}),
            ("create_model", {**base, "model_seq_id": -1, "lora_config": {"rank": 2}}),
            ("create_model", {**base, "model_seq_id": 5, "lora_config": {"rank": 2, "seed": 2**64}}),
            (
                "create_model",
                {**base, "model_seq_id": 5, "lora_config": {"rank": 2}, "user_metadata": {"a": "b" * 5000}},
            ),
            ("create_sampling_session", {**base, "sampling_session_seq_id": 10**12}),
            ("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 1, "model_path": "/etc"}),
            ("create_sampling_session", {"session_id": "../..", "sampling_session_seq_id": 1, "base_model": "x"}),
            ("optim_step", {**model, "adam_params": {"learning_rate": -1}}),
            ("optim_step", {**model, "seq_id": 10**30, "adam_params": {}}),
            ("optim_step", {**model, "model_id": "s" * 100_000, "adam_params": {}}),
            ("optim_step", []),
            ("optim_step", b"[" * 100_000),
            ("save_weights", {**model, "path": "x\0y"}),
            ("save_weights", {**model, "path": "_inflight"}),
            ("save_weights", {**model, "path": "x" * 200}),
            ("save_weights", {**model, "path": "x", "ttl_seconds": -5}),
            ("save_weights_for_sampler", {**model}),
            ("load_weights", {**model, "path": f"tinker://{client.model_id}/weights/..", "optimizer": True}),
            ("asample", {**sample, "sampling_params": {"max_tokens": 10**30}}),
            ("asample", {**sample, "sampling_params": {"top_k": 10**30}}),
            ("asample", {**sample, "num_samples": 10**6, "sampling_params": {}}),
            ("asample", {**sample, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [10**30]}]}}),
            ("asample", {**sample, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [-1]}]}}),
            ("asample", {**sample, "prompt": {"chunks": "x"}}),
            ("retrieve_future", {"request_id": "../../etc/passwd"}),
            ("copy_weights", {"source_path": "tinker://../weights/x"}),
        ]
        for path, body in odd:
            status, answer = ask(url, path, body)
            assert status in (400, 404), (path, body, status, answer)
            assert answer["detail"]
        status, answer = ask(url, "asample", {**sample, "sampling_params": {"max_tokens": 2}})
        assert status == 200
        step(client, counting(2))


class Killed(BaseException):
    """The end of the process."""


class Kill:
    """Lets the process do some operations on files of a folder, and none after that.

    Python tells an audit hook of each operation before it happens. Hooks cannot be removed, so one serves all tests.
    """

    EVENTS = frozenset(
        {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate", "open", "shutil.rmtree"}
    )

    def __init__(self) -> None:
        self.folder, self.left, self.is_dead = "", 0, False
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.folder and event in self.EVENTS and any(self.folder in str(arg) for arg in args):
            if event == "open" and not ("w" in str(args[1]) or "a" in str(args[1]) or (args[2] or 0) & 3):
                return
            self.is_dead |= self.left == 0
            if self.is_dead:
                raise Killed
            self.left -= 1

    def after(self, folder: Path, num: int) -> None:
        """Allow so many operations below a folder."""
        self.folder, self.left, self.is_dead = str(folder), num, False

    def over(self) -> bool:
        """Allow all operations again, and return whether some were refused."""
        self.folder = ""
        return self.is_dead


def wait_for(url: str, request_id: str, kill: Kill) -> None:
    """Wait until a request has ended, or the server is dead."""
    while not kill.is_dead and ask(url, "retrieve_future", {"request_id": request_id})[0] == 408:
        pass


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", ["save_weights", "save_weights_for_sampler", "inflight", "load_weights", "optim_step"])
def test_a_server_killed_at_each_moment_of_a_save_ends_as_if_it_had_not_been(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from rlite.services.tinker import sampling_routes

    kill = Kill()
    with served.server(tmp_path / "begun", save_every=2) as url:
        client = served.trained(served.client(url))
        for place in range(3):
            step(client, counting(3, start=place))
        source = client.save_state("first").result().path
        client.forward_backward(counting(2), "cross_entropy").result()
        expected = factors(served, client)
    model = {"model_id": client.model_id, "seq_id": 9}
    path, body = {
        "save_weights": ("save_weights", {**model, "path": "mine"}),
        "save_weights_for_sampler": ("save_weights_for_sampler", {**model, "path": "mine"}),
        "inflight": ("save_weights_for_sampler", {**model, "sampling_session_seq_id": 3, "kind": "inflight"}),
        "load_weights": ("load_weights", {**model, "path": source, "optimizer": True}),
        "optim_step": ("optim_step", {**model, "adam_params": {"learning_rate": 0.01}}),
    }[kind]
    results, ends = [], []
    monkeypatch.setattr(sampling_routes, "POLL_SECONDS", 0.05)
    for moment in range(200):
        folder = tmp_path / "killed"
        shutil.copytree(tmp_path / "begun", folder)
        with served.server(folder, save_every=1) as url:
            wait_for(url, f"{client.model_id}:8", kill)
            kill.after(folder, moment)
            with suppress(OSError):
                ask(url, path, body, timeout=1)
                wait_for(url, f"{client.model_id}:9", kill)
        is_killed = kill.over()
        with served.server(folder, save_every=1) as url:
            results.append(settled(url, path, body))
            assert settled(url, path, body) == results[-1]
            settled(url, "optim_step", {**model, "seq_id": 10, "adam_params": {"learning_rate": 0.02}})
            ends.append(factors(served, client))
            assert not list(folder.glob("s*/train-0/.*.writing"))
        shutil.rmtree(folder)
        if not is_killed:
            break
    assert moment > 3
    assert all(result == results[-1] for result in results)
    assert all(equal(end, ends[-1]) for end in ends)
    assert kind == "load_weights" or not equal(ends[-1], expected)
