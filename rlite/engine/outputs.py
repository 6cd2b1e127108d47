"""Input and output of an inference engine in vLLM's names: parameters, conversations, completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlite.data.chat.masks import check_messages
from rlite.data.chat.stops import split_at_stop
from rlite.data.chat.template import check_template_options
from rlite.errors import ConfigError
from rlite.rollout.workflow import prompt_ids, prompt_text
from rlite.runtime.replicas.replica import InFlightRequest
from rlite.types import CompletionOutput, GenerationHyperparameters, RequestOutput

Prompts = str | Mapping[str, Any] | Sequence[str | Sequence[int] | Mapping[str, Any]]
"""texts, token ids or mappings with token ids; or one text or mapping"""
Sampling = Mapping[str, Any] | GenerationHyperparameters | None
"""sampling parameters in AReaL's or vLLM's names"""
Messages = str | Sequence[Mapping[str, Any]]
"""a conversation; a text is one message of the user"""


def sampling(given: Sampling) -> tuple[GenerationHyperparameters, bool]:
    """Return the parameters of the completions, and whether the prompts' log-probabilities are wanted."""
    if not isinstance(given, Mapping) or "prompt_logprobs" not in given:
        return GenerationHyperparameters.from_mapping(given), False
    rest = dict(given)
    wanted = rest.pop("prompt_logprobs")
    if wanted is not None and not isinstance(wanted, bool) and wanted != 0:
        raise ConfigError(f"sampling parameter prompt_logprobs={wanted!r}: expected true, false, or vLLM's 0 for true")
    return GenerationHyperparameters.from_mapping(rest), wanted is not None and wanted is not False


def conversation(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]
) -> tuple[list[int], str]:
    """Return the tokens and the text of a conversation, as the chat template renders it."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    check_messages(messages, "chat")
    for name in options.keys() & GenerationHyperparameters.names():
        raise ConfigError(f"chat({name}=...): a parameter of sampling; write chat(messages, {{{name!r}: ...}})")
    check_template_options(tokenizer, options, "chat")
    item = {"messages": messages}
    return prompt_ids(item, tokenizer, options), prompt_text(item, tokenizer, options)


def outputs(
    prompts: Sequence[Any],
    groups: Sequence[Sequence[InFlightRequest]],
    tokenizer: PreTrainedTokenizerBase,
    logprobs: Sequence[Sequence[float]] | None,
) -> list[RequestOutput]:
    """Return each prompt with its completions."""
    return [
        RequestOutput(
            request_id=str(siblings[0].request.request_id),
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=siblings[0].request.input_ids,
            outputs=[completion(index, request, tokenizer) for index, request in enumerate(siblings)],
            prompt_logprobs=None if logprobs is None else [None, *logprobs[number]],
        )
        for number, (prompt, siblings) in enumerate(zip(prompts, groups, strict=True))
    ]


def completion(index: int, ended: InFlightRequest, tokenizer: PreTrainedTokenizerBase) -> CompletionOutput:
    """Return a completion of `generate`. Its text ends before a stop string or an end token."""
    stops, is_stopped = ended.request.gconfig.stop, ended.finish_reason == "stop"
    text, rest = split_at_stop(tokenizer, ended.token_ids, stops, num_end=int(is_stopped))
    names = ("token_ids", "logprobs", "sampling_logprobs", "versions", "finish_reason")
    same = {name: getattr(ended, name) for name in names}
    return CompletionOutput(index=index, text=text, stop_reason=_stop_reason(ended, rest), **same)


def _stop_reason(ended: InFlightRequest, rest: str) -> str | int | None:
    """Return the stop string or stop token that ended a completion, None if something else did.

    `rest`: the text of the completion from a stop string on; "" without one.
    """
    if ended.finish_reason != "stop":
        return None
    gconfig = ended.request.gconfig
    if rest:
        return next(stop for stop in gconfig.stop if rest.startswith(stop))
    last = ended.token_ids[-1]
    return last if last in gconfig.stop_token_ids else None
