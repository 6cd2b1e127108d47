"""The real client of the Tinker API against the server: training, sampling, restarts and refusals."""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rlite
from tests.tinker.client import TOKENS, client_package, counting, datum
from tests.tinker.serving import Served
from tests.tiny import build_model_dir

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning:tinker")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    client_package()
    rlite.init(num_devices=1, num_threads=1)
    made = Served(build_model_dir(tmp_path_factory.mktemp("tinker") / "model", "qwen3", hidden=64), max_num_seqs=16)
    yield made
    rlite.shutdown()


@pytest.fixture(autouse=True)
def without_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


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


def ask(url: str, path: str, body: bytes | dict[str, Any], owner: str = "ann", **headers: str) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/api/v1/{path}", data, {"X-API-Key": TOKENS.get(owner, owner), **headers})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_a_client_trains_samples_saves_and_continues(served: Served, tmp_path: Path) -> None:
    types = client_package().types
    with served.server(tmp_path) as url:
        service = served.client(url)
        client = served.trained(service)
        data = counting(8)
        losses = [step(client, data).metrics["loss:sum"] for _ in range(6)]
        assert losses[-1] < 0.5 * losses[0]
        sampler = client.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=4, temperature=0.5, seed=7)
        drawn = sampler.sample(types.ModelInput.from_ints([3, 4, 5]), num_samples=2, sampling_params=params).result()
        assert [len(each.tokens) for each in drawn.sequences] == [4, 4]
        again = sampler.sample(types.ModelInput.from_ints([3, 4, 5]), num_samples=2, sampling_params=params).result()
        assert [list(each.tokens) for each in again.sequences] == [list(each.tokens) for each in drawn.sequences]
        scored = sampler.compute_logprobs(types.ModelInput.from_ints([3, 4, 5, 6])).result()
        forward = client.forward([datum([3, 4, 5], [4, 5, 6], weights=[1, 1, 1])], "cross_entropy").result()
        assert scored[1:] == pytest.approx(list(forward.loss_fn_outputs[0]["logprobs"].data), abs=1e-6)
        path = client.save_state("first").result().path
        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        for each in (client, resumed):
            step(each, counting(4, start=20))
        assert equal(factors(served, client), factors(served, resumed))
        anew = service.create_training_client_from_state(path).result()
        step(anew, counting(4, start=20))
        assert not equal(factors(served, client), factors(served, anew)), "the optimizer began anew"
        with pytest.raises(client_package().RequestFailedError, match="exists"):
            client.save_state("first").result()


def test_two_calls_equal_one_train_batch_and_tenants_do_not_touch_each_other(served: Served, tmp_path: Path) -> None:
    from rlite.services.tinker.losses import work_of
    from rlite.services.tinker.wire import read_forward

    with served.server(tmp_path) as url:
        clients = [served.trained(served.client(url, owner), rank, seed=3) for owner, rank in (("ann", 4), ("bob", 7))]
        alone = [served.trained(served.client(url), rank, seed=3) for rank in (4, 7)]
        batches = [counting(6, start=place) for place in (0, 9, 18)]
        for batch in batches:
            results = [client.forward_backward(batch, "cross_entropy") for client in clients]
            steps = [client.optim_step(client_package().types.AdamParams(learning_rate=1e-2)) for client in clients]
            for future in (*results, *steps):
                future.result()
        for client in alone:
            for batch in batches:
                step(client, batch, lr=1e-2)
        assert all(equal(factors(served, a), factors(served, b)) for a, b in zip(clients, alone, strict=True))
        conv = __import__("tinker.proto.request_conv", fromlist=["x"])
        types = client_package().types
        served.train.add_adapter("direct", served.train.adapters[alone[0].model_id], seed=3)
        options = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-12, "weight_decay": 0.0, "max_grad_norm": math.inf}
        served.train.optimizer_step("direct", **options)
        for batch in batches:
            asked = types.ForwardBackwardRequest(
                forward_backward_input=types.ForwardBackwardInput(data=batch, loss_fn="cross_entropy"),
                model_id="direct",
                seq_id=1,
            )
            work = work_of(read_forward(conv.forward_backward_request_to_proto(asked).SerializeToString())[0])
            gradients = served.train.forward_backward(work.batch, work.loss, adapter="direct")
            assert gradients["loss"] > 0
            served.train.optimizer_step("direct", **options)
        alone[0].model_id = "direct"
        assert equal(factors(served, alone[0]), factors(served, clients[0]))


