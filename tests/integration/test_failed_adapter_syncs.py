"""One of two replicas fails at an operation of an adapter sync: no two sets of weights have one version."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlite import RliteInferenceEngine
from rlite.backends.embedded.cache import EmbeddedOptions
from rlite.backends.embedded.worker import BACKEND, EmbeddedWorker
from rlite.engine.registry import register_executor
from rlite.errors import WeightSyncError, WorkerError
from rlite.runtime.cluster.host import WorkerContext
from rlite.types import GenerationHyperparameters, LLMRequest
from tests.adapters import assert_base_after_removal, drawn, interrupted
from tests.integration.worlds import world

PROMPT = [1, 2, 3, 200, 7]


class FragileOptions(EmbeddedOptions):
    """Options of the embedded executor, and of what fails."""

    plan: str = ""
    """file with a line for each call that fails on the second replica: the name of the operation"""


class FragileWorker(EmbeddedWorker):
    """A worker whose operations fail as planned, after they have taken effect."""

    plan: Path | None = None

    def fail(self, operation: str) -> None:
        lines = [] if self.plan is None else self.plan.read_text().split()
        if operation in lines:
            lines.remove(operation)
            assert self.plan is not None
            self.plan.write_text("\n".join(lines))
            raise RuntimeError(f"{operation} fails as planned")

    def stage_adapter(self, *args: Any) -> bool:
        changes = super().stage_adapter(*args)
        self.fail("stage_adapter")
        return changes

    def use_adapter(self, *args: Any) -> None:
        super().use_adapter(*args)
        if self.plan is not None and self.plan.read_text() == "death":
            self.plan.write_text("")
            os._exit(1)
        self.fail("use_adapter")

    def set_version(self, version: int) -> None:
        super().set_version(version)
        self.fail("set_version")

    def drop_adapter(self, name: str | None) -> None:
        self.fail("drop_adapter")
        super().drop_adapter(name)


def make_worker(context: WorkerContext, path: str, options: FragileOptions, size: int) -> FragileWorker:
    worker = FragileWorker(path, options, torch.device(context.torch_device))
    if context.rank == 1:
        worker.plan = Path(options.plan)
        if worker.plan.read_text() == "wait":
            worker.plan.write_text("waits")
            while worker.plan.read_text():
                time.sleep(0.01)
    return worker


register_executor("inference", "fragile", dataclasses.replace(BACKEND, options=FragileOptions, worker=make_worker))


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with world(2):
        yield


class Served:
    """An engine of two replicas, the second of which fails as planned, and its adapter."""

    def __init__(
        self, engines: list[Any], path: Path, plan: Path, name: str | None, num: int = 2, **options: Any
    ) -> None:
        self.engine, self.plan, self.name = RliteInferenceEngine(path, executor="fragile", **options), plan, name
        plan.write_text("")
        self.engine.build(data_parallel_size=num, max_model_len=1024, max_num_seqs=8, plan=str(plan))
        engines.append(self.engine)

    def sync(self, seed: int, *fails: str, on_inflight: str = "continue") -> int:
        """Let an adapter of its own for each seed arrive, while operations fail."""
        self.plan.write_text("\n".join(fails))
        try:
            return self.engine.take_adapter(self.name, drawn(seed, 64), "a test", on_inflight)
        finally:
            assert self.plan.read_text() == "", "everything has failed that should"

    def values(self) -> list[list[float]]:
        """Log-probabilities of one prompt on each replica that serves, of the adapter or, without one, of the base."""
        name = self.name if self.name in self.engine.adapters else None
        found = self.engine.prompt_logprobs([PROMPT] * self.engine.num_replicas, adapter=name)
        assert all(each == found[0] for each in found), "the replicas serve the same"
        return [list(each) for each in found]

    def versions(self) -> set[int]:
        """Versions of the tokens of all replicas."""

        async def ask() -> list[Any]:
            gconfig = GenerationHyperparameters(max_new_tokens=4)
            asked = [LLMRequest(input_ids=PROMPT, gconfig=gconfig, adapter=self.name) for _ in range(8)]
            return await asyncio.gather(*map(self.engine.agenerate, asked))

        return {version for answer in asyncio.run(ask()) for version in answer.output_versions}


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("a", "stage_adapter"),
        ("a", "use_adapter"),
        (None, "stage_adapter"),
        (None, "use_adapter"),
        (None, "set_version"),
    ],
)
def test_an_operation_that_fails_on_one_replica_leaves_the_old_version_on_both(
    engines: list[Any], models: dict[str, Path], tmp_path: Path, name: str | None, operation: str
) -> None:
    served = Served(engines, models["qwen2"], tmp_path / "plan", name)
    base = served.values()
    told = "nothing under this name" if name else "version 0"
    with pytest.raises(WeightSyncError, match=f"still serves {told}: .*{operation} fails as planned"):
        served.sync(0, operation)
    assert served.values() == base
    assert served.engine.adapters == {}
    assert served.sync(1) == 1
    first = served.values()
    assert first != base
    for on_inflight in ("continue", "keep"):
        with pytest.raises(WeightSyncError, match=f"still serves version 1: .*{operation} fails as planned"):
            served.sync(2, operation, on_inflight=on_inflight)
        assert (served.values(), served.versions(), served.engine.adapters) == (first, {1}, {name: 1})
    assert served.sync(2) == 2
    assert served.values() != first
    assert (served.versions(), served.engine.adapters) == ({2}, {name: 2})


@pytest.mark.parametrize("name", ["a", None])
@pytest.mark.parametrize("on_inflight", ["continue", "keep"])
def test_requests_in_flight_do_not_notice_a_sync_that_fails(
    engines: list[Any], models: dict[str, Path], tmp_path: Path, name: str | None, on_inflight: str
) -> None:
    served = Served(engines, models["qwen2"], tmp_path / "plan", name)
    is_first = name is None and on_inflight == "continue"  # before the base has any adapter
    version = 0 if is_first else served.sync(0)
    gconfig = GenerationHyperparameters(max_new_tokens=600, ignore_eos=True, temperature=0.0)
    asked = [LLMRequest(input_ids=[*PROMPT, number], gconfig=gconfig, adapter=name) for number in range(2)]

    async def alone() -> list[Any]:
        return await asyncio.gather(*map(served.engine.agenerate, asked))

    def sync() -> None:
        with pytest.raises(WeightSyncError, match=f"still serves version {version}"):
            served.sync(1, "use_adapter", on_inflight=on_inflight)

    expected, found = asyncio.run(alone()), asyncio.run(interrupted(served.engine, asked, sync))
    for before, after in zip(expected, found, strict=True):
        assert {*after.output_versions} == {version}
        assert after.output_logprobs == pytest.approx(before.output_logprobs, abs=1e-4)
        assert after.output_tokens == before.output_tokens


def test_an_engine_whose_launcher_needs_all_workers_ends_if_a_replica_cannot_go_back(
    engines: list[Any], models: dict[str, Path], tmp_path: Path
) -> None:
    served = Served(engines, models["qwen2"], tmp_path / "plan", "a")
    served.sync(0)
    with pytest.raises(WeightSyncError, match=r"has to be built again, .*: use_adapter fails as planned"):
        served.sync(1, "use_adapter", "use_adapter")
    with pytest.raises(WorkerError, match="'a' could not be changed back on replica 1 of"):
        served.sync(1)


def test_the_base_has_a_version_of_its_own_after_the_policys_adapter(
    engines: list[Any], models: dict[str, Path], tmp_path: Path
) -> None:
    served = Served(engines, models["qwen2"], tmp_path / "plan", None)
    base = served.values()
    served.sync(0)
    served.engine.remove_adapter(None)
    assert (served.values(), served.versions(), served.engine.get_version()) == (base, {2}, 2)
    assert_base_after_removal(served.engine, 64)
