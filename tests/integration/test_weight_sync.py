"""Weights from one engine to another, on real processes: two CPU slots over gloo, rank 0 in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from rlite import NeedParallel, RliteInferenceEngine, RliteTrainEngine
from rlite.engine import weights as weight_sync_module
from rlite.engine.weight_plan import make_plan
from rlite.engine.weights import Transport, sync_weights
from rlite.errors import ConfigError, ResidencyError, WeightSyncError
from rlite.runtime.cluster.group import apply_on_processes
from rlite.runtime.parallel.shards import Box
from rlite.runtime.replicas import transport as transport_module
from rlite.runtime.replicas.engine import Engine, Weights
from rlite.runtime.replicas.workers import Worker
from rlite.types import GenerationHyperparameters, LLMRequest, LLMResponse, TokenChunk
from tests.faulty_serving import TENSOR
from tests.integration.modules import POLICIES, Policy, next_token_logprobs, on_meta
from tests.integration.worlds import world
from tests.marks import nightly
from tests.tiny import build_model_dir

GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
PROMPTS = [[1, 2, 3], [200, 7, 91, 4, 77, 8], [5]]


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with world(2):
        yield


class Engines:
    """Builds engines, colocated with the first one if they fit there."""

    def __init__(self) -> None:
        self.built: list[Engine] = []

    def train(self, path: Path, module: type | None = None, size: int = 1, **options: Any) -> RliteTrainEngine:
        if module is None:
            module = next(policy for kind, policy in POLICIES.items() if path.name.startswith(kind))
        return self._build(RliteTrainEngine(on_meta(module, path)), size, options)

    def serve(self, path: Path, size: int = 1, max_model_len: int = 64, **options: Any) -> RliteInferenceEngine:
        options = {"max_model_len": max_model_len, "max_num_seqs": 4, **options}
        return self._build(RliteInferenceEngine(path), size, options)

    def _build(self, engine: Any, size: int, options: dict[str, Any]) -> Any:
        options.setdefault("colocate_with", self.built[:1])
        engine.build(tensor_parallel_size=size, **{"data_parallel_size": 1, **options})
        self.built.append(engine)
        return engine


@pytest.fixture
def engines() -> Iterator[Engines]:
    made = Engines()
    yield made
    for engine in made.built:
        engine.release()


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied, and its sizes divide by no number of ranks."""
    path = tmp_path_factory.mktemp("uneven") / "llama-uneven"
    return build_model_dir(path, "llama", tie=False, hidden=64, layers=1, intermediate_size=191)


def train_a_little(engine: RliteTrainEngine, steps: int = 2, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        engine.train_step(NeedParallel(torch.randint(0, 256, (4, 12), generator=generator).tolist()))


def boxes(worker: Worker) -> dict[str, tuple[Box, Tensor]]:
    return {name: (shard.box, shard.tensor.detach().clone()) for name, shard in worker.parameter_shards().items()}


def assert_holds(engine: Engine, expected: dict[str, Tensor]) -> None:
    """Every worker of the engine holds, bit by bit, its boxes of these weights."""
    group = engine.group
    calls = [(group, rank, (group.key(rank),), ()) for rank in range(len(group))]
    for held in apply_on_processes(calls, boxes, [group], "read weights", 60):
        assert held
        for name, (box, tensor) in held.items():
            assert torch.equal(tensor, expected[name][box].to(tensor.dtype)), name


def reference(path: Path, weights: dict[str, Tensor]) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(path)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}, "only what is tied may be missing"
    return model.eval()


@torch.no_grad()
def assert_made_by(model: torch.nn.Module, prompt: list[int], tokens: list[int], logprobs: list[float]) -> None:
    """The greedy choices and log-probabilities of `model`, each token seeing those before it."""
    made = slice(len(prompt) - 1, -1)
    all_logprobs = model(torch.tensor([prompt + tokens])).logits[0, made].log_softmax(-1)
    assert all_logprobs.argmax(-1).tolist() == tokens
    expected = all_logprobs.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs), expected, atol=5e-5, rtol=0)


