"""A server that keeps the contract of SGLang's HTTP server, for machines on which SGLang itself cannot run.

The paths, the fields of requests and responses, and the reading of serialized weights are those of SGLang's wheel; see
`sglang_wheel`. A request with another path gets 404, and one with another field 400. What SGLang's scheduler does is
written down here after its sources: a small Hugging Face model generates one token for each sequence at a time.

    python -m tests.contracts.sglang_server --config server.yaml

takes the place of `python -m sglang.launch_server`. `stand_in` makes a package of this name.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from aiohttp import web
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import forked_python
from tests.contracts import sglang_wheel as wheel
from tests.third_party_executor.worker import _truncated

MOST_KEPT = 4096
"""the default of sampling_mask_max_tokens"""
TOP_K_ALL = 1 << 30


class Refused(Exception):
    """The reason of an HTTP 400."""


@dataclass(eq=False)
class Sequence:
    """A request in SGLang's scheduler."""

    body: dict[str, Any]
    events: asyncio.Queue[dict[str, Any] | None] = field(default_factory=asyncio.Queue)
    made: list[int] = field(default_factory=list)
    logprobs: list[list[Any]] = field(default_factory=list)
    prompt_logprobs: list[list[Any]] = field(default_factory=list)
    top_logprobs: list[list[list[Any]] | None] = field(default_factory=list)
    masks: list[list[int]] = field(default_factory=list)
    mask_logprobs: list[float] = field(default_factory=list)
    changes: list[tuple[str, int]] = field(default_factory=list)
    """(version, number of tokens when it ended)"""
    finish_reason: dict[str, Any] | None = None
    to_finish: dict[str, Any] | None = None
    num_sent: int = 0

    @property
    def sampling(self) -> dict[str, Any]:
        return self.body.get("sampling_params") or {}

    @property
    def prompt(self) -> list[int]:
        return self.body["input_ids"]


