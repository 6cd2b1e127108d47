"""The real client of the Tinker API against the server: training, sampling, restarts and refusals."""

from __future__ import annotations

import importlib
import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tinker.client import TOKENS, client_package, counting, datum
from tests.tinker.serving import Served, ask, equal, factors, settled, step

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning:tinker")


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


def work_from(model_id: str, data: list[Any]) -> Any:
    """The work of a `forward_backward`, from the bytes that the client sends."""
    from rlite.services.tinker.losses import work_of
    from rlite.services.tinker.wire import read_forward

    conv, types = importlib.import_module("tinker.proto.request_conv"), client_package().types
    given = types.ForwardBackwardInput(data=data, loss_fn="cross_entropy")
    asked = types.ForwardBackwardRequest(forward_backward_input=given, model_id=model_id, seq_id=1)
    return work_of(read_forward(conv.forward_backward_request_to_proto(asked).SerializeToString())[0])


def test_two_calls_equal_one_train_batch_and_tenants_do_not_touch_each_other(served: Served, tmp_path: Path) -> None:
    adam = client_package().types.AdamParams(learning_rate=1e-2, grad_clip_norm=served.train.options.max_grad_norm)
    with served.server(tmp_path) as url:
        clients = [served.trained(served.client(url, owner), rank, seed=3) for owner, rank in (("ann", 4), ("bob", 7))]
        alone = [served.trained(served.client(url), rank, seed=3) for rank in (4, 7)]
        batches = [counting(6, start=place) for place in (0, 9, 18)]
        for batch in batches:
            results = [client.forward_backward(batch, "cross_entropy") for client in clients]
            steps = [client.optim_step(adam) for client in clients]
            for future in (*results, *steps):
                future.result()
        for client in alone:
            for batch in batches:
                client.forward_backward(batch, "cross_entropy").result()
                client.optim_step(adam).result()
        assert all(equal(factors(served, a), factors(served, b)) for a, b in zip(clients, alone, strict=True))
        served.train.add_adapter("direct", served.train.adapters[alone[0].model_id], seed=3)
        served.train.optimizer_step("direct", lr=1e-2, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0)
        for batch in batches:
            work = work_from("direct", batch)
            assert served.train.train_batch(work.batch, work.loss, adapter="direct")["is_skipped"] == 0
        alone[0].model_id = "direct"
        assert equal(factors(served, alone[0]), factors(served, clients[0]))


def chunks_and_whole(served: Served, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[torch.Tensor]]:
    """The adapters after two steps, each of one chunk and each of eight."""
    from rlite.services.tinker import server

    with served.server(folder) as url:
        whole = served.trained(served.client(url), seed=5)
        monkeypatch.setitem(server.CONFIG, "fwdbwd_max_chunk_len", 2)
        split = served.trained(served.client(url), seed=5)
        for place in (0, 20):
            data = counting(16, start=place)
            one, eight = (client.forward_backward(data, "cross_entropy").result() for client in (whole, split))
            assert one.metrics["loss:sum"] == pytest.approx(eight.metrics["loss:sum"], rel=1e-6)
            assert len(eight.loss_fn_outputs) == 16
            for client in (whole, split):
                client.optim_step(client_package().types.AdamParams(learning_rate=1e-3)).result()
        return [factors(served, client) for client in (whole, split)]