# -- what is served is what was trained --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "train_size", "serve_size"),
    [("qwen2", 1, 1), ("llama", 1, 2), ("qwen3", 2, 1), ("qwen2", 2, 2), ("qwen3", 2, 2), ("llama", 2, 2)],
)
def test_the_served_model_is_the_trained_model(
    engines: Engines, models: dict[str, Path], kind: str, train_size: int, serve_size: int
) -> None:
    path = models[kind]
    make = [lambda: engines.train(path, size=train_size), lambda: engines.serve(path, serve_size)]
    built = {type(engine): engine for engine in (f() for f in (make if train_size >= serve_size else make[::-1]))}
    train, serve = built[RliteTrainEngine], built[RliteInferenceEngine]
    before = serve.generate(PROMPTS, GREEDY)
    train_a_little(train)
    report = train.p2p_weight_sync(serve)
    assert report.num_bytes == sum(tensor.nbytes for tensor in train.state_dict().values()) or serve_size == 2
    after = serve.generate(PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in after] != [o.outputs[0].token_ids for o in before]
    model = reference(path, train.state_dict())
    for prompt, output in zip(PROMPTS, after, strict=True):
        assert_made_by(model, prompt, output.outputs[0].token_ids, output.outputs[0].logprobs)
    # and what the trainer says of the same tokens
    rows = [prompt + output.outputs[0].token_ids for prompt, output in zip(PROMPTS, after, strict=True)]
    width = max(map(len, rows))
    padded = [row + [0] * (width - len(row)) for row in rows]
    mask = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
    scored = train.forward(
        {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(mask)}, next_token_logprobs
    )
    for row, prompt, output in zip(scored, PROMPTS, after, strict=True):
        told = torch.tensor(output.outputs[0].logprobs)
        torch.testing.assert_close(row[len(prompt) - 1 : len(prompt) - 1 + len(told)], told, atol=5e-5, rtol=0)


@pytest.mark.parametrize("transport", ["shared", "broadcast", "gathered"])
def test_every_transport_brings_the_same_bits_to_any_sharding(
    engines: Engines, uneven: Path, transport: Transport
) -> None:
    train, serve = engines.train(uneven, size=2), engines.serve(uneven, 2)
    for seed in range(2):  # twice: buffers of the first sync are used again
        train_a_little(train, 1, seed)
        report = sync_weights(train, serve, "continue", verify_checksums=True, transport=transport)
        assert report.transport == transport
        assert_holds(serve, train.state_dict())


def meetings(engine: Engine) -> list[set]:
    """The process groups between engines that each process is in."""
    group = engine.group
    calls = [(group, rank, (), ()) for rank in range(len(group))]
    return apply_on_processes(calls, lambda: set(transport_module._groups), [group], "look", 60)


def test_one_process_group_serves_all_syncs_of_two_engines_until_one_is_released(
    engines: Engines, uneven: Path
) -> None:
    train, serve = engines.train(uneven, size=2), engines.serve(uneven, 2)
    seen = []
    for _ in range(3):
        sync_weights(train, serve, "continue", verify_checksums=False, transport="broadcast")
        seen.append(meetings(serve))
    assert seen == [seen[0]] * 3
    assert len(seen[0][0]) == 1
    assert seen[0][0] == seen[0][1]
    train.release()
    assert meetings(serve) == [set(), set()]
    again = engines.train(uneven, size=2, colocate_with=serve)
    sync_weights(again, serve, "continue", verify_checksums=True, transport="broadcast")
    assert meetings(serve) != seen[0]
    serve.release()
    assert meetings(again) == [set(), set()]


