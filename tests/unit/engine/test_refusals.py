"""Wrong arguments are refused before any process starts: here there is not even a session."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2ForCausalLM

import rlite
from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.errors import ConfigError, RliteError, UnknownOptionError
from rlite.nn import HuggingFaceFsdp2TrainModule
from rlite.nn.pretrained import meta_parameters
from rlite.types import GenerationHyperparameters
from tests.tiny import build_model_dir


class Policy(HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    pass


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_dir(tmp_path_factory.mktemp("model") / "qwen2", "qwen2", hidden=64, layers=1)


@pytest.fixture(scope="module")
def train(path: Path) -> RliteTrainEngine:
    rlite.shutdown()
    with meta_parameters():
        return RliteTrainEngine(Policy.from_pretrained(path))


@pytest.fixture(scope="module")
def serve(path: Path) -> RliteInferenceEngine:
    rlite.shutdown()
    return RliteInferenceEngine(path)


class Hiding(Policy):
    def load(self) -> None: ...


class Timed(Policy):
    def play(self, timeout: float) -> None: ...


@pytest.mark.parametrize(("cls", "words"), [(Hiding, "Hiding defines load, which"), (Timed, "play has a parameter")])
def test_methods_that_could_not_be_called_as_they_are_written(path: Path, cls: Any, words: str) -> None:
    with meta_parameters(), pytest.raises(ConfigError, match=words):
        RliteTrainEngine(cls.from_pretrained(path))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"param_dtype": "float23"}, ConfigError, "param_dtype=float23: expected one of float32"),
        ({"param_dtype": "float16"}, ConfigError, "param_dtype=float16.*losses are not scaled here. Use bfloat16"),
        ({"compute_dtype": "float16"}, ConfigError, "compute_dtype=float16.*Use bfloat16"),
        ({"compute_dtype": "bf16"}, ConfigError, "compute_dtype=bf16: expected one of"),
        ({"max_tokens_per_microbatch": 0}, ConfigError, "max_tokens_per_microbatch=0"),
        ({"max_grad_norm": 0.0}, ConfigError, "max_grad_norm"),
        ({"tensor_parallel_size": 0}, ConfigError, "tensor_parallel_size=0: expected a whole number"),
        ({"data_parallel_size": 1.5}, ConfigError, "data_parallel_size=1.5"),
        ({"tensor_paralel_size": 2}, UnknownOptionError, "did you mean 'tensor_parallel_size'"),
        ({"max_token_per_microbatch": 2}, UnknownOptionError, "did you mean 'max_tokens_per_microbatch'"),
    ],
)
def test_build_options_of_a_train_engine(
    train: RliteTrainEngine, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        train.build(**options)
    assert not train.is_built


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"dtype": "float12"}, ConfigError, "dtype=float12: expected one of"),
        ({"max_model_len": 1}, ConfigError, "max_model_len=1: expected at least 2"),
        ({"gpu_memory_utilization": 1.5}, ConfigError, "gpu_memory_utilization=1.5"),
        ({"max_num_seq": 8}, UnknownOptionError, "did you mean 'max_num_seqs'"),
        ({"tensor_parallel_size": 3}, ConfigError, "does not divide the model's 2 key-value heads"),
    ],
)
def test_build_options_of_an_inference_engine(
    serve: RliteInferenceEngine, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        serve.build(**options)
    assert not serve.is_built


def test_unregistered_executors_are_refused(path: Path, train: RliteTrainEngine) -> None:
    with pytest.raises(ConfigError, match="unknown inference executor 'torhc'; did you mean 'torch'"):
        RliteInferenceEngine(path, executor="torhc")
    with pytest.raises(ConfigError, match="unknown train executor 'fsdp'; did you mean 'fsdp2'"):
        RliteTrainEngine(train.module, executor="fsdp")


def test_models_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        RliteInferenceEngine(tmp_path / "nowhere")
    with meta_parameters(), pytest.raises(ConfigError, match="no such folder"):
        Policy.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"expected a config\.json"):
        RliteInferenceEngine(tmp_path)


def test_calls_on_an_engine_that_was_not_built(train: RliteTrainEngine, serve: RliteInferenceEngine) -> None:
    for call in (
        lambda: train.cuda(),
        lambda: train.save("x"),
        lambda: train.p2p_weight_sync(serve),
        lambda: serve.generate(["a"]),
        lambda: serve.meta(),
    ):
        with pytest.raises(RliteError, match=r"not built: call build\(\) first"):
            call()
    with pytest.raises(ConfigError, match="is not built; build it first"):
        train.build(colocate_with=serve)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"temperature": 10**400}, r"0, or a number in \[1e-06, 1e\+06\]"),
        ({"temperature": None}, "temperature=None: expected a number"),
        ({"top_p": "0.9"}, "top_p='0.9': expected a number"),
        ({"greedy": None}, "greedy=None: expected true or false"),
        ({"greedy": "false"}, "greedy='false': expected true or false"),
        ({"ignore_eos": "false"}, "ignore_eos='false': expected true or false"),
        ({"seed": "1"}, "seed='1': expected a whole number or None"),
        ({"top_k": np.array([3])}, r"top_k=array\(\[3\]\): expected a whole number"),
        ({"temperature": float("nan")}, "0, or a number"),
        ({"top_k": float("inf")}, "top_k=inf: expected a whole number"),
        ({"max_tokens": 2.5}, "max_new_tokens=2.5: expected a whole number"),
        ({"temperature": b"0.5"}, "temperature=b'0.5': expected a number"),
        ({"greedy": torch.tensor([True, False])}, r"greedy=tensor\(.*: expected true or false"),
        ({"stop_token_ids": 5}, "stop_token_ids=5: expected token ids"),
        ({"stop_token_ids": [2.0]}, r"stop_token_ids=\[2.0\]: expected token ids"),
        ({"stop": 5}, "stop=5: expected non-empty strings"),
    ],
)
def test_sampling_parameters_that_would_end_the_worker(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        GenerationHyperparameters.from_mapping(parameters)


def test_numbers_of_other_kinds_reach_the_worker_as_pythons_own() -> None:
    given = GenerationHyperparameters(
        temperature=Decimal("0.5"), top_p=np.float32(0.5), top_k=np.int64(3), seed=np.int64(7), greedy=np.True_
    )
    assert given == GenerationHyperparameters(temperature=0.5, top_p=0.5, top_k=3, seed=7, greedy=True)
    numbers = (given.temperature, given.top_p, given.top_k, given.seed, given.greedy)
    assert [type(value) for value in numbers] == [float, float, int, int, bool]
    for ids in (np.array([1, 2]), torch.tensor([1, 2]), [np.int64(1), 2]):
        stops = GenerationHyperparameters(stop_token_ids=ids).stop_token_ids
        assert [(type(token), token) for token in stops] == [(int, 1), (int, 2)]
