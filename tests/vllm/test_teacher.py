"""A real vLLM server as a teacher: it says what the model says, and whether it can judge the student's tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import rlite
from rlite.assembly.presets import DistillConfig
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.backends.remote.teacher import ServedTeacher
from rlite.backends.serving.http import Endpoint
from rlite.errors import ConfigError, WorkerError
from rlite.rollout import SingleTurnWorkflow
from rlite.services.console.sinks import read_metrics
from rlite.trainer.distill import DistillTrainer
from rlite.trainer.options import SamplingOptions
from tests.integration.rewards import digits
from tests.tiny import build_model_dir
from tests.vllm.processes import KEY, user_server

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(840)]
START_S = 300.0
ROWS = [[5, 6, 7, 200, 31, 8], [9, 9], [60, 61, 62, 63, 64, 65, 66, 67, 68, 69]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_dir(tmp_path_factory.mktemp("models") / "wide", "qwen3", hidden=96, head_dim=32)


@pytest.fixture(scope="module")
def endpoint(path: Path) -> Iterator[Endpoint]:
    with user_server(path) as url:
        found, deadline = Endpoint(url, KEY, kind="teacher"), time.monotonic() + START_S
        while time.monotonic() < deadline:
            with suppress(WorkerError):
                found.call("/health")
                break
            time.sleep(1)
        yield found


@pytest.mark.parametrize("k", [0, 1, 20])
def test_log_probabilities_are_those_of_the_model(endpoint: Endpoint, path: Path, k: int) -> None:
    teacher = ServedTeacher(endpoint, "tiny", "url", byte_tokenizer(), k)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for row, ids, found in zip(ROWS, *teacher.logprobs(ROWS), strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([row])).logits[0, :-1].log_softmax(-1)
        best = expected.topk(k).indices if k else torch.tensor(row[1:])[:, None]
        torch.testing.assert_close(found[1:], expected.gather(1, ids[1:]), atol=1e-4, rtol=0)
        torch.testing.assert_close(found[1:], expected.gather(1, best), atol=1e-4, rtol=0)  # equals may change places


def test_what_the_server_cannot_say_is_refused(endpoint: Endpoint) -> None:
    with pytest.raises(ConfigError, match=r"as vLLM: .*prompt.logprobs.* 21"):
        ServedTeacher(endpoint, "tiny", "url", byte_tokenizer(), 21)
    other = byte_tokenizer()
    other.add_tokens(["boxes"])
    with pytest.raises(ConfigError, match="cuts a text otherwise than the student's"):
        ServedTeacher(endpoint, "tiny", "url", other, 0)
    with pytest.raises(ConfigError, match=r"as vLLM: .*model `wide` does not exist"):
        ServedTeacher(endpoint, "wide", "url", byte_tokenizer(), 0)


@pytest.mark.parametrize("support", ["sampled", "teacher_topk"])
def test_a_student_learns_from_the_server_as_from_the_model(
    endpoint: Endpoint, path: Path, tmp_path: Path, support: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    student = build_model_dir(tmp_path / "student", "llama", tie=False, hidden=64)
    places = {
        "served": {"url": endpoint.url, "model_name": "tiny", "key_env": "TEACHER_KEY"},
        "own": {"model_name": str(path)},
    }
    found = {}
    for name, place in places.items():
        rlite.init(device="cpu", num_devices=1, num_threads=1)
        own: Any = {"teacher": place, "support": support, **({"k": 8} if support == "teacher_topk" else {})}
        config = DistillConfig(
            actor={"model_name": str(student)},
            distill={"task_rewards": False, **own},
            trainer={"save_dir": str(tmp_path / name), "total_steps": 1, "save_freq": 1000, "record": "none"},
            train_data={"prompts_per_rollout": 4, "responses_per_prompt": 2},
            rollout={"max_model_len": 96, "train_sampling_params": {"max_new_tokens": 6}},
        )
        workflow = SingleTurnWorkflow(digits, SamplingOptions(max_new_tokens=6).gconfig(), byte_tokenizer())
        DistillTrainer(config, workflow, [{"prompt": f"{number}+1="} for number in range(8)]).fit()
        rlite.shutdown()
        (found[name],) = read_metrics(tmp_path / name / "metrics.jsonl")
    for name in ("divergence", "grad_norm"):
        assert found["served"][name] == pytest.approx(found["own"][name], rel=1e-4), name