class Renaming(Policy, Qwen2ForCausalLM):
    """Module in which a norm has another name, as in a module that wraps the model."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.last_norm = self.model._modules.pop("norm")

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        self.model.__dict__["norm"] = self.model.last_norm  # where transformers looks for it
        return super().forward(input_ids, **kwargs)

    def checkpoint_name(self, name: str) -> str:
        return name.replace("last_norm", "norm")

    def postprocess_named_parameter(self, name: str, tensor: Tensor) -> tuple[str, Tensor]:
        return self.checkpoint_name(name), tensor


@pytest.mark.parametrize("transport", ["shared", "broadcast", "gathered"])
def test_a_module_may_call_its_parameters_otherwise(
    engines: Engines, models: dict[str, Path], transport: Transport
) -> None:
    train, serve = engines.train(models["qwen2"], Renaming, size=2), engines.serve(models["qwen2"], 2)
    train_a_little(train, 1)
    sync_weights(train, serve, "continue", verify_checksums=True, transport=transport)
    assert "model.norm.weight" in train.state_dict()
    assert_holds(serve, train.state_dict())


def test_equal_replicas_and_later_syncs_share_a_plan(
    engines: Engines, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def counted(sources: Any, targets: Any, target_name: str) -> Any:
        made.append(len(sources))
        return make_plan(sources, targets, target_name)

    monkeypatch.setattr(weight_sync_module, "make_plan", counted)
    serve = engines.serve(models["qwen2"], data_parallel_size=2)
    for size in (2, 1):  # another source is laid out otherwise
        train = engines.train(models["qwen2"], size=size)
        for _ in range(2):
            train_a_little(train, 1)
            sync_weights(train, serve, "continue", verify_checksums=True)
            assert_holds(serve, train.state_dict())
    assert made == [2, 1]


@pytest.mark.parametrize("transport", ["broadcast", *nightly("shared", "gathered")])
def test_one_source_sends_to_one_target_at_a_time(
    engines: Engines, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, transport: Transport
) -> None:
    monkeypatch.setattr(transport_module.make_buckets, "__defaults__", (2**16,))  # bytes; several buckets
    train = engines.train(models["qwen2"], size=2)
    targets = [engines.serve(models["qwen2"], 2), engines.serve(models["qwen2"], 1)]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(8):
            train_a_little(train, 1)
            list(pool.map(lambda target: sync_weights(train, target, "continue", False, transport), targets))
            for target in targets:
                assert_holds(target, train.state_dict())


@pytest.mark.nightly
def test_one_target_receives_from_one_source_at_a_time(
    engines: Engines, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport_module.make_buckets, "__defaults__", (2**16,))  # bytes; several buckets
    sources = [engines.train(models["qwen2"], size=2) for _ in range(2)]
    sources[1].scale_weights(1.5)
    target = engines.train(models["qwen2"], size=2)
    expected = [source.state_dict() for source in sources]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(8):
            reports = list(
                pool.map(lambda source: sync_weights(source, target, "continue", False, "gathered"), sources)
            )
            last = max(range(2), key=lambda source: reports[source].version)
            assert_holds(target, expected[last])
    assert target.get_version() == 16


def test_replicas_gather_for_targets_on_all_of_their_devices(engines: Engines, models: dict[str, Path]) -> None:
    train = engines.train(models["qwen2"], data_parallel_size=2)
    serve = engines.serve(models["qwen2"], data_parallel_size=2)
    train_a_little(train, 1)
    report = sync_weights(train, serve, "continue", verify_checksums=True, transport="gathered")
    assert report.num_bytes == 2 * sum(tensor.nbytes for tensor in train.state_dict().values())
    assert_holds(serve, train.state_dict())


def staged_bytes(engine: Engine) -> list[int]:
    """Bytes of memory in which each source worker offers copies to others."""
    group = engine.group
    calls = [(group, rank, (group.key(rank),), ()) for rank in range(len(group))]
    return apply_on_processes(calls, lambda worker: getattr(worker.staged, "nbytes", 0), [group], "look", 60)


def test_gathered_weights_are_staged_once_in_the_dtype_of_their_readers(
    engines: Engines, models: dict[str, Path]
) -> None:
    train, serve = engines.train(models["qwen2"], size=2), engines.serve(models["qwen2"], dtype="bfloat16")
    sync_weights(train, serve, "continue", verify_checksums=True, transport="gathered")
    weights = sum(tensor.numel() for tensor in train.state_dict().values())
    staged = staged_bytes(train)
    assert max(staged) < 1.1 * 2 * weights, "two bytes for each weight, some of them for alignment"


def test_devices_without_a_source_are_refused_before_weights_are_gathered(
    engines: Engines, models: dict[str, Path]
) -> None:
    train, serve = engines.train(models["llama"]), engines.serve(models["llama"], colocate_with=None)
    with pytest.raises(ConfigError, match=r"transport='gathered': .* has .*cpu:1, which .* does not have. Use 'auto'"):
        sync_weights(train, serve, "continue", verify_checksums=False, transport="gathered")
    assert serve.generate(PROMPTS[:1], GREEDY), "the old weights still serve"


@pytest.mark.parametrize("transport", ["shared", "broadcast"])
def test_weights_reach_a_process_that_hosts_no_source(
    engines: Engines, models: dict[str, Path], transport: Transport
) -> None:
    train = engines.train(models["llama"])
    serve = engines.serve(models["llama"], colocate_with=None)
    assert train.group.devices != serve.group.devices
    train_a_little(train, 1)
    sync_weights(train, serve, "continue", verify_checksums=True, transport=transport)
    assert_holds(serve, train.state_dict())


@pytest.mark.parametrize(("source_size", "target_size"), [(1, 2), (2, 1)])
def test_a_train_engine_takes_weights_too(engines: Engines, uneven: Path, source_size: int, target_size: int) -> None:
    first = engines.train(uneven, size=2)
    other = engines.train(uneven, size=1)
    source, target = (first, other) if source_size == 2 else (other, first)
    train_a_little(source, 1)
    source.p2p_weight_sync(target)
    assert target.get_version() == 1
    expected = source.state_dict()
    assert_holds(target, expected)
    train_a_little(target, 1)
    assert not torch.equal(target.state_dict()["model.norm.weight"], expected["model.norm.weight"])
    assert torch.equal(source.state_dict()["model.norm.weight"], expected["model.norm.weight"])


@pytest.mark.parametrize("transport", ["shared", "broadcast", "gathered"])
def test_weights_are_converted_to_the_targets_dtype(
    engines: Engines, models: dict[str, Path], transport: Transport
) -> None:
    train, serve = engines.train(models["qwen2"], size=2), engines.serve(models["qwen2"], dtype="bfloat16")
    train_a_little(train, 1)
    sync_weights(train, serve, "continue", verify_checksums=True, transport=transport)
    assert_holds(serve, train.state_dict())
    assert serve.memory_bytes()[0]["weights"] * 2 == sum(t.nbytes for t in train.state_dict().values())


# -- strictness --------------------------------------------------------------------------------------------------------


def test_a_source_that_does_not_fit_leaves_the_target_unusable_until_one_does(
    engines: Engines, models: dict[str, Path], tmp_path: Path
) -> None:
    serve = engines.serve(models["qwen2"])
    untied = build_model_dir(tmp_path / "qwen2-untied", "qwen2", tie=False, hidden=64)
    wider = build_model_dir(tmp_path / "qwen2-wider", "qwen2", tie=True, hidden=64, intermediate_size=200)
    for path, words in [(models["llama"], "missing in the source"), (untied, "lm_head"), (wider, "200")]:
        train = engines.train(path)
        with pytest.raises(WeightSyncError, match=words):
            train.p2p_weight_sync(serve)
        with pytest.raises(ResidencyError, match="not written yet; sync weights"):
            serve.generate(PROMPTS, GREEDY)
        with pytest.raises(ResidencyError, match="not written yet"):
            asyncio.run(serve.agenerate(LLMRequest(input_ids=[1])))
        assert serve.get_version() == 0
        train.release()
    train = engines.train(models["qwen2"])
    train.p2p_weight_sync(serve)
    assert len(serve.generate(PROMPTS, GREEDY)) == 3


class Unsteady(Policy, Qwen2ForCausalLM):
    """Module whose sent weights differ each time, as if memory were damaged on the way."""

    def postprocess_named_parameter(self, name: str, tensor: Tensor) -> tuple[str, Tensor]:
        return name, tensor + torch.rand_like(tensor) if name == "model.norm.weight" else tensor


def test_checksums_find_what_arrived_differently(engines: Engines, models: dict[str, Path]) -> None:
    train, serve = engines.train(models["qwen2"], Unsteady), engines.serve(models["qwen2"])
    train.p2p_weight_sync(serve)
    with pytest.raises(WeightSyncError, match=r"model\.norm\.weight on inference-.* is not what train-.* sent"):
        train.p2p_weight_sync(serve, verify_checksums=True)
    with pytest.raises(ResidencyError):
        serve.generate(PROMPTS, GREEDY)


@pytest.mark.parametrize(("size", "copies"), [(1, 2), (2, 1)])
def test_a_verified_sync_names_the_worker_that_serves_a_flipped_bit(
    engines: Engines, models: dict[str, Path], size: int, copies: int
) -> None:
    train = engines.train(models["qwen3"], size=2)
    serve = RliteInferenceEngine(models["qwen3"], executor="flipped")
    engines._build(serve, size, {"max_model_len": 64, "max_num_seqs": 4, "data_parallel_size": copies})
    train_a_little(train, 1)
    with pytest.raises(WeightSyncError, match=rf"^{TENSOR} on inference-\d+ rank 1 [^;]* sent, as it is served$"):
        train.p2p_weight_sync(serve, verify_checksums=True)


def test_replicas_whose_own_checksums_differ_are_named(engines: Engines, models: dict[str, Path]) -> None:
    train = engines.train(models["qwen2"], size=2)
    serve = RliteInferenceEngine(models["qwen2"], executor="disagrees")
    engines._build(serve, 1, {"max_model_len": 64, "data_parallel_size": 2})
    with pytest.raises(WeightSyncError, match=r"^norm@0, of which the first .* on inference-\d+ rank 1 "):
        train.p2p_weight_sync(serve, verify_checksums=True)


def test_weights_that_are_not_finite_are_named(engines: Engines, models: dict[str, Path]) -> None:
    train, serve = engines.train(models["qwen2"], size=2), engines.serve(models["qwen2"])
    train.fill("model.layers.1.input_layernorm.weight", float("nan"))
    with pytest.raises(WeightSyncError, match=r"not finite: .*layers\.1\.input_layernorm"):
        train.p2p_weight_sync(serve, verify_checksums=True)


def test_engines_that_cannot_take_part_are_named(engines: Engines, models: dict[str, Path]) -> None:
    train, serve = engines.train(models["qwen2"]), engines.serve(models["qwen2"])
    with pytest.raises(ConfigError, match="on_inflight='later'"):
        train.p2p_weight_sync(serve, on_inflight="later")
    with pytest.raises(ConfigError, match="with itself"):
        train.p2p_weight_sync(train)
    serve.meta()
    with pytest.raises(ResidencyError, match="no memory for weights"):
        train.p2p_weight_sync(serve)
    train.meta()
    with pytest.raises(ResidencyError, match="p2p_weight_sync: the weights of train-"):
        train.p2p_weight_sync(serve)


# -- residency and versions --------------------------------------------------------------------------------------------


def test_memory_is_given_back_and_filled_by_a_sync(engines: Engines, models: dict[str, Path]) -> None:
    train, serve = engines.train(models["qwen2"], size=2), engines.serve(models["qwen2"], 2)
    serve.meta()
    assert serve.memory_bytes() == [{"weights": 0, "kv_cache": 0}] * 2
    with pytest.raises(ResidencyError, match="released by meta"):
        serve.cuda()
    train_a_little(train, 1)
    serve.cuda("weights")
    serve.abort_all()
    train.p2p_weight_sync(serve, on_inflight="abort")  # nothing is in flight, and there is no cache to look for it in
    train.cpu()
    with pytest.raises(ResidencyError, match=r'cuda\("kv_cache"\)'):
        serve.generate(PROMPTS, GREEDY)
    serve.cuda("kv_cache")
    assert_holds(serve, train.state_dict())
    assert len(serve.generate(PROMPTS, GREEDY)) == 3
    serve.load()
    fresh = engines.serve(models["qwen2"])
    expected = [output.outputs[0].token_ids for output in fresh.generate(PROMPTS, GREEDY)]
    assert [output.outputs[0].token_ids for output in serve.generate(PROMPTS, GREEDY)] == expected


def test_a_sync_that_waited_while_the_target_was_released_is_refused(
    engines: Engines, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    train, serve = engines.train(models["qwen2"]), engines.serve(models["qwen2"])
    is_waiting, has_moved = threading.Event(), threading.Event()
    enter = serve.receiving_weights

    def wait_for_move(on_inflight: str) -> Any:
        is_waiting.set()
        assert has_moved.wait(60)
        return enter(on_inflight)

    monkeypatch.setattr(serve, "receiving_weights", wait_for_move)
    with ThreadPoolExecutor(1) as pool:
        report = pool.submit(train.p2p_weight_sync, serve)
        assert is_waiting.wait(60)
        serve.meta()
        has_moved.set()
        with pytest.raises(ResidencyError, match="no memory for weights"):
            report.result(60)
    assert serve.weights is Weights.RELEASED


def test_a_source_that_was_released_and_loaded_again_is_not_read_where_it_was(
    engines: Engines, models: dict[str, Path]
) -> None:
    train, serve = engines.train(models["llama"], size=2), engines.serve(models["llama"])
    train_a_little(train, 1)
    train.p2p_weight_sync(serve)
    train.meta()  # the target still has this memory mapped; the new one may get the same file descriptor and size
    train.load()
    train.p2p_weight_sync(serve)
    assert_holds(serve, train.state_dict())


def test_the_version_counts_syncs_and_is_stamped_on_tokens(engines: Engines, models: dict[str, Path]) -> None:
    train, serve = engines.train(models["qwen2"]), engines.serve(models["qwen2"])
    assert serve.generate([[1]], GREEDY)[0].outputs[0].versions == [0] * 12
    assert train.p2p_weight_sync(serve).version == 1
    serve.set_version(7)
    assert train.p2p_weight_sync(serve).version == 8
    assert serve.generate([[1]], GREEDY)[0].outputs[0].versions == [8] * 12


# -- generation in flight ----------------------------------------------------------------------------------------------


def sync_while_generating(
    serve: RliteInferenceEngine,
    prompts: list[list[int]],
    sync: Callable[[], object],
    on_chunk: Callable[[int, TokenChunk], object] = lambda number, chunk: None,
) -> list[Any]:
    """Start long greedy requests, sync once each has some tokens, and wait for the responses or errors."""
    gconfig = GenerationHyperparameters(greedy=True, max_new_tokens=900, ignore_eos=True)

    async def run() -> list[Any]:
        begun = [threading.Event() for _ in prompts]

        def tell(number: int) -> Callable[[TokenChunk], None]:
            def take(chunk: TokenChunk) -> None:
                on_chunk(number, chunk)
                begun[number].set()

            return take

        requests = [
            asyncio.ensure_future(serve.agenerate(LLMRequest(input_ids=prompt, gconfig=gconfig), tell(number)))
            for number, prompt in enumerate(prompts)
        ]
        for event in begun:
            await asyncio.to_thread(event.wait, 60)
        await asyncio.to_thread(sync)
        return await asyncio.gather(*requests, return_exceptions=True)

    return asyncio.run(run())


def test_requests_in_flight_go_on_with_the_new_weights(engines: Engines, models: dict[str, Path]) -> None:
    path = models["qwen3"]
    train, serve = engines.train(path, size=2), engines.serve(path, 2, max_model_len=1024)
    train_a_little(train, 1)
    old = AutoModelForCausalLM.from_pretrained(path)
    new = reference(path, train.state_dict())
    responses = sync_while_generating(serve, PROMPTS, lambda: train.p2p_weight_sync(serve, "continue"))
    for prompt, response in zip(PROMPTS, responses, strict=True):
        assert response.stop_reason == "length"
        assert set(response.output_versions) == {0, 1}
        assert response.output_versions == sorted(response.output_versions)
        num_old = response.output_versions.count(0)
        tokens, logprobs = response.output_tokens, response.output_logprobs
        assert_made_by(old, prompt, tokens[:num_old], logprobs[:num_old])
        some = slice(num_old, num_old + 40)
        assert_made_by(new, prompt + tokens[:num_old], tokens[some], logprobs[some])


def test_each_stretch_of_an_interrupted_answer_is_as_the_trainers_forward_at_its_version(
    engines: Engines, models: dict[str, Path], tmp_path: Path
) -> None:
    train = engines.train(models["qwen2"], size=2)
    serve = engines.serve(models["qwen2"], data_parallel_size=2, max_model_len=1024)
    saved: list[Path | None] = [None, tmp_path / "1", tmp_path / "2"]
    seen, is_news = set(), threading.Condition()

    def note(number: int, chunk: TokenChunk) -> None:
        with is_news:
            seen.add((number, chunk.version))
            is_news.notify()

    def two_updates() -> None:
        for step in (1, 2):
            serve.pause()  # so that there is something left to make with the new weights
            train_a_little(train, 1, seed=step)
            train.save(saved[step])
            serve.resume()
            train.p2p_weight_sync(serve, "continue")
            with is_news:
                assert is_news.wait_for(lambda: {(n, step) for n in range(len(PROMPTS))} <= seen, 60)  # noqa: B023

    responses = sync_while_generating(serve, PROMPTS, two_updates, note)
    rows = [prompt + response.output_tokens for prompt, response in zip(PROMPTS, responses, strict=True)]
    width = max(map(len, rows))
    batch = {
        "input_ids": torch.tensor([row + [0] * (width - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]),
    }
    for version in (0, 1, 2):
        train.load(saved[version])
        logprobs = train.forward(batch, next_token_logprobs)
        for row, (prompt, response) in enumerate(zip(PROMPTS, responses, strict=True)):
            versions = torch.tensor(response.output_versions)
            assert versions.unique().tolist() == [0, 1, 2]
            assert (versions.diff() >= 0).all(), "never a token of older weights after one of newer"
            own = logprobs[row, len(prompt) - 1 : len(prompt) - 1 + len(versions)]
            said = torch.tensor(response.output_logprobs)
            torch.testing.assert_close(said[versions == version], own[versions == version], atol=1e-4, rtol=0)
            assert (said - own)[versions != version].abs().max() > 1e-2, "the weights differ by more than noise"


def test_requests_in_flight_are_aborted_if_asked(engines: Engines, models: dict[str, Path]) -> None:
    path = models["qwen2"]
    train, serve = engines.train(path), engines.serve(path, max_model_len=1024)
    for response in sync_while_generating(serve, PROMPTS, lambda: train.p2p_weight_sync(serve, "abort")):
        assert response.stop_reason == "abort"
        assert 0 < response.output_len < 900
        assert set(response.output_versions) == {0}
    assert serve.num_in_flight == 0
    assert serve.generate([[1]], GREEDY)[0].outputs[0].versions == [1] * 12


def test_requests_in_flight_end_with_a_sync_that_fails(engines: Engines, models: dict[str, Path]) -> None:
    train, serve = engines.train(models["qwen2"]), engines.serve(models["qwen2"], max_model_len=1024)
    other = engines.train(models["llama"])

    def fail() -> None:
        with pytest.raises(WeightSyncError, match="missing in the source"):
            other.p2p_weight_sync(serve)

    for error in sync_while_generating(serve, PROMPTS, fail):
        assert isinstance(error, WeightSyncError)
        assert "this request was ended: the source does not fit" in str(error)
    train.p2p_weight_sync(serve)
    assert serve.num_in_flight == 0
    assert serve.generate([[1]], GREEDY)[0].outputs[0].versions == [1] * 12


def test_a_paused_engine_rests_over_a_sync_and_goes_on_when_told(engines: Engines, models: dict[str, Path]) -> None:
    train, serve = engines.train(models["qwen2"]), engines.serve(models["qwen2"])

    async def run() -> LLMResponse:
        serve.pause()
        with pytest.raises(ResidencyError, match=r"resume\(\)"):
            serve.generate(PROMPTS, GREEDY)
        gconfig = GenerationHyperparameters(greedy=True, max_new_tokens=4, ignore_eos=True)
        request = asyncio.ensure_future(serve.agenerate(LLMRequest(input_ids=[1], gconfig=gconfig)))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(train.p2p_weight_sync, serve)
        await asyncio.sleep(0.2)
        assert not request.done()
        serve.resume()
        return await request

    assert asyncio.run(run()).output_versions == [1] * 4
