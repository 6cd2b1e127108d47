"""The executor's registration: options, worker, replica, and what it can do."""

from __future__ import annotations

from dataclasses import dataclass

from rlite.errors import ConfigError
from rlite.runtime.replicas.replica import Capabilities, InferenceBackend
from rlite.runtime.replicas.workers import RankChoice
from tests.third_party_executor.replica import PushedReplica
from tests.third_party_executor.worker import PushingWorker


@dataclass(frozen=True, kw_only=True)
class PushingOptions:
    """Options of this executor: those that every inference executor has."""

    max_model_len: int | None = None
    max_num_seqs: int = 16
    gpu_memory_utilization: float = 0.9
    dtype: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ConfigError(f"max_num_seqs={self.max_num_seqs}: expected at least 1")


BACKEND = InferenceBackend(
    options=PushingOptions,
    worker=PushingWorker,
    replica=PushedReplica,
    ranks=RankChoice(receives=(0,), returns=0),  # the first rank of a replica generates, the others hold nothing
    capabilities=Capabilities(has_prompt_logprobs=True, extras=frozenset({"kept_ids"})),
)