def test_chunks_add_up_to_the_whole(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for a, b in zip(*chunks_and_whole(served, tmp_path, monkeypatch), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


@pytest.mark.nightly
def test_chunks_in_float64_add_up_to_the_whole(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = Served(Path(served.config.model), served.train, dtype="float64", deterministic=False, max_num_seqs=4)
    for a, b in zip(*chunks_and_whole(exact, tmp_path, monkeypatch), strict=True):
        assert a.dtype == torch.float64
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


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
    with served.server(tmp_path / "one", save_every=2) as url:
        assert ask(url, "optim_step", body) == (200, {"request_id": f"{model_id}:12", "model_id": model_id})
        assert ask(url, "optim_step", different)[0] == 400, "the number is taken also after a restart"
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
        session, number = client.model_id.partition(":")[0], first._sampling_session_id.rpartition(":")[2]
    with served.server(tmp_path) as url:
        ids = [f"{session}:sample:{number}:{place}" for place in (7, 8)]
        body: dict[str, Any] = {"sampling_session_id": f"{session}:sample:{number}", "prompt": {"chunks": []}}
        body["prompt"]["chunks"] = [{"type": "encoded_text", "tokens": [3, 4]}]
        asked = {**body, "sampling_params": {"max_tokens": 3}}
        assert ask(url, "asample", {**asked, "seq_id": 7})[1]["request_id"] == ids[0]
        assert versions_of(url, ids[0]) == [[2] * 3], "a restart does not count anew"
        model = {"model_id": client.model_id, "seq_id": 7, "kind": "inflight", "sampling_session_seq_id": 77}
        settled(url, "save_weights_for_sampler", model)
        assert ask(url, "asample", {**asked, "seq_id": 8})[0] == 200
        assert versions_of(url, ids[1]) == [[3] * 3]


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


def test_a_failed_request_spoils_its_step_wherever_the_model_is_meanwhile(served: Served, tmp_path: Path) -> None:
    types, failed = client_package().types, client_package().RequestFailedError
    endless = datum([1, 2], [2, 3], logprobs=[-1e30, -1e30], advantages=[1.0, 1.0])
    with served.server(tmp_path, max_adapter_mib=0.3) as url:
        service = served.client(url)
        one = served.trained(service)
        step(one, counting(3))
        before = factors(served, one)
        other = served.trained(service, seed=2)
        for is_moved in (False, True):
            one.forward_backward(counting(3, start=8), "cross_entropy").result()
            with pytest.raises(failed, match="the loss is"):
                one.forward_backward([endless], "importance_sampling").result()
            if is_moved:
                step(other, counting(3))
                assert one.model_id not in served.train.adapters
            with pytest.raises(failed, match="no step was made"):
                one.optim_step(types.AdamParams(learning_rate=1e-2)).result()
            one.forward(counting(1), "cross_entropy").result()
            assert equal(before, factors(served, one))
        with pytest.raises(failed, match="the loss is"):
            one.forward_backward([endless], "importance_sampling").result()
        model_id, seq_id = one.model_id, 12
    with served.server(tmp_path, max_adapter_mib=0.3) as url:
        body = {"model_id": model_id, "seq_id": seq_id, "adam_params": {}}
        assert "no step was made" in settled(url, "optim_step", body)["error"]
        assert settled(url, "optim_step", {**body, "seq_id": seq_id + 1})["metrics"]["is_skipped:max"] == 1
        assert equal(before, factors(served, one))


def rest_client(url: str, owner: str = "ann") -> Any:
    return client_package().RestClient(base_url=url, api_key=TOKENS[owner])


def test_saved_weights_expire_and_lists_say_so(served: Served, tmp_path: Path) -> None:
    with served.server(tmp_path) as url:
        service = served.client(url)
        client, rest = served.trained(service), rest_client(url)
        step(client, counting(2))
        paths = [client.save_state(name, ttl_seconds=3600).result().path for name in ("one", "two")]
        sampler = client.save_weights_for_sampler("three").result().path
        found = {each.tinker_path: each for each in rest.list_user_checkpoints().result().checkpoints}
        assert set(found) == {*paths, sampler}
        assert all(3500 < found[path].expires_at.timestamp() - time.time() < 3700 for path in paths)
        assert found[sampler].expires_at is None
        assert found[sampler].size_bytes < 0.5 * found[paths[0]].size_bytes, "no optimizer"
        rest.set_checkpoint_ttl_from_tinker_path(paths[0], None).result()
        rest.set_checkpoint_ttl_from_tinker_path(paths[1], 1).result()
        time.sleep(1.1)
        assert [each.tinker_path for each in rest.list_checkpoints(client.model_id).result().checkpoints] == [
            sampler,
            paths[0],
        ]
        with pytest.raises(client_package().NotFoundError, match="there are no such weights"):
            service.create_training_client_from_state(paths[1]).result()
        (folder,) = tmp_path.glob("s*/train-0/weights")
        until = time.monotonic() + 20
        while (folder / "two").exists() and time.monotonic() < until:
            time.sleep(0.1)
        assert sorted(each.name for each in folder.iterdir()) == [".one.json", "one"]
        client.save_state("two").result()
        told = json.loads((tmp_path / "tinker.json").read_bytes())
        assert told["base"] == served.config.model
        (model,) = told["models"]
        assert (model["model"], model["tenant"], model["steps"]) == (client.model_id, "ann", 1)
        assert model["points"][0]["loss_per_token"] > 0


def test_rest_client_lists_copies_and_deletes(served: Served, tmp_path: Path) -> None:
    tinker = client_package()
    with served.server(tmp_path) as url:
        service, told = served.client(url), {"renderer_name": "plain"}
        rest = rest_client(url)
        client = service.create_lora_training_client(served.config.model, rank=3, user_metadata=told).result()
        step(client, counting(2))
        state = client.save_state("mine").result().path
        run = rest.get_training_run_by_tinker_path(state).result()
        assert (run.lora_rank, run.user_metadata, run.last_checkpoint.tinker_path) == (3, told, state)
        info = rest.get_weights_info_by_tinker_path(state).result()
        assert (info.base_model, info.lora_rank, info.train_mlp) == (served.config.model, 3, True)
        copied = rest.copy_weights(state, "any-project", ttl_seconds=3600).result()
        assert not copied.startswith(f"tinker://{client.model_id}")
        resumed = service.create_training_client_from_state_with_optimizer(copied).result()
        for each in (client, resumed):
            step(each, counting(4, start=20))
        assert equal(factors(served, client), factors(served, resumed))
        runs = rest.list_training_runs(limit=2).result()
        assert [each.training_run_id for each in runs.training_runs] == [
            copied.split("/")[2],
            resumed.model_id,
        ]
        assert runs.cursor.total_count == 3
        assert set(rest.list_sessions().result().sessions) >= {client.model_id.partition(":")[0]}
        sampler = client.save_weights_and_get_sampling_client().result()
        session = rest.get_session(client.model_id.partition(":")[0]).result()
        assert session.training_run_ids == [client.model_id, resumed.model_id]
        assert session.sampler_ids == [sampler._sampling_session_id]
        rest.delete_checkpoint_from_tinker_path(state).result()
        assert rest.list_checkpoints(client.model_id).result().checkpoints == []
        with pytest.raises(tinker.NotFoundError):
            rest_client(url, "bob").get_training_run(client.model_id).result()


def test_sparse_targets_equal_dense_ones(served: Served, tmp_path: Path) -> None:
    types = client_package().types
    targets, weights = torch.zeros(6, 8, dtype=torch.long), torch.zeros(6, 8)
    targets[:, :2], weights[:, 0], weights[2, 1] = torch.tensor([[4, 9]] * 6), 0.5, 0.25
    with served.server(tmp_path) as url:
        client = served.trained(served.client(url))
        losses = []
        for of in (types.TensorData.from_torch, types.TensorData.from_torch_sparse):
            inputs = {"target_tokens": of(targets), "weights": of(weights)}
            row = types.Datum(model_input=types.ModelInput.from_ints([1, 2, 3, 4, 5, 6]), loss_fn_inputs=inputs)
            losses.append(client.forward_backward([row], "cross_entropy").result().metrics["loss:sum"])
        assert inputs["weights"].sparse_crow_indices is not None
        assert losses[0] == losses[1]


def test_models_of_lost_clients_do_not_count(served: Served, tmp_path: Path) -> None:
    with served.server(tmp_path, max_models=1, idle_minutes=0.02) as url:
        served.trained(served.client(url))
        with pytest.raises(client_package().BadRequestError, match="1 models, and 1 are allowed"):
            served.trained(served.client(url))
        time.sleep(1.5)
        served.trained(served.client(url))


def test_the_example_of_the_docs_learns(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs" / "tinker.md").read_text()
    names: dict[str, Any] = {}
    exec(text.split("```python\n")[1].split("```")[0], names)
    with served.server(tmp_path) as url:
        monkeypatch.setenv("TINKER_BASE_URL", url)
        monkeypatch.setenv("TINKER_API_KEY", TOKENS["ann"])
        assert len(names["learn"](counting(4), served.config.model)) == 16


def test_requests_that_overtake_each_other_are_worked_on_in_order(served: Served, tmp_path: Path) -> None:
    with served.server(tmp_path) as url:
        client = served.trained(served.client(url))
        for seq_id in (2, 1, 4, 3, 6, 7, 5):
            body = {"model_id": client.model_id, "seq_id": seq_id, "path": f"number-{seq_id}"}
            assert ask(url, "save_weights_for_sampler", body)[0] == 200
        assert "number-7" in settled(url, "save_weights_for_sampler", {**body, "seq_id": 7, "path": "number-7"})["path"]
        times = [json.loads(file.read_bytes())["time"] for file in sorted(tmp_path.glob("s*/*/*/.number-*.json"))]
        assert times == sorted(times)
        assert len(times) == 7