class Scheduler:
    """The model and what SGLang's scheduler does with requests, pauses, weights and memory."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.path = arguments["model_path"]
        if template := arguments.get("chat_template"):
            raise RuntimeError(f"chat template {template} is not a built-in template name or a valid file path")
        dtype = arguments.get("dtype", "auto")
        self.model = AutoModelForCausalLM.from_pretrained(self.path, dtype=dtype).eval().requires_grad_(False)
        self.tokenizer = AutoTokenizer.from_pretrained(self.path)
        self.config = self.model.config
        self.context_length = arguments.get("context_length") or self.config.max_position_embeddings
        self.weight_version = arguments.get("weight_version", "default")
        self.is_paused = False
        self.sequences: list[Sequence] = []
        self.changed = asyncio.Event()
        self.released: set[str] = set()
        self.backup: dict[str, Tensor] = {}
        self.session: dict[str, bool] | None = None
        self.is_cache_old = False
        self.groups: dict[str, Any] = {}
        self.received: dict[str, Tensor] = {}
        """tensors of a weight update"""

    # -- generation ----------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        num, sampling = len(sequence.prompt), sequence.sampling
        if num >= self.context_length:
            raise Refused(
                f"The input ({num} tokens) is longer than the model's context length ({self.context_length} tokens)."
            )
        if num + sampling.get("max_new_tokens", 128) > self.context_length:
            raise Refused("Requested token count exceeds the model's maximum context length")
        top_k = 1 if not sampling.get("temperature", 1.0) else sampling.get("top_k", -1)
        if sequence.body.get("return_sampling_mask") and top_k != 1 and not 1 < top_k <= MOST_KEPT:
            told = f"return_sampling_mask requires finite 1 < top_k <= {MOST_KEPT}"
            sequence.finish_reason = {"type": "abort", "message": told, "status_code": 400, "err_type": None}
            self.send(sequence)
            return
        self.sequences.append(sequence)
        self.changed.set()

    async def run(self) -> None:
        while True:
            await self.changed.wait()
            if self.is_paused or not self.sequences:
                self.changed.clear()
                continue
            self.step()
            await asyncio.sleep(0)

    @torch.no_grad()
    def step(self) -> None:
        assert not self.released, f"generation without {self.released}"
        assert self.session is None, "generation between begin_weight_update and end_weight_update"
        assert not self.is_cache_old, "generation from a KV cache of older weights"
        batch = self.sequences[: self.arguments.get("max_running_requests") or 16]
        rows = [sequence.prompt + sequence.made for sequence in batch]
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        logits = self.model(ids).logits.float()
        for sequence, row, scores in zip(batch, rows, logits, strict=True):
            if sequence.body.get("logprob_start_len", -1) == 0 and not sequence.prompt_logprobs:
                logprobs = scores[: len(row) - 1].log_softmax(-1)
                following = logprobs.gather(1, torch.tensor(row[1:])[:, None])[:, 0].tolist()
                values, ids = logprobs.topk(sequence.body.get("top_logprobs_num", 0))
                pairs = zip(values.tolist(), ids.tolist(), strict=True)
                sequence.top_logprobs = [None, *([[v, t, None] for v, t in zip(*pair, strict=True)] for pair in pairs)]
                sequence.prompt_logprobs = [[v, t, None] for v, t in zip([None, *following], row, strict=True)]
            self.take(sequence, scores[len(row) - 1])
            self.send(sequence)
        self.sequences = [sequence for sequence in self.sequences if sequence.finish_reason is None]

    def take(self, sequence: Sequence, logits: Tensor) -> None:
        """Sample a token, unless the request asks for none."""
        sampling = sequence.sampling
        most = sampling.get("max_new_tokens", 128)
        if most == 0:
            sequence.finish_reason = {"type": "length", "length": 0}
            return
        is_greedy = not sampling.get("temperature", 1.0)
        ends = set(sampling.get("stop_token_ids") or ()) | {self.config.eos_token_id}
        if len(sequence.made) < sampling.get("min_new_tokens", 0):
            logits = logits.index_fill(0, torch.tensor(sorted(ends)), -torch.inf)
        logprobs = (logits if is_greedy else logits / sampling.get("temperature", 1.0)).log_softmax(-1)
        top_k = 1 if is_greedy else sampling.get("top_k", -1)
        kept = _truncated(logprobs, sampling.get("top_p", 1.0), top_k).log_softmax(-1)
        position = len(sequence.prompt) + len(sequence.made)
        generator = torch.Generator().manual_seed((sampling.get("sampling_seed", 42) + 1_000_003 * position) % 2**63)
        token = int(torch.multinomial(kept.exp(), 1, generator=generator))
        sequence.made.append(token)
        sequence.logprobs.append([float(logprobs[token]), token, None])
        sequence.masks.append(kept.isfinite().nonzero()[:, 0].tolist())
        sequence.mask_logprobs.append(float(kept[token]))
        text = self.tokenizer.decode(sequence.made) if sampling.get("stop") else ""  # special tokens count, as there
        if sequence.to_finish is not None:
            sequence.finish_reason = sequence.to_finish
        elif stop := next((stop for stop in sampling.get("stop") or () if stop in text), None):
            sequence.finish_reason = {"type": "stop", "matched": stop}
        elif token in ends and not sampling.get("ignore_eos", False):  # stop_token_ids are ignored, too
            sequence.finish_reason = {"type": "stop", "matched": token}
        elif len(sequence.made) >= most:
            sequence.finish_reason = {"type": "length", "length": most}

    def send(self, sequence: Sequence) -> None:
        """Queue an event for the request's tokens, as SGLang's tokenizer manager makes it."""
        num, reason = len(sequence.made), sequence.finish_reason
        is_incremental = bool(sequence.body.get("stream") and self.arguments.get("incremental_streaming_output"))
        start = sequence.num_sent if is_incremental else 0
        meta: dict[str, Any] = {
            "id": sequence.body.get("rid"),
            "finish_reason": reason,
            "prompt_tokens": len(sequence.prompt),
            "completion_tokens": num,
            "weight_version": self.weight_version,
        }
        if sequence.body.get("return_logprob"):
            meta["input_token_logprobs"] = sequence.prompt_logprobs
            meta["output_token_logprobs"] = sequence.logprobs[start:]
            if sequence.body.get("top_logprobs_num"):
                meta["input_top_logprobs"] = sequence.top_logprobs
        if sequence.body.get("return_sampling_mask"):
            meta["output_token_sampling_mask"] = sequence.masks[start:]
            meta["output_token_sampling_logprobs"] = sequence.mask_logprobs[start:]
        if reason is not None:
            meta["weight_versions"] = self.spans(sequence)
            if sequence.body.get("return_routed_experts") and self.arguments.get("enable_return_routed_experts"):
                meta["routed_experts"] = self.routed(sequence.prompt + sequence.made)
        sequence.num_sent = num
        self.emit(sequence, {"text": "", "output_ids": sequence.made[start:], "meta_info": meta})

    @torch.no_grad()
    def routed(self, tokens: list[int]) -> str:
        """Return the experts of all tokens but the last in all layers, zeros in dense ones, as SGLang encodes them."""
        layers = self.model.model.layers
        table = torch.zeros(len(tokens) - 1, len(layers), self.config.num_experts_per_tok, dtype=torch.int32)

        def note(at: int, _: Any, args: tuple[Any, ...]) -> None:
            table[:, at] = args[1]

        experts = {at: layer.mlp.experts for at, layer in enumerate(layers) if hasattr(layer.mlp, "experts")}
        hooks = [module.register_forward_pre_hook(partial(note, at)) for at, module in experts.items()]
        self.model(torch.tensor([tokens[:-1]]))
        for hook in hooks:
            hook.remove()
        return base64.b64encode(table.numpy().tobytes()).decode()

    def emit(self, sequence: Sequence, event: dict[str, Any]) -> None:
        keys = wheel.response_keys("srt/managers/tokenizer_manager.py") | {"weight_versions"}
        assert keys >= event.keys() | event["meta_info"].keys()
        sequence.events.put_nowait(json.loads(json.dumps(event)))
        if sequence.finish_reason is not None:
            sequence.events.put_nowait(None)

    def spans(self, sequence: Sequence) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        for version, end in [*sequence.changes, (self.weight_version, len(sequence.made))]:
            start = spans[-1]["end"] if spans else 0
            if end > start or not spans:
                spans.append({"version": version, "start": start, "end": end})
        return spans

    def abort(self, rid: str, abort_all: bool) -> None:
        if not rid and not abort_all:
            return
        for sequence in [s for s in self.sequences if abort_all or s.body["rid"].startswith(rid)]:
            if self.is_paused or not sequence.made:  # in the waiting queue: the last token comes again
                self.sequences.remove(sequence)
                sequence.finish_reason = {"type": "abort", "message": "Abort in waiting queue"}
                sequence.num_sent = max(0, len(sequence.made) - 1)
                self.send(sequence)
            else:
                sequence.to_finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}

    # -- weights and memory --------------------------------------------------------------------------------------

    def set_version(self, version: str) -> None:
        if version != self.weight_version:
            for sequence in self.sequences:
                if sequence.made:
                    sequence.changes.append((self.weight_version, len(sequence.made)))
            self.weight_version = version

    def load(self, named: list[tuple[str, Tensor]], flush_cache: bool) -> None:
        if self.session is None:
            raise Refused("weights must be updated between begin_weight_update() and end_weight_update()")
        if "weights" in self.released:
            raise Refused("the weights are released")
        parameters = dict(self.model.named_parameters())
        for name, tensor in named:
            if name in parameters:
                parameters[name].copy_(tensor)
            self.received[name] = tensor.clone()
        self.is_cache_old = True
        if flush_cache:
            self.flush()

    def end_update(self) -> None:
        """Read what has arrived by the names of a checkpoint, if these are not the model's own."""
        received, self.received = self.received, {}
        if received.keys() <= dict(self.model.named_parameters()).keys():
            return
        with tempfile.TemporaryDirectory() as folder:
            self.config.save_pretrained(folder)
            save_file(received, Path(folder) / "model.safetensors", {"format": "pt"})
            fresh = AutoModelForCausalLM.from_pretrained(folder, dtype=self.model.dtype)
        self.model.load_state_dict(fresh.state_dict())

    def flush(self) -> None:
        if self.sequences and not self.is_paused:
            raise Refused("Cache not flushed because there are pending requests.")
        self.is_cache_old = False

    def release(self, tags: list[str]) -> None:
        assert not self.sequences or self.is_paused, (
            "release_memory_occupation should be called only when server is idle."
        )
        self.released.update(tags)
        if "weights" in tags:
            saved = {name: p.clone() for name, p in self.model.named_parameters()}
            self.backup = saved if self.arguments.get("enable_weights_cpu_backup") else {}
            for parameter in self.model.parameters():
                parameter.fill_(torch.nan)

    def resume(self, tags: list[str]) -> None:
        for tag in tags:
            self.released.remove(tag)
        if "weights" in tags:
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.backup.get(name, parameter))