def test_chunks_add_up_to_the_whole(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlite.services.tinker import server

    with served.server(tmp_path) as url:
        whole = served.trained(served.client(url), seed=5)
        monkeypatch.setitem(server.CONFIG, "fwdbwd_max_chunk_len", 2)
        split = served.trained(served.client(url), seed=5)
        data = counting(16)
        one, eight = (client.forward_backward(data, "cross_entropy").result() for client in (whole, split))
        assert one.metrics["loss:sum"] == pytest.approx(eight.metrics["loss:sum"], rel=1e-6)
        assert len(eight.loss_fn_outputs) == 16
        for client in (whole, split):
            client.optim_step(client_package().types.AdamParams(learning_rate=1e-3)).result()
        for a, b in zip(factors(served, whole), factors(served, split), strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_a_killed_server_does_the_accepted_work_again(served: Served, tmp_path: Path) -> None:
    types = client_package().types
    with served.server(tmp_path / "one", save_every=2) as url:
        client = served.trained(served.client(url), seed=9)
        for place in range(5):
            step(client, counting(3, start=place))
        client.forward_backward(counting(3, start=30), "cross_entropy").result()
        model_id = client.model_id
        body = {"model_id": model_id, "seq_id": 12, "adam_params": {"learning_rate": 0.02}}
        expected = factors(served, client)
    with served.server(tmp_path / "one", save_every=2) as url:
        status, answer = ask(url, "optim_step", body)
        assert (status, answer["request_id"]) == (200, f"{model_id}:12")
        assert ask(url, "optim_step", body) == (status, answer), "a retry changes nothing"
        status, result = ask(url, "retrieve_future", {"request_id": f"{model_id}:12"})
        assert (status, result["type"]) == (200, "optim_step")
        status, result = ask(url, "retrieve_future", {"request_id": f"{model_id}:10"})
        assert (status, result["type"]) == (200, "optim_step"), "earlier results are kept"
        changed = factors(served, client)
        assert not equal(changed, expected)
        different = {**body, "adam_params": {"learning_rate": 0.5}}
        status, answer = ask(url, "optim_step", different)
        assert status == 400
        assert "two writers" in answer["detail"]
    with served.server(tmp_path / "two") as url:
        undisturbed = served.trained(served.client(url), seed=9)
        for place in range(5):
            step(undisturbed, counting(3, start=place))
        undisturbed.forward_backward(counting(3, start=30), "cross_entropy").result()
        undisturbed.optim_step(types.AdamParams(learning_rate=0.02)).result()
        assert equal(changed, factors(served, undisturbed))


def test_losses_and_soft_targets_and_custom_losses(served: Served, tmp_path: Path) -> None:
    with served.server(tmp_path) as url:
        client = served.trained(served.client(url))
        sampled = datum([1, 2, 3], [2, 3, 4], logprobs=[-1.0, -2.0, -3.0], advantages=[1.0, -1.0, 0.5])
        plain = client.forward([datum([1, 2, 3], [2, 3, 4], weights=[1, 1, 1])], "cross_entropy").result()
        lp = np.asarray(plain.loss_fn_outputs[0]["logprobs"].data, "f8")
        ratio, adv = np.exp(lp - [-1.0, -2.0, -3.0]), np.asarray([1.0, -1.0, 0.5])
        clipped = ratio.clip(0.8, 1.2)
        expected = {
            "importance_sampling": -(ratio * adv).sum(),
            "ppo": -np.minimum(ratio * adv, clipped * adv).sum(),
            "cispo": -(clipped * adv * lp).sum(),
            "dro": -(lp * adv - 0.025 * (lp - [-1.0, -2.0, -3.0]) ** 2).sum(),
        }
        for name, value in expected.items():
            for found in (client.forward([sampled], name), client.forward_backward([sampled], name)):
                assert found.result().metrics["loss:sum"] == pytest.approx(value, rel=1e-5)
        soft = datum([1, 2, 3], [[2, 9], [3, 9], [4, 9]], weights=[[0.5, 0.25], [1, 0], [0, 2]])
        found = client.forward_backward([soft], "cross_entropy").result()
        assert np.asarray(found.loss_fn_outputs[0]["logprobs"].data).reshape(3, 2)[:, 0] == pytest.approx(lp, abs=1e-5)
        types = client_package().types
        client.optim_step(types.AdamParams(learning_rate=0.01)).result()

        def custom(data: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
            loss = -torch.stack([each.mean() for each in logprobs]).mean()
            return loss, {"mine": float(loss.detach())}

        metrics = client.forward_backward_custom(counting(3), custom).result().metrics
        assert "mine" in metrics
        client.optim_step(types.AdamParams(learning_rate=0.01)).result()


def test_inflight_samplers_go_on_with_new_weights_and_tell_versions(served: Served, tmp_path: Path) -> None:
    types = client_package().types
    with served.server(tmp_path) as url:
        client = served.trained(served.client(url))
        step(client, counting(4))
        first = client.save_weights_and_get_sampling_client(kind="inflight").result()
        prompt, params = types.ModelInput.from_ints([3, 4]), types.SamplingParams(max_tokens=3)
        (before,) = first.sample(prompt, 1, params).result().sequences
        step(client, counting(4))
        client.save_weights_and_get_sampling_client(kind="inflight").result()
        (after,) = first.sample(prompt, 1, params).result().sequences
        versions = [versions_of(url, each.sequence_id.rpartition(":")[0]) for each in (before, after)]
        assert versions == [[[1] * len(before.tokens)], [[2] * len(after.tokens)]]


def versions_of(url: str, request_id: str) -> Any:
    request = urllib.request.Request(f"{url}/api/v1/token_versions/{request_id}", headers={"X-API-Key": TOKENS["ann"]})
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())["versions"]


def test_what_cannot_be_served_is_refused_and_changes_nothing(served: Served, tmp_path: Path) -> None:
    tinker = client_package()
    with served.server(tmp_path, max_models=2) as url:
        service = served.client(url)
        with pytest.raises(tinker.BadRequestError, match="this server has"):
            service.create_lora_training_client("another/model", rank=4).result()
        client = served.trained(service)
        step(client, counting(2))
        path = client.save_state("mine").result().path
        sampler_path = client.save_weights_for_sampler("mine").result().path
        before = factors(served, client)
        with pytest.raises(tinker.BadRequestError, match=r"data\[0\].loss_fn_inputs: ppo needs logprobs"):
            client.forward_backward([datum([1, 2], [2, 3], advantages=[1, 1])], "ppo").result()
        status, answer = ask(url, "create_session", {"sdk_version": "0.24.1", "tags": []})
        assert status == 400
        assert "0.25 or newer" in answer["detail"]
        session = client.model_id.partition(":")[0]
        whole = {"session_id": session, "model_seq_id": 9, "base_model": served.config.model}
        status, answer = ask(url, "create_model", whole)
        assert (status, "no whole model" in answer["detail"]) == (400, True)
        status, answer = ask(url, "forward_backward", {}, **{"Content-Type": "application/json"})
        assert status == 400
        assert "pip install -U tinker" in answer["detail"]
        bob = served.client(url, "bob")
        for act in (
            lambda: bob.create_training_client_from_state(path).result(),
            lambda: bob.create_sampling_client(model_path=sampler_path).result(),
        ):
            with pytest.raises(tinker.NotFoundError, match="there are no such weights"):
                act()
        session = client.model_id.partition(":")[0]
        for name in ("../x", "a/b", ".hidden", ""):
            body = {"model_id": client.model_id, "seq_id": 9, "path": name}
            assert ask(url, "save_weights", body)[0] == 400
        for bad in (f"tinker://{session}:train:0/weights/../../session.json", "/etc/passwd", "tinker://x/weights/y"):
            body = {"session_id": session, "model_seq_id": 5, "path": bad, "optimizer": True}
            assert ask(url, "load_weights", body)[0] in (400, 404)
        assert ask(url, "get_info", {"model_id": client.model_id}, owner="tml-nobody-0123456789")[0] == 401
        assert ask(url, "get_info", {"model_id": client.model_id}, Host="evil.example")[0] == 403
        assert ask(url, "optim_step", b"{")[0] == 400
        served.trained(service)
        with pytest.raises(tinker.BadRequestError, match="2 models, and 2 are allowed"):
            served.trained(service)
        assert equal(before, factors(served, client))


def test_models_that_rest_leave_memory_and_come_back(served: Served, tmp_path: Path) -> None:
    with served.server(tmp_path, max_adapter_mib=0.3) as url:
        service = served.client(url)
        one = served.trained(service)
        step(one, counting(3))
        one.forward_backward(counting(3, start=8), "cross_entropy").result()
        expected = factors(served, one)
        other = served.trained(service, seed=2)
        step(other, counting(3))
        assert one.model_id not in served.train.adapters
        one.forward(counting(1), "cross_entropy").result()
        assert equal(expected, factors(served, one))
        with pytest.raises(client_package().RequestFailedError, match="max_adapter_mib"):
            served.trained(service, rank=64)
