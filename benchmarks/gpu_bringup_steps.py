"""The steps of `benchmarks.gpu_bringup`, each of which it runs in a process of its own.

    python -m benchmarks.gpu_bringup_steps STEP --device cuda --out FOLDER

A step is a generator of results, which are printed and kept as they come. It fails by raising.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import inspect
import json
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import rlite

# rlite before torch: it sets how idle threads wait, which torch reads once
import torch  # isort: skip
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from benchmarks import gpu_training
from benchmarks.gpu_bringup import write_record
from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.backends.embedded.cache import EmbeddedOptions
from rlite.backends.embedded.worker import EmbeddedWorker
from rlite.backends.models.attention import PackedLayout, packed_attention
from rlite.engine.weight_plan import make_plan
from rlite.runtime.parallel.host_memory import device_usage
from rlite.runtime.parallel.processes import process_identity
from rlite.runtime.parallel.shards import ParameterShard
from rlite.runtime.replicas.transport import Layout, Place, gather, read, unshare
from rlite.trainer.losses import SftLoss
from rlite.trainer.model.modules import policy_module
from rlite.trainer.model.options import OptimizerOptions
from rlite.types import GenerationHyperparameters, SequenceRequest
from tests.tiny import build_model_dir

Results = Iterator[dict[str, Any]]
GIB = 2**30
ROUNDS = 20
PACKAGES = ("transformers", "tensordict", "accelerate", "safetensors", "liger-kernel", "ray", "triton", "vllm")
OPTIMIZER = OptimizerOptions(lr=1e-4, weight_decay=0.01, scheduler="constant", warmup_steps=0, total_steps=100)


# -- what is here ------------------------------------------------------------------------------------------------------


def versions(device: str, out: Path) -> Results:
    """Versions of what takes part, and what the device is."""
    yield {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    yield {"rlite": rlite.__version__, "processors": os.cpu_count()}
    for name in PACKAGES:
        installed = importlib.util.find_spec(name.replace("-", "_")) is not None
        yield {name: importlib.metadata.version(name) if installed else None}
    yield {"varlen_attn": ",".join(inspect.signature(varlen_attn).parameters)}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        yield {"device": properties.name, "capability": f"{properties.major}.{properties.minor}"}
        yield {"memory_gib": properties.total_memory / GIB, "num_devices": torch.cuda.device_count()}
        yield {"nccl": ".".join(map(str, torch.cuda.nccl.version())), "cudnn": torch.backends.cudnn.version()}
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        yield {"driver": subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()}


# -- attention ---------------------------------------------------------------------------------------------------------


def attention(device: str, out: Path) -> Results:
    """Packs against each sequence alone in float32: relative errors of output and gradients; then the speed."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    limit = 0.01 if device == "cuda" else 1e-5
    for heads, key_heads, dim in ((4, 1, 64), (4, 2, 64), (16, 8, 128)):
        found = _attend(
            _qkv(heads, key_heads, dim, [130, 1, 77, 300], device, dtype), [130, 1, 77, 300], is_packed=True
        )
        exact = _qkv(heads, key_heads, dim, [130, 1, 77, 300], device, dtype)
        expected = _attend([x.detach().float().requires_grad_() for x in exact], [130, 1, 77, 300], is_packed=False)
        errors = [_error(a, b) for a, b in zip(found, expected, strict=True)]
        yield {f"error_{heads}x{key_heads}x{dim}": max(errors)}
        if not max(errors) < limit:
            raise AssertionError(f"attention with {heads} query and {key_heads} key heads of {dim}: errors {errors}")
    lengths = [8192] if device == "cuda" else [64]
    tensors = _qkv(16, 8, 128, lengths, device, dtype)
    seconds = _timed(lambda: _attend(tensors, lengths, is_packed=True), device)
    operations = 3.5 * 4 * 16 * 128 * sum(length**2 / 2 for length in lengths)  # the backward pass is 2.5 forwards
    yield {"seconds": seconds, "tflops": operations / seconds / 1e12}


