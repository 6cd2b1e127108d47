"""The worker's end: a Hugging Face model, a thread that generates, and the socket that the tokens are pushed into."""

from __future__ import annotations

import json
import queue
import secrets
import socket
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rlite.errors import ConfigError
from rlite.nn.pretrained import real_tensors
from rlite.runtime.cluster.host import WorkerContext
from rlite.runtime.parallel.shards import ParameterShard
from rlite.runtime.replicas.workers import Part
from rlite.types import PromptLogprobs


@dataclass(eq=False)
class Sequence:
    """One request with its tokens so far."""

    request_id: int
    prompt: list[int]
    made: list[int]
    gconfig: dict[str, Any]
    seed: int
    extras: list[str]
    chunk: dict[str, Any] = field(default_factory=dict)


class PushingWorker:
    """The first rank of a replica holds the model and generates; the others hold nothing."""

    def __init__(self, context: WorkerContext, path: str, options: Any, executor_size: int) -> None:
        self.path, self.options, self.version = path, options, 0
        self._model: PreTrainedModel | None = None
        if context.rank % executor_size:
            return
        self._model = _read(path, options.dtype)
        config = self._model.config
        self.max_model_len = options.max_model_len or config.max_position_embeddings
        if self.max_model_len > config.max_position_embeddings:
            raise ConfigError(f"max_model_len={self.max_model_len} is beyond {config.max_position_embeddings}")
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._shapes = {name: p.shape for name, p in self._model.named_parameters()}
        self._dtype = next(self._model.parameters()).dtype
        self._end_ids = {config.eos_token_id}
        self._secret = secrets.token_hex()
        self._listener = socket.create_server((context.device.ip, 0))
        self._commands: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._sequences: list[Sequence] = []
        self._pause: int | None = None
        threading.Thread(target=self._serve, name="pushing worker", daemon=True).start()

    def address(self) -> tuple[int, str]:
        """Return the port that the replica connects to, and what it has to say first. Only the first rank has one."""
        return (self._listener.getsockname()[1], self._secret) if self._model is not None else (0, "")

    @torch.no_grad()
    def prompt_logprobs(self, prompts: list[list[int]] | None, num_top: int | None) -> list[PromptLogprobs]:
        """Return the log-probabilities of each prompt's tokens but the first."""
        result = []
        for ids in prompts or []:
            assert self._model is not None
            logprobs = self._model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
            top = logprobs.topk(num_top or 0)
            found = logprobs.gather(1, torch.tensor(ids[1:], dtype=torch.int64)[:, None])[:, 0]
            result.append(
                PromptLogprobs(logprobs=found.tolist(), top_ids=top.indices.tolist(), top_logprobs=top.values.tolist())
            )
        return result

    # -- what every worker offers ---------------------------------------------------------------------------------

    def load_weights(self, path: str | None) -> None:
        if self._model is not None:
            self.to_device("weights")
            self._model.load_state_dict(_read(path or self.path, self.options.dtype).state_dict())

    def set_version(self, version: int) -> None:
        self.version = version

    def weights_changed(self, version: int) -> None:
        self.version = version

    def parameter_shards(self) -> dict[str, ParameterShard]:
        if self._model is None:
            return {}
        shapes = self._shapes
        named = self._model.named_parameters()
        return {n: ParameterShard(p.data, (0,) * p.dim(), tuple(shapes[n])) for n, p in named}

    def to_device(self, what: Part) -> None:
        if self._model is not None and what != "kv_cache":
            for name, parameter in self._model.named_parameters():
                if parameter.numel() == 0:
                    parameter.data = torch.empty(self._shapes[name], dtype=self._dtype)

    def to_cpu(self) -> None:
        pass  # they are there

    def to_meta(self) -> None:
        if self._model is not None:
            for parameter in self._model.parameters():
                parameter.data = torch.empty(0, dtype=self._dtype)

    def memory_bytes(self) -> dict[str, int]:
        held = [] if self._model is None else list(self._model.parameters())
        return {"weights": sum(p.numel() * p.element_size() for p in held), "kv_cache": 0}

    # -- the thread that generates --------------------------------------------------------------------------------

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        self._listener.close()
        lines = connection.makefile()
        if json.loads(next(lines))["secret"] != self._secret:
            connection.close()
            return
        threading.Thread(target=self._read_commands, args=(lines,), name="commands", daemon=True).start()
        try:
            while self._obey(connection):
                if self._pause is None and self._sequences:
                    _push(connection, chunks=self._step())
        except OSError:
            pass  # the replica has gone
        finally:
            connection.close()  # if this thread failed, the replica notices

    def _read_commands(self, lines: Any) -> None:
        try:
            for line in lines:
                self._commands.put(json.loads(line))
        except OSError:
            pass
        self._commands.put(None)

    def _obey(self, connection: socket.socket) -> bool:
        """Carry out the commands that have come, and wait for one if there is nothing else to do."""
        while not self._commands.empty() or self._pause is not None or not self._sequences:
            command = self._commands.get()
            if command is None:
                return False
            if refused := [c for request in command.get("submit", []) if (c := self._accept(request))]:
                _push(connection, chunks=refused)
            if ended := [s for s in self._sequences if s.request_id in command.get("cancel", [])]:
                self._sequences = [s for s in self._sequences if s not in ended]
                _push(connection, chunks=[self._chunk(s, finish_reason="abort") for s in ended])
            if "pause" in command:
                self._pause = command["pause"]
                _push(connection, paused=self._pause)
            if "resume" in command:
                self._pause = None
        return True

    def _accept(self, request: dict[str, Any]) -> dict[str, Any] | None:
        sequence = Sequence(
            request_id=request["request_id"],
            prompt=request["input_ids"],
            made=request["output_ids"],
            gconfig=request["gconfig"],
            seed=request["seed"],
            extras=request["extras"],
        )
        if len(sequence.prompt) + len(sequence.made) >= self.max_model_len:
            told = f"the prompt has {len(sequence.prompt)} tokens, max_model_len={self.max_model_len} leaves no room"
            return self._chunk(sequence, error=told)
        self._sequences.append(sequence)
        return None

    @torch.no_grad()
    def _step(self) -> list[dict[str, Any]]:
        """One token for each of the first sequences; right padding does not reach what a causal model sees."""
        assert self._model is not None
        batch = self._sequences[: self.options.max_num_seqs]
        rows = [s.prompt + s.made for s in batch]
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        logits = self._model(ids).logits[torch.arange(len(rows)), torch.tensor([len(row) - 1 for row in rows])]
        chunks = [self._take(sequence, row) for sequence, row in zip(batch, logits.float(), strict=True)]
        gone = {chunk["request_id"] for chunk in chunks if chunk["finish_reason"]}
        self._sequences = [s for s in self._sequences if s.request_id not in gone]
        return chunks

    def _take(self, sequence: Sequence, logits: Tensor) -> dict[str, Any]:
        asked = sequence.gconfig
        stops = set(asked["stop_token_ids"]) | (set() if asked["ignore_eos"] else self._end_ids)
        logprobs = (logits if asked["greedy"] else logits / asked["temperature"]).log_softmax(-1)
        kept = logprobs.clone()
        if len(sequence.made) < asked["min_new_tokens"]:
            kept[list(stops)] = -torch.inf
        kept = _truncated(kept, asked["top_p"], asked["top_k"]).log_softmax(-1)
        token = int(kept.argmax())
        if not asked["greedy"]:
            generator = torch.Generator().manual_seed((sequence.seed + 1_000_003 * len(sequence.made)) % 2**63)
            token = int(torch.multinomial(kept.exp(), 1, generator=generator))
        sequence.made.append(token)
        is_full = len(sequence.prompt) + len(sequence.made) >= self.max_model_len
        text = self._tokenizer.decode(sequence.made, skip_special_tokens=False) if asked["stop"] else ""
        reason = "length" if is_full or len(sequence.made) >= asked["max_new_tokens"] else None
        if token in stops or any(stop in text for stop in asked["stop"]):
            reason = "stop"
        columns = {"kept_ids": [kept.isfinite().nonzero()[:, 0].tolist()]}
        return self._chunk(
            sequence,
            token_ids=[token],
            logprobs=[float(logprobs[token])],
            sampling_logprobs=[float(kept[token])],
            finish_reason=reason,
            extras={name: columns[name] for name in sequence.extras},
        )

    def _chunk(self, sequence: Sequence, **fields: Any) -> dict[str, Any]:
        empty: dict[str, Any] = {"token_ids": [], "logprobs": [], "sampling_logprobs": [], "finish_reason": None}
        return {"request_id": sequence.request_id, "version": self.version, **empty, **fields}


def _truncated(logprobs: Tensor, top_p: float, top_k: int) -> Tensor:
    """Keep the most likely tokens: at most `top_k`, and of these as few as reach `top_p`."""
    ordered, order = logprobs.sort(descending=True, stable=True)
    drop = torch.arange(len(order)) >= (top_k if top_k > 0 else len(order))
    probs = ordered.masked_fill(drop, -torch.inf).softmax(-1)
    drop |= (probs.cumsum(-1) - probs >= top_p) & (top_p < 1)
    return logprobs.index_fill(0, order[drop], -torch.inf)


def _read(path: str, dtype: str | None) -> PreTrainedModel:
    with real_tensors():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype) if dtype else "auto")
    return model.eval().requires_grad_(False)


def _push(connection: socket.socket, **message: Any) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")
