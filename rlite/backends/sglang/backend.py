"""Registration of the inference executor "sglang", and the checks before it starts."""

from __future__ import annotations

from operator import attrgetter

from rlite.backends.sglang.options import SglangOptions
from rlite.backends.sglang.replica import SglangReplica
from rlite.backends.sglang.worker import SglangWorker
from rlite.runtime.replicas.replica import Capabilities, InferenceBackend
from rlite.runtime.replicas.workers import RankChoice

BACKEND = InferenceBackend(
    options=SglangOptions,
    worker=SglangWorker,
    replica=SglangReplica,
    ranks=RankChoice(receives=(0,), returns=0),  # the other ranks hold the devices of SGLang's processes
    num_replicas=attrgetter("num_replicas"),
    capabilities=Capabilities(has_prompt_logprobs=True, extras=frozenset({"kept_ids"})),
)