def _qkv(heads: int, key_heads: int, dim: int, lengths: list[int], device: str, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(heads)
    shapes = [(1, sum(lengths), number, dim) for number in (heads, key_heads, key_heads)]
    drawn = [torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes]
    return [x.transpose(1, 2).requires_grad_() for x in drawn]


def _attend(tensors: list[Tensor], lengths: list[int], is_packed: bool) -> list[Tensor]:
    """Output [1, T, heads, dim] and gradients of its sum of squares."""
    if is_packed:
        bounds = torch.tensor([0, *lengths], device=tensors[0].device).cumsum(0)
        out, _ = packed_attention(None, *tensors, None, packed_layout=PackedLayout(bounds, max(lengths)))
    else:
        repeats = tensors[0].shape[1] // tensors[1].shape[1]
        query, key, value = tensors[0], *(x.repeat_interleave(repeats, dim=1) for x in tensors[1:])
        parts = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
        attended = [F.scaled_dot_product_attention(*part, is_causal=True) for part in parts]
        out = torch.cat(attended, dim=2).transpose(1, 2)
    return [out, *torch.autograd.grad(out.float().square().sum(), tensors)]


# -- training and weight sync ------------------------------------------------------------------------------------------


def training(device: str, out: Path) -> Results:
    """An engine with its optimizer on the host learns as one without; weights leave and return bit by bit."""
    with _session(device) as model:
        losses = {}
        for offload in (False, True):
            engine = _train_engine(model, offload_optimizer=offload)
            losses[offload] = [_train_step(engine, device) for _ in range(3)]
            weights = engine.state_dict()
            engine.cpu()
            engine.cuda()
            moved = engine.state_dict()
            if any(not torch.equal(tensor, moved[name]) for name, tensor in weights.items()):
                raise AssertionError("weights that left for the host came back as others")
            losses[offload] += [_train_step(engine, device) for _ in range(2)]
            yield {f"losses_offload_{offload}": [round(loss, 4) for loss in losses[offload]]}
            engine.release()
        worst = max(abs(a - b) for a, b in zip(losses[False], losses[True], strict=True))
        yield {"difference": worst}
        if not (worst < 0.02 and losses[False][-1] < losses[False][0]):
            raise AssertionError("an offloaded optimizer learns something else, or nothing is learnt")


def sync(device: str, out: Path) -> Results:
    """Weights from one engine to another in this process: what is served is what was trained."""
    with _session(device) as model:
        train, serve = _train_engine(model), RliteInferenceEngine(model)
        serve.build(colocate_with=train, max_model_len=256, max_num_seqs=4, gpu_memory_utilization=0.5)
        for _ in range(3):
            _train_step(train, device)
            report = train.p2p_weight_sync(serve, verify_checksums=True)
            answer = serve.generate([[1, 2, 3]], {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True})[0]
            yield {"transport": report.transport, "gib_per_second": report.num_bytes / report.seconds / GIB}
        yield {"tokens": answer.outputs[0].token_ids}


def memory(device: str, out: Path) -> Results:
    """Measure the memory in use, in GiB, while two engines take turns: each stage must return its memory."""
    with _session(device, "qwen3-0.6b") as model:
        yield {"start": (start := _taken())}
        train, serve = _train_engine(model), RliteInferenceEngine(model)
        serve.build(colocate_with=train, max_model_len=2048, max_num_seqs=64, gpu_memory_utilization=0.5)
        yield {"built": _taken()}
        serve.meta()
        yield {"inference_released": _taken()}
        for turn in range(3):
            _train_step(train, device, num_tokens=4096)
            yield {f"trained_{turn}": _taken()}
            serve.cuda("weights")
            train.p2p_weight_sync(serve)
            train.cpu()
            serve.cuda("kv_cache")
            serve.generate([[1, 2, 3]] * 8, {"max_tokens": 8, "ignore_eos": True})
            yield {f"served_{turn}": _taken()}
            serve.meta()
            yield {f"both_away_{turn}": (away := _taken())}
            train.cuda()
        if away > start + 1.0:
            raise AssertionError(f"{away - start:.2f} GiB stay taken when both engines have left the device")


class _Holder:
    """Tensors as weight sync reads and writes them."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.arena = None
        self.staged: Any = None
        self._shards = {name: ParameterShard(t, (0,) * t.dim(), tuple(t.shape)) for name, t in tensors.items()}

    def parameter_shards(self) -> dict[str, ParameterShard]:
        return self._shards

    def served_shards(self, has_values: bool = True) -> dict[str, ParameterShard]:
        return self._shards

    def full_tensor(self, name: str) -> Tensor:
        return self._shards[name].tensor

    def layout(self) -> Layout:
        places = {
            name: Place(s.tensor.dtype, tuple(s.offset), tuple(s.tensor.shape), tuple(s.global_shape))
            for name, s in self._shards.items()
        }
        return Layout(places, "here", process=process_identity())


def _tensors(device: str) -> dict[str, Tensor]:
    size = 2048 if device == "cuda" else 64
    return {f"layer.{index}": torch.zeros(size, size, device=device) for index in range(8)}


def ipc(device: str, out: Path) -> Results:
    """Weights to another process, 20 times: GiB that source, reader and (CUDA) driver hold do not grow."""
    pipe, other = multiprocessing.get_context("spawn").Pipe()
    reader = multiprocessing.get_context("spawn").Process(target=_read_weights, args=(other, device), daemon=True)
    reader.start()
    source = _Holder(_tensors(device))
    layout = pipe.recv()
    (plan,) = make_plan([source.layout()], [layout], "the reader")
    taken = []
    for number in range(ROUNDS):
        for index, shard in enumerate(source.parameter_shards().values()):
            shard.tensor.fill_(number + index)
        pipe.send((plan, gather(source, source.layout().places, [layout.process])))
        found, theirs = pipe.recv()
        unshare(source)
        if found != [float(number + index) for index in range(8)]:
            raise AssertionError(f"round {number}: the reader found {found}")
        taken.append((_held(device), theirs, _taken() if device == "cuda" else 0.0))
        if number in (0, 2, ROUNDS - 1):
            yield {f"gib_round_{number}": [round(gib, 4) for gib in taken[-1]]}
    pipe.send(None)
    reader.join(30)
    grown = [last - early for early, last in zip(taken[2], taken[-1], strict=True)]
    yield {"grown_gib": max(grown)}
    if max(grown) > 0.05:
        raise AssertionError(f"memory of source, reader and device grew by {grown} GiB from round 2 to {ROUNDS - 1}")


def _read_weights(pipe: Connection, device: str) -> None:
    target = _Holder(_tensors(device))
    pipe.send(target.layout())
    while (message := pipe.recv()) is not None:
        plan, handles = message
        read(target, plan, [handles])
        means = [float(shard.tensor.mean()) for shard in target.parameter_shards().values()]
        del message, handles
        pipe.send((means, _held(device)))


# -- speed -------------------------------------------------------------------------------------------------------------


def sft(device: str, out: Path) -> Results:
    """SFT at 8k tokens per pack."""
    yield from _speed("sft", device, out)


def rl(device: str, out: Path) -> Results:
    """PPO's policy loss at 16k tokens per pack."""
    yield from _speed("rl", device, out)


def _speed(task: str, device: str, out: Path) -> Results:
    shape = "qwen3-0.6b" if device == "cuda" else "tiny"
    folder = out / task
    argv = ["--device", device, "--shape", shape, "--tasks", task, "--packs", "2", "--steps", "4", "--out", str(folder)]
    try:
        path = gpu_training.main(argv)
    except torch.OutOfMemoryError:
        print("out of memory: again with recomputed activations", flush=True)
        yield {"gradient_checkpointing": True}
        path = gpu_training.main([*argv, "--gradient-checkpointing"])
    result = json.loads(path.read_text())["results"][task]
    yield {key: result[key] for key in ("tokens_per_second", "mfu", "memory_gib", "tokens_per_pack") if key in result}


def profile(device: str, out: Path) -> Results:
    """Profile one training step: return the largest kernels, and write a trace into FOLDER."""
    num_tokens = 8192 if device == "cuda" else 64
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with _session(device, "qwen3-0.6b" if device == "cuda" else "tiny") as model:
        engine = _train_engine(model)
        for _ in range(2):
            _train_step(engine, device, num_tokens)
        with torch.profiler.profile(activities=kinds) as recorded:
            _train_step(engine, device, num_tokens)
    by = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    events = sorted(recorded.key_averages(), key=lambda event: -getattr(event, by))
    total = sum(getattr(event, by) for event in events)
    (out / "profile.txt").write_text(recorded.key_averages().table(sort_by=by, row_limit=40))
    yield {"milliseconds": total / 1e3}
    yield {event.key[:60]: f"{getattr(event, by) / total:.1%}" for event in events[:8]}
    recorded.export_chrome_trace(str(out / "profile-trace.json"))


def generation(device: str, out: Path) -> Results:
    """Tokens per second of 256 sequences, sampled from everything and from the nucleus of 0.9."""
    is_gpu = device == "cuda"
    shape, num, prompt, new = ("qwen3-0.6b", 256, 128, 512) if is_gpu else ("tiny", 8, 8, 16)
    with _session(device, shape) as model:
        engine = RliteInferenceEngine(model)
        dtype = "bfloat16" if is_gpu else "float32"
        engine.build(max_model_len=prompt + new, max_num_seqs=num, dtype=dtype, gpu_memory_utilization=0.9)
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(0, 256, (num, prompt), generator=generator).tolist()
        for top_p in (1.0, 0.9):
            params = {"temperature": 1.0, "top_p": top_p, "ignore_eos": True, "max_tokens": new}
            engine.generate(prompts, {**params, "max_tokens": 8})
            started = time.perf_counter()
            engine.generate(prompts, params)
            rate = num * new / (time.perf_counter() - started)
            yield {f"tokens_per_second_top_p_{top_p:g}": rate}
        yield {"memory_gib": device_usage(torch.device(device)).peak_bytes / GIB}


def graphs(device: str, out: Path) -> Results:
    """Decode by CUDA graphs makes the tokens of eager decode; seconds of both, without the captures."""
    with tempfile.TemporaryDirectory() as scratch:
        model = build_model_dir(Path(scratch) / "model", "qwen3", hidden=256, layers=8)
        made = {}
        for is_captured in (False, True):
            options = EmbeddedOptions(
                max_model_len=600, max_num_seqs=8, dtype="float32", cuda_graphs=is_captured, gpu_memory_utilization=0.5
            )
            worker = EmbeddedWorker(str(model), options, torch.device(device, 0))
            _decode(worker)
            started = time.perf_counter()
            made[is_captured] = _decode(worker)
            yield {f"seconds_graphs_{is_captured}": time.perf_counter() - started}
    equal = sum(made[True][i] == made[False][i] for i in made[False])
    yield {"equal_answers": f"{equal} of {len(made[False])}"}
    if equal < len(made[False]) - 1:  # rounding may turn one greedy choice
        raise AssertionError("captured steps make other tokens than eager ones")


def choices(device: str, out: Path) -> Results:
    """The fused head, compiled layers and the paged kernel compute what PyTorch does without them; seconds of each."""
    with _session(device, "qwen3-0.6b" if device == "cuda" else "tiny") as model:
        yield from _trained(model, device)
        yield from _paged(model, device)


def _trained(model: Path, device: str) -> Results:
    num_tokens, losses = 8192 if device == "cuda" else 64, {}
    wanted: list[dict[str, Any]] = [{}, {"fused_head": True}, {"compile": "layers"}]
    for options in (*wanted, wanted[1] | wanted[2]):
        engine, name = _train_engine(model, **options), "+".join(options) or "default"
        losses[name] = [_train_step(engine, device, num_tokens) for _ in range(4)]
        yield {f"losses_{name}": [round(loss, 4) for loss in losses[name]], f"chosen_{name}": engine.choices()}
        yield {f"seconds_{name}": _timed(partial(_train_step, engine, device, num_tokens), device, 4)}
        engine.release()
        if not max(abs(a - b) for a, b in zip(losses[name], losses["default"], strict=True)) < 0.02:
            raise AssertionError(f"{name} learns something else: losses {losses}")


def _paged(model: Path, device: str) -> Results:
    made, dtype = {}, "bfloat16" if device == "cuda" else "float32"
    for is_paged in (False, True):
        options = EmbeddedOptions(
            max_model_len=600, max_num_seqs=8, dtype=dtype, gpu_memory_utilization=0.5, paged_kernel=is_paged
        )
        worker = EmbeddedWorker(str(model), options, torch.device(device))
        _decode(worker)
        started = time.perf_counter()
        made[is_paged] = _decode(worker)
        yield {f"seconds_paged_kernel_{is_paged}": time.perf_counter() - started}
    yield {"equal_answers": f"{sum(made[True][i] == made[False][i] for i in made[True])} of {len(made[True])}"}


def _decode(worker: EmbeddedWorker) -> dict[int, list[int]]:
    gconfig = GenerationHyperparameters(max_new_tokens=200, temperature=0.0, ignore_eos=True)
    requests = [
        SequenceRequest(request_id=i, input_ids=[i + 1] * (3 + 40 * i), gconfig=gconfig, seed=i) for i in range(8)
    ]
    made: dict[int, list[int]] = {request.request_id: [] for request in requests}
    chunks = worker.advance(requests, [], 64)
    while chunks:
        for chunk in chunks:
            made[chunk.request_id] += chunk.token_ids
        chunks = worker.advance([], [], 64)
    return made


# -- what the steps share ----------------------------------------------------------------------------------------------


class _session:
    """A session on one device in this process, and a model of a shape in a folder that is deleted afterwards."""

    def __init__(self, device: str, shape: str = "tiny") -> None:
        self._device, self._shape = device, shape

    def __enter__(self) -> Path:
        rlite.init(device=self._device, num_devices=1, launcher="inprocess")
        self._folder = tempfile.TemporaryDirectory()
        return build_model_dir(Path(self._folder.name) / "model", "qwen3", **gpu_training.SHAPES[self._shape])

    def __exit__(self, *_: object) -> None:
        rlite.shutdown()
        self._folder.cleanup()


def _train_engine(model: Path, **options: Any) -> RliteTrainEngine:
    engine = RliteTrainEngine(policy_module(model, OPTIMIZER))
    engine.build(**options)
    engine.train()
    return engine


def _train_step(engine: RliteTrainEngine, device: str, num_tokens: int = 256) -> float:
    loss = SftLoss()
    return engine.train_batch(gpu_training.rows(1, num_tokens, prompt=1), loss, loss.weight)["loss"]


def _taken() -> float:
    """GiB of the GPU that the driver has given out, to every process."""
    gc.collect()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


def _held(device: str) -> float:
    """GiB that this process holds: what torch has reserved of the GPU, or what is resident on the host."""
    if device == "cuda":
        gc.collect()
        return torch.cuda.memory_reserved() / GIB
    return device_usage(torch.device(device)).peak_bytes / GIB


def _error(found: Tensor, expected: Tensor) -> float:
    return float(((found.float() - expected).norm() / expected.norm()).detach())


def _timed(function: Any, device: str, repeats: int = 10) -> float:
    """Seconds of one call, after two that do not count."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(2):
        function()
    wait()
    started = time.perf_counter()
    for _ in range(repeats):
        function()
    wait()
    return (time.perf_counter() - started) / repeats


RUN = {
    step.__name__: step
    for step in (versions, attention, training, graphs, sync, memory, ipc, sft, rl, choices, profile, generation)
}


def main(argv: Sequence[str]) -> None:
    """Run one step; its results are in the folder as soon as it has them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=RUN)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    results: dict[str, Any] = {}
    for found in RUN[args.step](args.device, args.out):
        results |= found
        print(", ".join(f"{key}={value}" for key, value in found.items()), flush=True)
        write_record(args.out / f"{args.step}.json", {"status": "cut off", "device": args.device, "results": results})


if __name__ == "__main__":
    main(sys.argv[1:])
