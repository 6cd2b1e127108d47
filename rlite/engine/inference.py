"""The inference engine: prompts in, completions out, rollouts on top."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from rlite.backends.replicas.elastic import ElasticReplicas
from rlite.backends.replicas.router import Policy, least_outstanding
from rlite.data.chat.masks import check_messages
from rlite.data.chat.prompt_tokens import raw_prompts
from rlite.data.chat.template import check_template_options
from rlite.engine.inference_executor import InFlightRequest
from rlite.engine.outputs import completion, response, score_prompts
from rlite.errors import CallTimeout, ConfigError, DataError
from rlite.nn.pretrained import load_tokenizer
from rlite.observability import trace
from rlite.rollout.collector.collector import RolloutCollector
from rlite.rollout.collector.options import CollectorOptions
from rlite.rollout.episode import mix
from rlite.rollout.workflow import RolloutWorkflow, prompt_ids, prompt_text
from rlite.runtime.futures import result_of
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
from rlite.wording import counted

logger = logging.getLogger(__name__)


class RliteInferenceEngine(ElasticReplicas):
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
        super().__init__(path, executor, max_replacements)
        self._routing = routing
        self._has_noted_truncation = False
        self._ids = itertools.count()
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._rollout_options = CollectorOptions()
        self._collector: RolloutCollector | None = None

    def __repr__(self) -> str:
        if not self.is_built:
            return f"{type(self).__name__}({self.path}, executor {self.executor_name}, not built)"
        replicas = f"{counted(len(self.executors), 'replica')} of {self.executors[0].size}"
        return f"{type(self).__name__}({self.path}, {replicas}, {self._where()}, version {self.get_version()})"

    # -- generating ----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: str | Mapping[str, Any] | Sequence[str | Sequence[int] | Mapping[str, Any]],
        sampling_params: Mapping[str, Any] | GenerationHyperparameters | None = None,
        timeout: float | None = None,
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
        sampling_params, has_prompt_logprobs = _without_prompt_logprobs(sampling_params)
        gconfig = GenerationHyperparameters.from_mapping(sampling_params)
        if isinstance(prompts, str | Mapping):
            prompts = [prompts]
        if len(prompts) == 0:
            raise DataError("generate: the list of prompts is empty; expected at least one prompt")
        if has_prompt_logprobs:
            self._need_prompt_logprobs()
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
        tokens = [self._tokens(prompt, index) for index, prompt in enumerate(prompts)]
        self._check_ready("generate")
        samples = range(gconfig.n_samples)
        groups = [[InFlightRequest(self._request(ids, gconfig, sample)) for sample in samples] for ids in tokens]
        with trace.span("generate", num_prompts=len(prompts)):
            self._router.route(groups)
            self._wait(list(itertools.chain(*groups)), self.group.call_timeout if timeout is None else timeout)
        for request in itertools.chain(*groups):
            self._note_truncation(request)
        of_prompts: list[Any] = [None] * len(tokens)
        if has_prompt_logprobs:
            of_prompts = [[None, *logprobs] for logprobs in self.prompt_logprobs(tokens)]
        return [
            RequestOutput(
                request_id=str(siblings[0].request.request_id),
                prompt=text,
                prompt_token_ids=ids,
                outputs=[completion(index, request, self.tokenizer) for index, request in enumerate(siblings)],
                prompt_logprobs=logprobs,
            )
            for text, ids, siblings, logprobs in zip(texts, tokens, groups, of_prompts, strict=True)
        ]

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        sampling_params: Mapping[str, Any] | GenerationHyperparameters | None = None,
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
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        check_messages(messages, "chat")
        for name in chat_template_options.keys() & GenerationHyperparameters.names():
            raise ConfigError(f"chat({name}=...): a parameter of sampling; write chat(messages, {{{name!r}: ...}})")
        check_template_options(self.tokenizer, chat_template_options, "chat")
        item = {"messages": messages}
        tokens = prompt_ids(item, self.tokenizer, chat_template_options)
        (output,) = self.generate([tokens], sampling_params, timeout)
        return replace(output, prompt=prompt_text(item, self.tokenizer, chat_template_options))

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
        self._need(
            self.extras.issuperset(request.extras),
            f"extras={request.extras}",
            f"it has {sorted(self.extras) or 'none'}",
        )
        self._check_ready("agenerate", may_wait=True)
        tokens = self._tokens(request.input_ids, 0)
        in_flight = InFlightRequest(self._request(tokens, request.gconfig, extras=request.extras), on_chunk)
        with trace.task("generate", engine=self.name, prompt_tokens=len(request.input_ids)):
            self._router.route([[in_flight]], affinity=request.rid)
            try:
                await result_of(in_flight.done)
            except asyncio.CancelledError:
                self._router.cancel([in_flight])
                raise
        self._note_truncation(in_flight)
        return response(request, in_flight)

    async def stream(self, request: LLMRequest) -> AsyncIterator[TokenChunk]:
        """Yield the tokens of one request as they are generated; the last chunk has a finish_reason."""
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[TokenChunk | None] = asyncio.Queue()
        task = asyncio.ensure_future(
            self.agenerate(request, lambda chunk: loop.call_soon_threadsafe(chunks.put_nowait, chunk))
        )
        task.add_done_callback(lambda _: chunks.put_nowait(None))
        try:
            while (chunk := await chunks.get()) is not None:
                if chunk.error is None:
                    yield chunk
            task.result()
        finally:
            task.cancel()

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
        return self._score("score", prompts, num_top)

    async def ascore(self, prompts: Sequence[str | Sequence[int]], num_top: int = 1) -> list[PromptLogprobs]:
        """Do what `score` does, beside the event loop. While the engine is paused, the call waits.

        Args:
            prompts: as for `score`.
            num_top: as for `score`.

        Returns:
            One entry per prompt, in the order of the prompts.
        """
        return await asyncio.to_thread(self._score, "ascore", prompts, num_top, may_wait=True)

    def _score(
        self, what: str, prompts: Sequence[str | Sequence[int]], num_top: int, may_wait: bool = False
    ) -> list[PromptLogprobs]:
        self._need_prompt_logprobs()
        self._check_ready(what, may_wait)
        tokens = [self._tokens(prompt, index) for index, prompt in enumerate(prompts)]
        return score_prompts(self._serving(), tokens, num_top, self.context_length - 1)

    def _need_prompt_logprobs(self) -> None:
        self._need(self.capabilities.has_prompt_logprobs, "prompt_logprobs", "a train engine's `forward` computes them")

    @property
    def seed(self) -> int:
        """Seed of requests without a seed of their own."""
        return self.options.seed

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The checkpoint's tokenizer."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.path, reads_text=False)  # a model of tokens alone is served, too
        return self._tokenizer

    def _tokens(self, prompt: Any, index: int) -> list[int]:
        if isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
            prompt = prompt["prompt_token_ids"]
        if isinstance(prompt, str):
            ids = raw_prompts(self.tokenizer, [prompt])[0]
        else:
            ids = list(token_ids(prompt, f"prompt {index}"))
        if not ids:
            raise DataError(f"prompt {index} is empty: expected at least one token")
        wrong = [token for token in ids if not 0 <= token < self._config.vocab_size]
        if wrong:
            raise DataError(
                f"prompt {index} holds token id {wrong[0]}; the model's vocabulary has {self._config.vocab_size} tokens"
            )
        return ids

    def _request(
        self, ids: list[int], gconfig: GenerationHyperparameters, sample: int = 0, extras: tuple[str, ...] = ()
    ) -> SequenceRequest:
        number = next(self._ids)
        seed = mix(self.options.seed, number) if gconfig.seed is None else mix(gconfig.seed, sample)
        return SequenceRequest(request_id=number, input_ids=ids, gconfig=gconfig, seed=seed, extras=extras)

    def _wait(self, requests: Sequence[InFlightRequest], timeout: float) -> None:
        """Wait until all requests have ended. On an error or a time-out, cancel the requests that have not.

        Raises:
            CallTimeout: a request did not end within `timeout` seconds.
        """
        done, late = wait([request.done for request in requests], timeout=timeout, return_when=FIRST_EXCEPTION)
        if late:
            self._router.cancel([request for request in requests if request.done in late])
        for request in requests:
            if request.done in done:
                request.done.result()
        if late:
            busy = tuple(self.group.describe(each.executor.ranks[0]) for each in self._replicas if each.num_in_flight)
            raise CallTimeout(
                f"generate: {len(late)} of {len(requests)} completions were not done within {timeout:g} s, on "
                f"{'; '.join(busy)}. Give it more time (timeout=) or ask for fewer tokens (max_new_tokens).",
                busy,
            )

    def _note_truncation(self, in_flight: InFlightRequest) -> None:
        """Warn once if a completion ended at the default context length."""
        asked, made = in_flight.request.gconfig.max_new_tokens, len(in_flight.token_ids)
        is_known = self._has_noted_truncation or vars(self.options).get("max_model_len") is not None
        if is_known or in_flight.finish_reason != "length" or made >= asked:
            return
        self._has_noted_truncation = True
        logger.warning(
            "%s: a completion ended after %d of %d new tokens, at the default context length of %d tokens; "
            "build(max_model_len=...) sets another one, up to the model's own limit",
            *(self.name, made, asked, len(in_flight.request.input_ids) + made),
        )

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


def _without_prompt_logprobs(
    sampling_params: Mapping[str, Any] | GenerationHyperparameters | None,
) -> tuple[Mapping[str, Any] | GenerationHyperparameters | None, bool]:
    """Return the parameters of the completions, and whether the prompts' log-probabilities are wanted.

    Raises:
        ConfigError: log-probabilities of other tokens than the prompt's are wanted.
    """
    if not isinstance(sampling_params, Mapping) or "prompt_logprobs" not in sampling_params:
        return sampling_params, False
    rest = dict(sampling_params)
    wanted = rest.pop("prompt_logprobs")
    if wanted is None or isinstance(wanted, bool):
        return rest, bool(wanted)
    if wanted != 0:
        raise ConfigError(f"sampling parameter prompt_logprobs={wanted!r}: expected true, false, or vLLM's 0 for true")
    return rest, True