class Routes:
    """The paths of the server."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.can_go_on = asyncio.Event()
        self.can_go_on.set()

    async def ready(self, body: None) -> web.Response:
        return web.Response(status=503 if self.scheduler.is_paused else 200)

    async def health(self, body: None) -> web.Response:
        return web.Response()

    async def model_info(self, body: None) -> Any:
        scheduler = self.scheduler
        return {
            "model_path": scheduler.path,
            "model_type": scheduler.config.model_type,
            "weight_version": scheduler.weight_version,
        }

    async def server_info(self, body: None) -> Any:
        usage = {"weight": 0.001, "kvcache": 0.002}
        return {**self.scheduler.arguments, "internal_states": [{"memory_usage": usage}], "version": "contract"}

    async def generate(self, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        if unknown := (body.get("sampling_params") or {}).keys() - wheel.sampling_fields():
            raise Refused(f"unknown field `{unknown.pop()}`")
        sequence = Sequence(body)
        if body.get("stream"):
            return await self.stream(sequence, request)
        await self.can_go_on.wait()
        self.scheduler.add(sequence)
        while (event := await sequence.events.get()) is not None:
            last = event
        return web.json_response(last)

    async def stream(self, sequence: Sequence, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await self.can_go_on.wait()
            self.scheduler.add(sequence)
            while (event := await sequence.events.get()) is not None:
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        except Refused as reason:
            told = {"message": str(reason), "type": "invalid_request_error", "code": 400, "retryable": False}
            await response.write(b"data: " + json.dumps({"error": told}).encode() + b"\n\n")
        except ConnectionResetError:
            self.scheduler.abort(sequence.body["rid"], False)
            return response
        await response.write(b"data: [DONE]\n\n")
        return response

    async def abort_request(self, body: dict[str, Any]) -> web.Response:
        self.scheduler.abort(body.get("rid") or "", body.get("abort_all", False))
        return web.Response()

    async def pause_generation(self, body: dict[str, Any]) -> Any:
        assert body.get("mode") == "retract", "the executor relies on retraction"
        self.scheduler.is_paused = True
        self.can_go_on.clear()
        return {"message": "Generation paused successfully.", "status": "ok"}

    async def continue_generation(self, body: dict[str, Any]) -> Any:
        self.scheduler.is_paused = False
        self.can_go_on.set()
        self.scheduler.changed.set()
        return {"message": "Generation continued successfully.", "status": "ok"}

    async def flush_cache(self, body: Any) -> web.Response:
        self.scheduler.flush()
        return web.Response(text="Cache flushed.\n")

    async def update_weight_version(self, body: dict[str, Any]) -> Any:
        if body.get("abort_all_requests", True):
            self.scheduler.abort("", True)
        self.scheduler.set_version(body["new_version"])
        return {"success": True, "message": "", "new_version": body["new_version"]}

    async def update_weights_from_disk(self, body: dict[str, Any]) -> Any:
        if "weights" in self.scheduler.released:
            raise Refused("the weights are released")
        fresh = AutoModelForCausalLM.from_pretrained(body["model_path"], dtype=self.scheduler.model.dtype)
        self.scheduler.model.load_state_dict(fresh.state_dict())
        self.scheduler.is_cache_old = True
        if body.get("flush_cache", True):
            self.scheduler.flush()
        return {"success": True, "message": "", "num_paused_requests": 0}

    async def weights_checker(self, body: dict[str, Any]) -> Any:
        assert body["action"] == "checksum"
        found = {name: f"{float(p.double().sum()):.17g}" for name, p in self.scheduler.model.named_parameters()}
        return {"success": True, "message": "", "ranks": [{"checksums": found, "per_gpu_checksum": ""}]}

    async def begin_weight_update(self, body: dict[str, Any]) -> Any:
        if self.scheduler.session is not None:
            raise Refused("a weight-update session is already open")
        self.scheduler.session = {}
        return {"success": True, "message": "Success"}

    async def end_weight_update(self, body: dict[str, Any]) -> Any:
        if self.scheduler.session is None:
            raise Refused("no weight-update session is open")
        self.scheduler.session = None
        self.scheduler.end_update()
        return {"success": True, "message": "Success"}

    async def update_weights_from_tensor(self, body: dict[str, Any]) -> Any:
        common, bucket = wheel.common(), wheel.tensor_bucket()
        assert body["load_format"] == "flattened_bucket"
        payload = common.normalize_serialized_named_tensor_payload(body["serialized_named_tensors"][0])
        content = common.MultiprocessingSerializer.deserialize(payload)
        metadata = [bucket.FlattenedTensorMetadata(**vars(part)) for part in content["metadata"]]
        whole = bucket.FlattenedTensorBucket(flattened_tensor=content["flattened_tensor"], metadata=metadata)
        self.scheduler.load(whole.reconstruct_tensors(), body.get("flush_cache", True))
        return {"success": True, "message": "Success"}

    async def init_weights_update_group(self, body: dict[str, Any]) -> Any:
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.scheduler.groups[body["group_name"]] = await asyncio.to_thread(
            wheel.common().init_custom_process_group,
            backend=body["backend"],
            init_method=f"tcp://{body['master_address']}:{body['master_port']}",
            world_size=body["world_size"],
            rank=body["rank_offset"],
            group_name=body["group_name"],
        )
        return {"success": True, "message": "Succeeded to initialize custom process group."}

    async def destroy_weights_update_group(self, body: dict[str, Any]) -> Any:
        dist.destroy_process_group(self.scheduler.groups.pop(body["group_name"]))
        return {"success": True, "message": "Succeeded to destroy custom process group."}

    async def update_weights_from_distributed(self, body: dict[str, Any]) -> Any:
        assert body["load_format"] == "flattened_bucket"
        bucket = wheel.tensor_bucket().FlattenedTensorBucket.empty(body["names"], body["dtypes"], body["shapes"], "cpu")
        group = self.scheduler.groups[body["group_name"]]
        await asyncio.to_thread(dist.broadcast, bucket.get_flattened_tensor(), src=0, group=group)
        self.scheduler.load(bucket.reconstruct_tensors(), body.get("flush_cache", True))
        return {"success": True, "message": "Succeeded to update parameter online."}

    async def release_memory_occupation(self, body: dict[str, Any]) -> web.Response:
        self.scheduler.release(body["tags"])
        return web.Response(text="null", content_type="application/json")

    async def resume_memory_occupation(self, body: dict[str, Any]) -> web.Response:
        self.scheduler.resume(body["tags"])
        return web.Response(text="null", content_type="application/json")

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a request that keeps the contract; refuse another one."""
        key = self.scheduler.arguments.get("api_key")
        if key and request.headers.get("Authorization") != f"Bearer {key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        act = getattr(self, request.path.removeprefix("/"), None)
        if request.path not in wheel.routes() or act is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        taken = wheel.routes()[request.path]
        body = json.loads(await request.text()) if request.can_read_body else None
        try:
            if taken is not None and (unknown := body.keys() - wheel.fields_of(taken)):
                raise Refused(f"unknown fields {sorted(unknown)} of {taken}")
            answer = await (act(body, request) if request.path == "/generate" else act(body))
        except Refused as reason:
            return web.json_response({"error": {"message": str(reason)}}, status=400)
        return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)


