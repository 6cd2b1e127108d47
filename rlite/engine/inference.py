"""The inference engine: prompts in, completions out, rollouts on top.

    generate / agenerate ──> router ──> replica ──> the executor's workers
              ^                           │
              └── tokens with log-probabilities and versions, as they are made

Replicas, routing, replacement, residency and weights are the work of `ServingEngine` and its `ReplicaSet`
(`runtime/replicas`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from rlite.engine.texts import TextEngine
from rlite.errors import ConfigError
from rlite.rollout.collector.calls import RolloutCollector
from rlite.rollout.collector.options import CollectorOptions
from rlite.rollout.episode import mix
from rlite.rollout.workflow import RolloutWorkflow
from rlite.runtime.replicas.replica import InFlightRequest
from rlite.runtime.replicas.router import Policy, least_outstanding
from rlite.types import GenerationHyperparameters, LLMRequest, LLMResponse, OnChunk, SequenceRequest


class RliteInferenceEngine(TextEngine):
    """Serves a causal language model.

    `tensor_parallel_size` in `build` is the number of workers in one replica, `data_parallel_size` the number of
    replicas.

    When a worker dies its replica is lost; `lost_replicas` reports it. Its requests continue on the other replicas from
    their tokens so far, and callers are not affected. Under Ray the replica is replaced on the same devices, and
    receives the current weights from another replica while all others go on; `replaced_replicas` reports it. If it
    cannot be replaced, calls that need every replica (a weight sync, `cpu()`, `cuda()`, `load()`) raise WorkerDied
    until the engine is released and built again. When the last replica is lost, every call does.

    Args:
        path: folder (or hub name) of a Hugging Face checkpoint.
        executor: name of the executor: "torch" (built in), or a registered executor.
        max_replacements: most replacements of lost replicas in an hour; 0: lost replicas stay lost.
        routing: chooses the replica of a request, from the outstanding tokens of each replica that serves, by its
            index, and the replica that served this `rid` before, if any.
    """

    def __init__(
        self, path: str | Path, executor: str = "torch", max_replacements: int = 3, routing: Policy = least_outstanding
    ) -> None:
        super().__init__(path, executor, max_replacements, routing)
        self._rollout_options = CollectorOptions()
        self._collector: RolloutCollector | None = None

    # -- generating ----------------------------------------------------------------------------------------------

    async def agenerate(self, request: LLMRequest, on_chunk: OnChunk | None = None) -> LLMResponse:
        """Complete one request, while others run. Cancelling the task ends the request.

        Args:
            request: a prompt for one completion.
            on_chunk: called in a thread of the replica as tokens arrive. It must not call the engine. An exception ends
                this request.

        Returns:
            The completion; every token has its log-probability and policy version.

        Raises:
            ConfigError: the request asks for several completions, or for extras that the executor lacks.
            CancelledError: the task was cancelled.
        """
        if request.gconfig.n_samples != 1:
            raise ConfigError(f"agenerate makes one completion, not n_samples={request.gconfig.n_samples}; call again")
        tokens = self._checked(list(request.input_ids), "prompt 0")
        further: dict[str, Any] = {"extras": request.extras, "adapter": request.adapter}
        in_flight = InFlightRequest(self._request(tokens, request.gconfig, **further), on_chunk)
        await self._complete(in_flight, affinity=request.rid)
        return in_flight.response(request)

    def _request(
        self, ids: list[int], gconfig: GenerationHyperparameters, sample: int = 0, **further: Any
    ) -> SequenceRequest:
        number = next(self._ids)
        seed = mix(self.options.seed, number) if gconfig.seed is None else mix(gconfig.seed, sample)
        return SequenceRequest(request_id=number, input_ids=ids, gconfig=gconfig, seed=seed, **further)

    # -- rollouts ------------------------------------------------------------------------------------------------

    @property
    def rollout_options(self) -> CollectorOptions:
        """Options of rollout collection. Set them before the first rollout begins.

        Raises:
            ConfigError: the first rollout has begun.
        """
        return self._rollout_options

    @rollout_options.setter
    def rollout_options(self, options: CollectorOptions) -> None:
        if self._collector is not None:
            raise ConfigError("rollout_options: rollouts have begun; set them before the first rollout")
        self._rollout_options = options

    @property
    def collector(self) -> RolloutCollector:
        """The collector of this engine's rollouts, made on first use and closed with the engine."""
        self.group.check()
        if self._collector is None:
            self._collector = RolloutCollector(self, self.rollout_options)
        return self._collector

    def rollout_progress(self) -> str:
        """Return the progress of the rollout or evaluation under way, in words; "" without one."""
        progress = None if self._collector is None else self._collector.progress
        return "" if progress is None else str(progress)

    def rollout_batch(
        self,
        data: Sequence[Mapping[str, Any]],
        workflow: RolloutWorkflow,
        group_size: int = 1,
        timeout: float | None = None,
        first_place: int = 0,
    ) -> TensorDict:
        """Return one padded batch of a workflow's episodes on every item; see `RolloutCollector.rollout_batch`.

        Args:
            data: at least one item.
            workflow: runs the episodes.
            group_size: number of episodes per item.
            timeout: seconds; None sets no limit.
            first_place: position of the first item among the items of this policy version. Seeds depend on positions.
        """
        return self.collector.rollout_batch(data, workflow, group_size, timeout, first_place)

    def submit(self, data: Mapping[str, Any], workflow: RolloutWorkflow, group_size: int = 1) -> int:
        """Submit one item, to run when capacity allows; see `RolloutCollector.submit`.

        Args:
            data: the item.
            workflow: runs the episodes.
            group_size: number of episodes of the item.

        Returns:
            The id of the group.
        """
        return self.collector.submit(data, workflow, group_size)

    def wait(self, count: int, timeout: float | None = None) -> TensorDict:
        """Return the `count` oldest ready groups as one padded batch; see `RolloutCollector.wait`."""
        return self.collector.wait(count, timeout)

    def prepare_batch(
        self,
        loader: Iterable[Any],
        workflow: RolloutWorkflow,
        should_accept: Callable[[TensorDict], bool] | None = None,
        group_size: int = 1,
        timeout: float | None = None,
    ) -> TensorDict:
        """Return the next batch, while further items run ahead; see `RolloutCollector.prepare_batch`.

        Args:
            loader: yields items or lists of items, and is iterated again at its end.
            workflow: runs the episodes.
            should_accept: called with a group's padded TensorDict. Refused groups are replaced; None accepts all
                groups.
            group_size: number of episodes per item.
            timeout: seconds; None sets no limit.
        """
        return self.collector.prepare_batch(loader, workflow, should_accept, group_size, timeout)

    def _stop_serving(self) -> None:
        if self._collector is not None:
            self._collector.close()
            self._collector = None
        super()._stop_serving()

    def _version_changed(self) -> None:
        if self._collector is not None:
            self._collector.version_changed()
