"""The inference engine: prompts in, completions out, rollouts on top.

    generate / agenerate ──> router ──> replica ──> the executor's workers
              ^                           │
              └── tokens with log-probabilities and versions, as they are made

Replicas, routing, replacement, residency and weights are the work of `ServingEngine` and its `ReplicaSet`
(`runtime/replicas`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from rlite.data.chat.prompt_tokens import raw_prompts
from rlite.engine.outputs import Messages, Prompts, Sampling, conversation, outputs, sampling, streamed
from rlite.engine.registry import find_backend
from rlite.errors import ConfigError
from rlite.nn.pretrained import end_ids, load_config, load_tokenizer, local_checkpoint
from rlite.rollout.collector.collector import RolloutCollector
from rlite.rollout.collector.options import CollectorOptions
from rlite.rollout.episode import mix
from rlite.rollout.workflow import RolloutWorkflow
from rlite.runtime.replicas.replica import InferenceBackend, InFlightRequest
from rlite.runtime.replicas.router import Policy, least_outstanding
from rlite.runtime.replicas.serving import ServingEngine
from rlite.types import (
    GenerationHyperparameters,
    LLMRequest,
    LLMResponse,
    OnChunk,
    PromptLogprobs,
    RequestOutput,
    SequenceRequest,
    TokenChunk,
    token_ids,
)


class RliteInferenceEngine(ServingEngine):
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
        backend, folder = find_backend("inference", executor, InferenceBackend), str(local_checkpoint(path))
        super().__init__(backend, executor, folder, load_config(folder).get_text_config(), max_replacements, routing)
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._rollout_options = CollectorOptions()
        self._collector: RolloutCollector | None = None

    # -- generating ----------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Prompts, sampling_params: Sampling = None, timeout: float | None = None
    ) -> list[RequestOutput]:
        """Complete every prompt. A text is completed as it is: `chat` applies the chat template.

        Args:
            prompts: texts, token ids (lists, arrays or tensors), or mappings with `prompt_token_ids` or `input_ids`, as
                `apply_chat_template(tokenize=True)` returns; or one text or mapping. Special tokens that the tokenizer
                puts before every text are added once.
            sampling_params: parameters in AReaL's or vLLM's names, the same for all prompts. Without `max_new_tokens` a
                completion may take 16,384 tokens, or as many as `max_model_len` leaves, regardless of the executor's
                own default. The default temperature is 1. `prompt_logprobs=True` adds the log-probabilities of the
                prompts.
            timeout: seconds for the whole call.

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            DataError: a prompt cannot be used. The worker refuses a prompt that is longer than `max_model_len` or
                overflows the model's dtype; the other prompts are then cancelled.
            ConfigError: a sampling parameter is out of range.
            UnknownOptionError: a sampling parameter is unknown.
            ResidencyError: weights or KV cache are not on the device, or the engine is paused.
            CallTimeout: a completion did not end in time.
            WorkerDied: no replica is left.
        """
        gconfig, has_prompt_logprobs = sampling(sampling_params)
        self._need_prompt_logprobs(has_prompt_logprobs)
        prompts = [prompts] if isinstance(prompts, str | Mapping) else prompts
        tokens = self._all_tokens(prompts)
        samples = range(gconfig.n_samples)
        groups = [[InFlightRequest(self._request(ids, gconfig, sample)) for sample in samples] for ids in tokens]
        self._complete_all(groups, timeout)
        logprobs = self.prompt_logprobs(tokens) if has_prompt_logprobs else None
        return outputs(prompts, groups, self.tokenizer, logprobs)

    def chat(
        self,
        messages: Messages,
        sampling_params: Sampling = None,
        timeout: float | None = None,
        **chat_template_options: Any,
    ) -> RequestOutput:
        """Answer a conversation, through the chat template of the checkpoint's tokenizer.

        Args:
            messages: `[{"role": "user", "content": "..."}, ...]`, or a text, which is one message of the user.
            sampling_params: as for `generate`.
            timeout: seconds for the whole call.
            **chat_template_options: further keyword arguments for `apply_chat_template`, such as `enable_thinking`.

        Returns:
            The output of `generate`, whose `text` is the answer. `prompt` is the conversation as the template renders
            it.

        Raises:
            DataError: the messages have another form, or the template refuses them.
            ConfigError: an option is one of sampling, or the template does not read it.
        """
        tokens, text = conversation(messages, self.tokenizer, chat_template_options)
        (answer,) = self.generate([tokens], sampling_params, timeout)
        return replace(answer, prompt=text)

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
        tokens = self._tokens(request.input_ids, 0)
        in_flight = InFlightRequest(self._request(tokens, request.gconfig, extras=request.extras), on_chunk)
        await self._complete(in_flight, affinity=request.rid)
        return in_flight.response(request)

    def stream(self, request: LLMRequest) -> AsyncIterator[TokenChunk]:
        """Return the tokens of one request as they are generated; the last chunk has a finish_reason."""
        return streamed(self.agenerate, request)

    def prompt_logprobs(self, prompts: Sequence[str | Sequence[int]]) -> list[list[float]]:
        """Return log_softmax(logits) of every token but the first of each prompt, in the order of the prompts.

        Raises:
            ConfigError: the executor cannot compute prompt log-probabilities.
        """
        return [scored.logprobs for scored in self.score(prompts, num_top=0)]

    def score(self, prompts: Sequence[str | Sequence[int]], num_top: int = 1) -> list[PromptLogprobs]:
        """Return the log-probabilities of each prompt's tokens, and the most likely tokens at their places.

        Args:
            prompts: texts or token ids, at most `max_model_len - 1` tokens each.
            num_top: number of most likely tokens, from 0 to `MAX_TOP_LOGPROBS`.

        Returns:
            One entry per prompt, in the order of the prompts.

        Raises:
            ConfigError: the executor cannot compute prompt log-probabilities, or `num_top` is out of range.
            DataError: a prompt is empty, too long, or holds an unknown token.
            ResidencyError: weights or KV cache are not on the device, or the engine is paused.
            WorkerDied: a replica was lost meanwhile.
        """
        return self._score("score", self._all_tokens(prompts), num_top)

    async def ascore(self, prompts: Sequence[str | Sequence[int]], num_top: int = 1) -> list[PromptLogprobs]:
        """Do what `score` does, beside the event loop. While the engine is paused, the call waits.

        Args:
            prompts: as for `score`.
            num_top: as for `score`.

        Returns:
            One entry per prompt, in the order of the prompts.
        """
        return await asyncio.to_thread(self._score, "ascore", self._all_tokens(prompts), num_top, may_wait=True)

    def _all_tokens(self, prompts: Sequence[Any]) -> list[list[int]]:
        return [self._tokens(prompt, index) for index, prompt in enumerate(prompts)]

    def _tokens(self, prompt: Any, index: int) -> list[int]:
        """Return the token ids of a prompt, which the model's vocabulary has."""
        if isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
            prompt = prompt["prompt_token_ids"]
        where, is_text = f"prompt {index}", isinstance(prompt, str)
        return self._checked(raw_prompts(self.tokenizer, [prompt])[0] if is_text else token_ids(prompt, where), where)

    def _request(
        self, ids: list[int], gconfig: GenerationHyperparameters, sample: int = 0, extras: tuple[str, ...] = ()
    ) -> SequenceRequest:
        number = next(self._ids)
        seed = mix(self.options.seed, number) if gconfig.seed is None else mix(gconfig.seed, sample)
        return SequenceRequest(request_id=number, input_ids=ids, gconfig=gconfig, seed=seed, extras=extras)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The checkpoint's tokenizer."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.path, reads_text=False)  # a model of tokens alone is served, too
        return self._tokenizer

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Return the model's own end tokens; generation_config.json takes precedence over the model's config."""
        return frozenset(end_ids(self.path, self._config))

    def load(self, path: str | Path | None = None) -> None:
        """Read weights from a checkpoint of the same model; without a path, from the engine's own: a new version."""
        self._load(None if path is None else str(local_checkpoint(path)))

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
            raise ConfigError(
                "rollout_options: rollouts have begun with other options; set them before the first rollout"
            )
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