async def serve(arguments: dict[str, Any]) -> None:
    scheduler = Scheduler(arguments)
    application = web.Application(client_max_size=2**30)
    application.router.add_route("*", "/{path:.*}", Routes(scheduler).handle)
    runner = web.AppRunner(application, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, arguments["host"], arguments["port"]).start()
    await scheduler.run()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    given = json.loads(Path(parser.parse_args().config).read_text())
    arguments = {name.replace("-", "_"): value for name, value in given.items()}
    if unknown := arguments.keys() - wheel.server_arguments():
        sys.exit(f"sglang serve: error: unrecognized arguments: {sorted(unknown)}")
    torch.set_num_threads(1)
    asyncio.run(serve(arguments))


LAUNCH = f"""
import os, sys

command = ["-m", "tests.contracts.sglang_server", *sys.argv[1:]]
folder = os.environ.get({forked_python.FOLDER!r})
python = os.path.join(folder, "python") if folder else sys.executable
os.execv(python, [python, *command])
"""


def stand_in(folder: Path) -> None:
    """Make a package `sglang` in a folder: the sources of the wheel, and this server instead of SGLang's.

    The server is a fork, unless the environment has no `forked_python.FOLDER`.
    """
    package = folder / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(LAUNCH)
    os.symlink(wheel.PACKAGE / "srt", package / "srt")


if __name__ == "__main__":
    main()
