"""The signatures of vLLM that `rlite/backends/vllm` relies on, read from vLLM's sources without importing it."""

from __future__ import annotations

import ast
import functools
import os
from pathlib import Path

import pytest

from rlite.backends.vllm import release

SOURCES = Path(os.environ.get("VLLM_SOURCES") or release.installed()[1])
"""VLLM_SOURCES=FOLDER checks another release than the installed one"""
ASYNC_LLM = "v1/engine/async_llm.py"
SCHEDULER = "v1/core/sched/scheduler.py"
RUNNER = "v1/worker/gpu_model_runner.py"
BATCH = "v1/worker/gpu_input_batch.py"


@functools.cache
def module(path: str) -> ast.Module:
    return ast.parse((SOURCES / path).read_text())


def class_of(path: str, name: str) -> ast.ClassDef:
    return next(node for node in module(path).body if isinstance(node, ast.ClassDef) and node.name == name)


def parameters(path: str, cls: str, method: str) -> set[str]:
    (found,) = [
        node
        for node in class_of(path, cls).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == method
    ]
    return {argument.arg for argument in [*found.args.args, *found.args.kwonlyargs]}


def fields(path: str, cls: str) -> set[str]:
    body = class_of(path, cls).body
    return {node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}


def attributes(path: str, cls: str) -> set[str]:
    """Names that the methods of a class assign to `self`, and its methods and properties."""
    tree = class_of(path, cls)
    assigned = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    return assigned | {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(
    ("method", "needed"),
    [
        ("from_vllm_config", {"vllm_config", "disable_log_stats"}),
        ("add_request", {"request_id", "prompt", "params"}),
        ("abort", {"request_id"}),
        ("generate", {"prompt", "sampling_params", "request_id"}),
        ("pause_generation", {"mode", "clear_cache"}),
        ("resume_generation", set()),
        ("reset_prefix_cache", {"reset_running_requests"}),
        ("collective_rpc", {"method", "args"}),
        ("sleep", {"level"}),
        ("wake_up", {"tags"}),
    ],
)
def test_the_asynchronous_engine_has_the_methods_that_the_server_calls(method: str, needed: set[str]) -> None:
    assert needed <= parameters(ASYNC_LLM, "AsyncLLM", method)


def test_requests_and_outputs_have_the_fields_that_the_server_uses() -> None:
    asked = {
        "n",
        "temperature",
        "top_p",
        "top_k",
        "max_tokens",
        "stop_token_ids",
        "ignore_eos",
        "detokenize",
    }
    assert asked | {"prompt_logprobs", "output_kind", "extra_args"} <= fields("sampling_params.py", "SamplingParams")
    assert {"prompt_logprobs"} <= parameters("outputs.py", "RequestOutput", "__init__")
    assert "EngineDeadError" in {
        node.name for node in module("v1/engine/exceptions.py").body if isinstance(node, ast.ClassDef)
    }


def test_the_outputs_of_a_step_can_be_diverted_with_one_table_of_logprobs() -> None:
    assert {"scheduler_output", "model_runner_output"} <= parameters(SCHEDULER, "Scheduler", "update_from_output")
    assert class_of("v1/core/sched/async_scheduler.py", "AsyncScheduler")
    assert {"requests", "pause_state", "add_request"} <= attributes(SCHEDULER, "Scheduler")
    assert "total_num_scheduled_tokens" in fields("v1/core/sched/output.py", "SchedulerOutput")
    assert "sampling_params" in parameters("v1/request.py", "Request", "__init__")
    assert {"scheduler_cls", "async_scheduling"} <= fields("config/scheduler.py", "SchedulerConfig")
    assert "distributed_executor_backend" in fields("config/parallel.py", "ParallelConfig")
    assert {"req_id_to_index", "logprobs"} <= fields("v1/outputs.py", "ModelRunnerOutput")
    assert {"logprob_token_ids", "logprobs", "sampled_token_ranks"} <= fields("v1/outputs.py", "LogprobsLists")
    assert {"outputs", "finished_requests", "scheduler_stats"} <= fields("v1/engine/__init__.py", "EngineCoreOutputs")
    assert {"request_id", "new_token_ids", "new_logprobs", "finish_reason"} <= fields(
        "v1/engine/__init__.py", "EngineCoreOutput"
    )
    assert parameters("v1/engine/core_client.py", "AsyncMPClient", "get_output_async") == {"self"}
    assert "create_engine_config" in attributes("engine/arg_utils.py", "EngineArgs")


def test_a_pause_is_answered_when_the_scheduler_has_nothing_to_do() -> None:
    states = class_of("v1/core/sched/interface.py", "PauseState")
    assert "UNPAUSED" in {target.id for node in states.body if isinstance(node, ast.Assign) for target in node.targets}
    core = class_of("v1/engine/core.py", "EngineCoreProc")
    methods = {node.name: ast.unparse(node) for node in core.body if isinstance(node, ast.FunctionDef)}
    assert "scheduler.has_requests()" in methods["has_work"]
    assert "has_work()" in methods.get("_pause_complete", methods["pause_scheduler"])


def test_the_sampler_can_be_replaced_and_finds_requests_and_positions() -> None:
    assert "logprobs_mode" in attributes("v1/sample/sampler.py", "Sampler")
    assert {"logits", "sampling_metadata"} <= parameters("v1/sample/sampler.py", "Sampler", "forward")
    assert {"sampled_token_ids", "logprobs_tensors"} <= fields("v1/outputs.py", "SamplerOutput")
    assert {"logprob_token_ids", "logprobs", "selected_token_ranks"} <= fields("v1/outputs.py", "LogprobsTensors")
    assert {"sampler", "input_batch", "requests", "kv_caches"} <= attributes(RUNNER, "GPUModelRunner")
    assert {"req_ids", "num_tokens_no_spec"} <= attributes(BATCH, "InputBatch")


def test_weights_can_be_reloaded_in_place_from_tensors() -> None:
    assert "weights_iterator" in parameters(RUNNER, "GPUModelRunner", "reload_weights")


def test_names_are_read_from_the_sources() -> None:
    assert {"model", "worker_extension_cls", "kv_cache_memory_bytes", "enforce_eager"} <= release.engine_arguments()
    assert {"Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM"} <= release.architectures()


def test_the_head_sizes_of_the_cpu_build_are_those_of_the_table() -> None:
    methods = ast.walk(module("v1/attention/backends/cpu_attn.py"))
    (method,) = [n for n in methods if isinstance(n, ast.FunctionDef) and n.name == "get_supported_head_sizes"]
    stated = [n.value for n in ast.walk(method) if isinstance(n, ast.Constant) and isinstance(n.value, int)]
    assert tuple(stated) == release.CPU_HEAD_SIZES
