"""The texts of an inference engine: prompts of every form, conversations, completions, and scores of prompts."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlite.data.prompts import raw_prompts
from rlite.engine.outputs import Messages, Prompts, Sampling, conversation, outputs, sampling
from rlite.engine.registry import find_backend
from rlite.errors import DataError
from rlite.nn.pretrained import end_ids, load_config, load_tokenizer, local_checkpoint
from rlite.runtime.replicas.adapter_serving import AdapterServing
from rlite.runtime.replicas.replica import InferenceBackend, InFlightRequest
from rlite.runtime.replicas.router import Policy
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


class TextEngine(AdapterServing):
    """An engine that completes and scores texts and tokens, in whole calls. `RliteInferenceEngine` adds rollouts.

    Args:
        path: folder (or hub name) of a Hugging Face checkpoint.
        executor: name of the executor.
        max_replacements: most replacements of lost replicas in an hour.
        routing: chooses the replica of a request.
    """

    def __init__(self, path: str | Path, executor: str, max_replacements: int, routing: Policy) -> None:
        backend, folder = find_backend("inference", executor, InferenceBackend), str(local_checkpoint(path))
        super().__init__(backend, executor, folder, load_config(folder).get_text_config(), max_replacements, routing)

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Sampling = None,
        timeout: float | None = None,
        adapter: str | Sequence[str | None] | None = None,
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
            adapter: name of the adapter of all prompts, or one name for each prompt; None is the policy.

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
        samples, names = range(gconfig.n_samples), self._adapter_of_each(adapter, len(tokens))
        groups = [
            [InFlightRequest(self._request(ids, gconfig, sample, adapter=name)) for sample in samples]
            for ids, name in zip(tokens, names, strict=True)
        ]
        self._complete_all(groups, timeout)
        logprobs = self._prompt_logprobs(tokens, names) if has_prompt_logprobs else None
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

    async def stream(self, request: LLMRequest) -> AsyncIterator[TokenChunk]:
        """Return the tokens of one request as they are generated; the last chunk has a finish_reason.

        Yields:
            Chunks of tokens.
        """
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[TokenChunk | None] = asyncio.Queue()
        completing = self.agenerate(request, lambda chunk: loop.call_soon_threadsafe(chunks.put_nowait, chunk))
        task = asyncio.ensure_future(completing)
        task.add_done_callback(lambda _: chunks.put_nowait(None))
        try:
            while (chunk := await chunks.get()) is not None:
                if chunk.error is None:
                    yield chunk
            task.result()
        finally:
            task.cancel()

    def _adapter_of_each(self, adapter: str | Sequence[str | None] | None, num: int) -> list[str | None]:
        names = [adapter] * num if adapter is None or isinstance(adapter, str) else [*adapter]
        if len(names) != num:
            raise DataError(f"generate: {len(names)} adapters for {num} prompts; give one name, or one for each prompt")
        for name in names:
            self._check_adapter("generate", name)
        return names

    def _prompt_logprobs(self, tokens: Sequence[list[int]], names: Sequence[str | None]) -> list[list[float]]:
        found: dict[int, list[float]] = {}
        for name in dict.fromkeys(names):
            rows = [row for row, own in enumerate(names) if own == name]
            found |= zip(rows, self.prompt_logprobs([tokens[row] for row in rows], name), strict=True)
        return [found[row] for row in range(len(tokens))]

    def prompt_logprobs(self, prompts: Sequence[str | Sequence[int]], adapter: str | None = None) -> list[list[float]]:
        """Return log_softmax(logits) of every token but the first of each prompt, in the order of the prompts.

        Args:
            prompts: as for `score`.
            adapter: as for `score`.

        Raises:
            ConfigError: the executor cannot compute prompt log-probabilities.
        """
        return [scored.logprobs for scored in self.score(prompts, num_top=0, adapter=adapter)]

    def score(
        self, prompts: Sequence[str | Sequence[int]], num_top: int = 1, adapter: str | None = None
    ) -> list[PromptLogprobs]:
        """Return the log-probabilities of each prompt's tokens, and the most likely tokens at their places.

        Args:
            prompts: texts or token ids, at most `max_model_len - 1` tokens each.
            num_top: number of most likely tokens, from 0 to `MAX_TOP_LOGPROBS`.
            adapter: name of the adapter of all prompts; None is the policy.

        Returns:
            One entry per prompt, in the order of the prompts.

        Raises:
            ConfigError: the executor cannot compute prompt log-probabilities, or `num_top` is out of range.
            DataError: a prompt is empty, too long, or holds an unknown token.
            ResidencyError: weights or KV cache are not on the device, or the engine is paused.
            WorkerDied: a replica was lost meanwhile.
        """
        return self._score("score", self._all_tokens(prompts), num_top, adapter=adapter)

    async def ascore(
        self, prompts: Sequence[str | Sequence[int]], num_top: int = 1, adapter: str | None = None
    ) -> list[PromptLogprobs]:
        """Do what `score` does, beside the event loop. While the engine is paused, the call waits.

        Args:
            prompts: as for `score`.
            num_top: as for `score`.
            adapter: as for `score`.

        Returns:
            One entry per prompt, in the order of the prompts.
        """
        tokens = self._all_tokens(prompts)
        return await asyncio.to_thread(self._score, "ascore", tokens, num_top, may_wait=True, adapter=adapter)

    def _all_tokens(self, prompts: Sequence[Any]) -> list[list[int]]:
        return [self._tokens(prompt, index) for index, prompt in enumerate(prompts)]

    def _tokens(self, prompt: Any, index: int) -> list[int]:
        """Return the token ids of a prompt, which the model's vocabulary has."""
        if isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
            prompt = prompt["prompt_token_ids"]
        where, is_text = f"prompt {index}", isinstance(prompt, str)
        return self._checked(raw_prompts(self.tokenizer, [prompt])[0] if is_text else token_ids(prompt, where), where)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The checkpoint's tokenizer."""
        return load_tokenizer(self.path, reads_text=False)  # a model of tokens alone is served, too

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Return the model's own end tokens; generation_config.json takes precedence over the model's config."""
        return frozenset(end_ids(self.path, self._config))

    def load(self, path: str | Path | None = None) -> None:
        """Read weights from a checkpoint of the same model; without a path, from the engine's own: a new version."""
        self._load(None if path is None else str(local_checkpoint(path)))

    @abstractmethod
    async def agenerate(self, request: LLMRequest, on_chunk: OnChunk | None = None) -> LLMResponse:
        """Complete one request."""

    @abstractmethod
    def _request(
        self, ids: list[int], gconfig: GenerationHyperparameters, sample: int, **further: Any
    ) -> SequenceRequest:
        """Return a request of a worker; `further` are fields of it."""
