"""The process that runs vLLM's asynchronous engine for one replica; see `process.py` for its messages.

vLLM starts further processes: the engine core, and one worker for each device. A child may import this module again, so
vLLM is imported by a function. Tokens leave vLLM's frontend as soon as they arrive from the engine core: the frontend
makes several objects for each token, and on a small model that takes as long as the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import pickle
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import psutil

from rlite.backends.models.replay import routing_table
from rlite.backends.serving.sampler import RequestRules
from rlite.backends.vllm import release
from rlite.backends.vllm.release import Table, is_cpu_build, take_table
from rlite.data.routing import ROUTED, RoutingTable
from rlite.errors import DataError
from rlite.types import PromptLogprobs, SequenceRequest, TokenChunk

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class LoadedAdapter:
    """One version of an adapter that vLLM holds."""

    version: int
    request: Any
    """vLLM's LoRARequest"""


@dataclass(eq=False)
class Serving:
    """One request that vLLM serves."""

    request: SequenceRequest
    name: str
    """name of the request in vLLM. A request number can return after a cancelled request that vLLM still knows"""
    made: list[int]
    """tokens of the answer so far"""
    adapter: LoadedAdapter | None
    is_started: bool = False
    """vLLM has accepted it"""


class Server:
    """Serves one connection. All methods run in the event loop.

    The worker calls public methods by `EngineProcess.call` if they are coroutines, and by `EngineProcess.cast` if not.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._engine: Any = None
        self._serving: dict[str, Serving] = {}
        self._chunks: list[TokenChunk] = []
        """chunks to send, in order"""
        self._counter = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._version = 0
        self._adapters: dict[str | None, LoadedAdapter] = {}
        """by name; None is the adapter of requests that name none"""
        self._staged: dict[str | None, LoadedAdapter] = {}
        self._retired: list[LoadedAdapter] = []
        """versions that requests in flight may still use"""
        self._routing: RoutingTable | None = None

    async def run(self) -> None:
        """Process messages until the connection ends."""
        loop = asyncio.get_running_loop()
        messages: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        os.register_at_fork(after_in_child=self._connection.close)  # the end of this process alone has to close it
        threading.Thread(target=_read, args=(self._connection, loop, messages), daemon=True).start()
        while True:
            number, method, args, kwargs = await messages.get()
            called = getattr(self, method)(*args, **kwargs)
            if number is not None:
                await self._answer(number, called)

    async def _answer(self, number: int, called: Coroutine[Any, Any, Any]) -> None:
        try:
            value, error = await called, None
        except Exception as raised:  # the boundary: it belongs to the caller
            traceback.print_exc()
            value, error = None, f"{type(raised).__name__}: {raised}"
        self._flush()
        self._connection.send(("reply", number, value, error))

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(
        self, arguments: dict[str, Any], tokenizer_path: str, end_ids: Sequence[int], version: int
    ) -> tuple[int, int]:
        """Start the engine.

        Returns bytes of the KV cache, and the longest sequence in tokens.
        """
        self._version = version
        self._routing = routing_table(tokenizer_path) if arguments.get(release.ROUTING) else None
        self._engine = release.start_engine(arguments, self._take)
        cache_bytes = await self._engine.collective_rpc("rlite_install", args=(os.getpid(),))
        model = self._engine.model_config
        length, vocab_size = int(model.max_model_len), int(model.get_vocab_size())
        self._rules = RequestRules(tokenizer_path, vocab_size, length, frozenset(end_ids))
        self._watch_children()
        return sum(cache_bytes), length

    def _watch_children(self) -> None:
        """Report the death of any process that vLLM has started."""
        loop = asyncio.get_running_loop()
        for child in filter(is_no_tracker, psutil.Process().children(recursive=True)):
            with contextlib.suppress(OSError, psutil.Error):
                title = " ".join(child.cmdline())[:40] or child.name()
                told = f"vLLM's {title} (process {child.pid}) has ended"
                loop.add_reader(os.pidfd_open(child.pid), self._die, told)

    def _die(self, reason: str) -> None:
        with contextlib.suppress(OSError):  # whatever happens, this process ends below, and is not called again
            self._flush()
            self._connection.send(("died", reason))
        end_everything()

    # -- requests ------------------------------------------------------------------------------------------------

    def submit(self, requests: list[SequenceRequest]) -> None:
        """Start requests."""
        for request in requests:
            if request.adapter is not None and request.adapter not in self._adapters:
                self._put(request, self._version, error=f"there is no adapter {request.adapter!r}")
            elif (error := self._rules.objection(request)) is not None:
                self._put(request, self._version, error=error)
            else:
                self._start(request)

    def _start(self, request: SequenceRequest) -> None:
        name, adapter = f"{request.request_id}.{next(self._counter)}", self._adapters.get(request.adapter)
        self._serving[name] = serving = Serving(request, name, [*request.output_ids], adapter)
        self._run_beside(self._begin(serving))

    def cancel(self, request_ids: list[int]) -> None:
        """End requests with their tokens so far."""
        ended = set(request_ids)
        for serving in [each for each in self._serving.values() if each.request.request_id in ended]:
            self._abort(serving, finish_reason="abort")

    async def _begin(self, serving: Serving) -> None:
        request, rules = serving.request, self._rules
        arguments = release.sampling_arguments(request, rules.stop_ids(request.gconfig), rules.max_model_len)
        prompt = {"prompt_token_ids": [*request.input_ids, *request.output_ids]}
        try:
            lora = {} if serving.adapter is None else {"lora_request": serving.adapter.request}
            await self._engine.add_request(serving.name, prompt, release.sampling_params(arguments), **lora)
        except Exception as error:  # of any kind: it belongs to this request, unless vLLM is gone
            if serving.name in self._serving and not release.is_death(error):
                traceback.print_exc()
                self._end(serving, error=f"vLLM could not serve the request: {error}")
            return
        serving.is_started = True
        if serving.name not in self._serving:  # it ended while vLLM accepted it
            await self._engine.abort(serving.name)

    def _abort(self, serving: Serving, **fields: Any) -> None:
        """End a request that vLLM continues."""
        self._end(serving, **fields)
        if serving.is_started:  # otherwise `_begin` aborts it
            self._run_beside(self._engine.abort(serving.name))

    def _end(self, serving: Serving, **fields: Any) -> None:
        del self._serving[serving.name]
        self._put(serving.request, self._version_of(serving), **fields)

    def _run_beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)  # the event loop keeps no reference
        task.add_done_callback(self._tasks.discard)

    # -- tokens --------------------------------------------------------------------------------------------------

    def _take(self, outputs: list[Any]) -> list[Any]:
        """Send the tokens of some steps.

        Returns the outputs that vLLM's own frontend has to see.
        """
        left, row = [], 0
        try:
            whole, kept, kept_ids = take_table(outputs)
            for output in outputs:
                rows = slice(row, row := row + len(output.new_token_ids))
                serving, reason = self._serving.get(release.name_of(output)), release.finish_reason(output)
                if serving is not None:
                    table = whole[rows], kept[rows], kept_ids[rows]
                    self._add(serving, output.new_token_ids, table, output.routed_experts, reason)
                if serving is None or reason is not None:  # it forgets a request at its last output
                    left.append(output)
            self._flush()
        except Exception as error:  # of any kind: requests would wait for their tokens forever
            traceback.print_exc()
            self._die(f"vLLM's outputs could not be read: {type(error).__name__}: {error}")
            raise
        return left

    def _add(self, serving: Serving, tokens: list[int], table: Table, experts: Any, reason: str | None) -> None:
        logprobs, over_kept, kept_ids = table
        request, length = serving.request, None
        if any(value != value for value in logprobs):
            return self._abort(serving, error="the model computes NaN or infinity for this request", is_nonfinite=True)
        start = len(serving.made)
        serving.made += tokens
        if request.gconfig.stop:
            length = self._rules.length_at_stop(request, serving.made, start)
        num = len(tokens) if length is None else length - start
        columns: dict[str, list] = {"token_ids": tokens, "logprobs": logprobs, "sampling_logprobs": over_kept}
        made: dict[str, Any] = {name: column[:num] for name, column in columns.items()}
        made["extras"] = {"kept_ids": kept_ids[:num]} if "kept_ids" in request.extras else {}
        if ROUTED in request.extras and self._routing is not None:
            try:
                made["extras"][ROUTED] = self._routing.entries(experts, len(tokens))[:num]
            except DataError as error:
                return self._abort(serving, error=str(error))
        if length is not None:
            self._abort(serving, finish_reason="stop", **made)
        elif reason is None:
            self._put(request, self._version_of(serving), **made)
        elif reason in ("stop", "length"):
            self._end(serving, finish_reason=reason, **made)
        else:
            self._end(serving, error=f"vLLM ended the request with {reason!r}", **made)

    def _version_of(self, serving: Serving) -> int:
        return self._version if serving.adapter is None else serving.adapter.version

    def _put(self, request: SequenceRequest, version: int, **fields: Any) -> None:
        """Send a chunk of a request, with the other chunks of this turn of the event loop."""
        if not self._chunks:
            asyncio.get_running_loop().call_soon(self._flush)
        self._chunks.append(TokenChunk(request_id=request.request_id, version=version, **fields))

    def _flush(self) -> None:
        if self._chunks:
            chunks, self._chunks = self._chunks, []
            self._connection.send(("tokens", chunks))

    async def prompt_logprobs(
        self, prompts: list[list[int]], num_top: int, adapter: str | None = None
    ) -> list[PromptLogprobs]:
        """Return the log-probabilities of each prompt's tokens."""
        own = self._adapters.get(adapter)
        return await asyncio.gather(*(self._prompt_logprobs(ids, num_top, own) for ids in prompts))

    async def _prompt_logprobs(
        self, ids: list[int], num_top: int, adapter: LoadedAdapter | None = None
    ) -> PromptLogprobs:
        if len(ids) < 2:
            return PromptLogprobs(logprobs=[], top_ids=[], top_logprobs=[])
        params = release.sampling_params({"max_tokens": 1, "prompt_logprobs": num_top, "detokenize": False})
        name = f"prompt-{next(self._counter)}"
        lora = {} if adapter is None else {"lora_request": adapter.request}
        async for output in self._engine.generate({"prompt_token_ids": ids}, params, name, **lora):
            entries = output.prompt_logprobs
        return release.scored_prompt(ids, entries, num_top)

    # -- adapters ------------------------------------------------------------------------------------------------

    async def stage_adapter(
        self, name: str | None, version: int, number: int, folder: str, probe: list[int] | None
    ) -> bool | None:
        """Load a version of an adapter; see `AdapterWorker.stage_adapter`."""
        staged = LoadedAdapter(version, release.lora_request(f"{name}.{number}", number, folder))
        await self._engine.add_lora(staged.request)
        if name in self._staged:
            self._retired.append(self._staged.pop(name))
        self._staged[name] = staged
        await self._forget_retired()
        if probe is None:
            return None
        before, after = [await self._prompt_logprobs(probe, 1, each) for each in (None, staged)]
        return before != after

    async def use_adapter(self, name: str | None, is_kept: bool) -> None:
        """Serve the version that was staged; see `AdapterWorker.use_adapter`. Generation rests."""
        if name in self._adapters:
            self._retired.append(self._adapters[name])
        self._adapters[name] = self._staged.pop(name)
        if not is_kept:
            await self._change_in_flight(name)
        await self._forget_retired()

    async def drop_adapter(self, name: str | None) -> None:
        """Forget an adapter, and a version that was staged; see `AdapterWorker.drop_adapter`. Generation rests."""
        is_served = name in self._adapters
        self._retired += [held.pop(name) for held in (self._adapters, self._staged) if name in held]
        if is_served and name is None:
            await self._change_in_flight(None)
        await self._forget_retired()

    async def _change_in_flight(self, name: str | None) -> None:
        for serving in [each for each in self._serving.values() if each.request.adapter == name]:
            del self._serving[serving.name]
            if serving.is_started:
                await self._engine.abort(serving.name)
            self._start(replace(serving.request, output_ids=serving.made))

    async def _forget_retired(self) -> None:
        """Let vLLM forget versions that no request uses, and remove their files."""
        used = {id(serving.adapter) for serving in self._serving.values()}
        unused = [adapter for adapter in self._retired if id(adapter) not in used]
        self._retired = [adapter for adapter in self._retired if id(adapter) in used]
        for adapter in unused:
            await self._engine.remove_lora(adapter.request.lora_int_id)
            shutil.rmtree(adapter.request.lora_path, ignore_errors=True)

    # -- rest, weights and residency -----------------------------------------------------------------------------

    async def pause(self) -> None:
        """Rest at a token boundary, with every token before it sent."""
        await release.pause(self._engine)

    async def resume(self) -> None:
        """Continue after `pause`."""
        await self._engine.resume_generation()

    async def set_version(self, version: int) -> None:
        """Stamp tokens with this policy version from now on, and return when this holds."""
        self._version = version
        if (policy := self._adapters.get(None)) is not None:
            policy.version = version

    async def load(self, source: Any, version: int | None) -> None:
        """Load weights into every worker, and forget what was computed with the old weights.

        `version`: policy version of the weights; None leaves the version.
        """
        await self._engine.collective_rpc("rlite_load", args=(pickle.dumps(source),))
        await release.forget_cache(self._engine)
        if version is not None:
            self._version = version

    async def digest(self, pieces: bytes) -> tuple[int, list[bytes]]:
        """Return the version that is stamped, and each worker's digests; see `WorkerExtension.rlite_digest`."""
        return self._version, await self._engine.collective_rpc("rlite_digest", args=(pieces,))

    async def sleep(self, level: int) -> None:
        """Free memory. Running requests recompute their keys and values later.

        `level`: 1 frees the KV cache, and keeps the weights in host memory, where they are on CPU; 2 frees both.
        """
        if is_cpu_build():
            await release.forget_cache(self._engine)
            await self._engine.collective_rpc("rlite_free_cache")
        else:
            await self._engine.sleep(level=level)

    async def wake_up(self, parts: list[str]) -> None:
        """Allocate memory for the weights or the KV cache again."""
        if not is_cpu_build():
            await self._engine.wake_up(tags=parts)
        elif "kv_cache" in parts:
            await self._engine.collective_rpc("rlite_allocate_cache")


def is_no_tracker(process: psutil.Process) -> bool:
    """Return whether a process is another than Python's resource tracker, which removes shared memory."""
    with contextlib.suppress(psutil.Error):
        return not any("resource_tracker" in argument for argument in process.cmdline())
    return False


def end_everything() -> None:
    """End every process that vLLM has started, remove their files, then end this process."""
    with contextlib.suppress(psutil.Error):
        for child in filter(is_no_tracker, psutil.Process().children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                child.kill()
    shutil.rmtree(os.environ["VLLM_RPC_BASE_PATH"], ignore_errors=True)
    os._exit(1)


def _read(connection: Connection, loop: asyncio.AbstractEventLoop, messages: asyncio.Queue[tuple[Any, ...]]) -> None:
    """Pass messages to the event loop. The end of the connection ends everything, even if the loop is busy."""
    try:
        while True:
            message = connection.recv()
            loop.call_soon_threadsafe(messages.put_nowait, message)
    except (OSError, EOFError, RuntimeError):
        end_everything()


def main() -> None:
    """Serve the connection whose file descriptor is the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt from the terminal is for the driver
    asyncio.run(Server(Connection(int(sys.argv[1]))).run())


if __name__ == "__main__":
    main()
