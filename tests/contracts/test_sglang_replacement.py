"""A killed replica of executor="sglang" is replaced, over servers that keep SGLang's contract, not the real SGLang."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.types import LLMRequest, LLMResponse
from tests.contracts import sglang_wheel as wheel
from tests.contracts.test_inference_executors import request_of
from tests.contracts.test_sglang import installed  # noqa: F401  # an autouse fixture
from tests.integration.modules import Qwen3Policy, on_meta
from tests.integration.test_lost_replicas import answers
from tests.integration.worlds import kill, process_of, ray_session
from tests.tiny import build_model_dir

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not wheel.IS_HERE, reason=wheel.REASON)]
NUM = 8


@pytest.fixture(scope="module")
def engines(
    installed: None,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[RliteInferenceEngine, RliteTrainEngine]]:
    """Two replicas, and a policy on a device of its own."""
    path: Path = build_model_dir(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", hidden=64)
    with ray_session(3):
        serve = RliteInferenceEngine(path, executor="sglang")
        serve.build(data_parallel_size=2, max_model_len=256, max_num_seqs=4, seed=3)
        train = RliteTrainEngine(on_meta(Qwen3Policy, path))
        train.build(data_parallel_size=1)
        yield serve, train
        train.release()
        serve.release()


def requests() -> list[LLMRequest]:
    return [request_of(100, seed=number) for number in range(NUM)]


def disturbed(engine: RliteInferenceEngine, rank: int) -> list[LLMResponse]:
    """The answers while the worker of a rank is killed."""
    pid, seen = process_of(engine, rank), itertools.count()
    return answers(engine, requests(), lambda: kill(pid) if next(seen) == 2 * NUM else None)


def check_same(made: list[LLMResponse], expected: list[LLMResponse], version: int) -> None:
    assert [each.output_tokens for each in made] == [each.output_tokens for each in expected]
    assert {at for each in made for at in each.output_versions} == {version}


def silent() -> None:
    pass


@pytest.mark.nightly
def test_it_joins_at_once_with_the_checkpoint_and_after_a_sync_at_the_next(
    engines: tuple[RliteInferenceEngine, RliteTrainEngine],
) -> None:
    serve, train = engines
    undisturbed = answers(serve, requests(), silent)
    before = process_of(serve, 1)
    check_same(disturbed(serve, 1), undisturbed, version=0)
    serve.wait_for_replacements()
    assert [(lost.replica, lost.num_moved > 0) for lost in serve.lost_replicas] == [(1, True)]
    assert [(replaced.replica, replaced.version) for replaced in serve.replaced_replicas] == [(1, 0)]
    assert process_of(serve, 1) != before

    train.scale_weights(1.5)
    train.p2p_weight_sync(serve)
    expected = answers(serve, requests(), silent)
    assert [each.output_tokens for each in expected] != [each.output_tokens for each in undisturbed]
    check_same(disturbed(serve, 0), expected, version=1)
    serve.wait_for_replacements()
    assert serve.num_replicas == 1
    train.scale_weights(1.5)
    train.p2p_weight_sync(serve, verify_checksums=True)
    assert serve.num_replicas == 2
    expected = answers(serve, requests(), silent)
    check_same(disturbed(serve, 1), expected, version=2)  # replica 0, which was replaced, has answered the rest
    serve.wait_for_replacements()
