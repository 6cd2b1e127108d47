"""Prompts as tokens: the tokens of an earlier turn unchanged, and the tokens of the text that is new.

A chat template renders a whole conversation. Suppose a request continues an answer as it was returned, and the template
renders everything up to that answer as the model has read and written it. Then the prompt is the recorded tokens and
the tokens of the rest. If the template rewrites history (it drops earlier thoughts, say), the whole text is tokenised.

"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rlite.data.chat.forms import Message
from rlite.data.chat.stops import text_after, tokens_after
from rlite.data.chat.template import OPTIONAL, ChatTemplate, Tokenizer
from rlite.data.prompts import bounded_tokens, raw_prompts
from rlite.errors import DataError
from rlite.services.endpoint.recording import Turn
from rlite.services.endpoint.requests import UNSUPPORTED, ApiError, ModelRequest


class Prompt(NamedTuple):
    """Input of one generation."""

    token_ids: list[int]
    text: str
    parent: Turn | None
    """the turn that the prompt continues"""


class ChatPrompts:
    """Renders and tokenises prompts for one tokenizer.

    `limit`: tokens that fit into the model's context; None does not bound texts.
    """

    def __init__(
        self, tokenizer: Tokenizer, chat_template_options: Mapping[str, Any] | None = None, limit: int | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self._limit = limit
        self._template = ChatTemplate(tokenizer, chat_template_options)

    def of(self, request: ModelRequest, turns: Sequence[Turn]) -> list[Prompt]:
        """Return the prompts of a request. A conversation is one prompt. Errors are those of `chat`."""
        if request.messages is not None:
            return [self.chat(request.messages, request.tools, turns)]
        # an echoed text is scored with the tokens of the text, not with the tokens that an earlier turn sampled, and
        # prompts of a list are not searched for earlier turns: that would take prompts times turns
        is_continuing = len(request.prompts) == 1 and not request.is_echo
        return [self.text(prompt, turns if is_continuing else ()) for prompt in request.prompts]

    def chat(self, messages: Sequence[Message], tools: Any, turns: Sequence[Turn]) -> Prompt:
        """Return the prompt for the answer to a conversation.

        `tools`: JSON schemas, or None. `turns`: the recorded turns. The prompt continues the longest one that the
        conversation begins with.
        """
        text = self._template.render(messages, tools=tools, add_generation_prompt=True)
        _check_text(text, "messages")
        optional = (*OPTIONAL, "'content'")  # a client may send any history; the model reads what the template shows
        self._template.check(messages, text, optional=optional, tools=tools, add_generation_prompt=True)
        for turn in _continued(messages, tools, turns):
            if (rest := text_after(self._template, turn, messages, text)) is None:
                continue
            tokens, has_same_end = self._after(turn, rest)
            if has_same_end:
                return Prompt(turn.sequence + tokens, text, turn)
        return Prompt(bounded_tokens(self.tokenizer, text, self._limit), text, None)

    def text(self, prompt: str | list[int], turns: Sequence[Turn]) -> Prompt:
        """Return a prompt without a template. It continues a turn if it begins with its text or its tokens."""
        raw = [turn for turn in reversed(turns) if turn.messages is None and not turn.is_aborted]
        if isinstance(prompt, str):
            _check_text(prompt, "prompt")
            begun = [turn for turn in raw if _begins_with(prompt, turn)]
            if longest := max(begun, key=lambda turn: len(turn.prompt_text) + len(turn.text), default=None):
                said = len(longest.prompt_text) + len(longest.text)
                rest, _ = self._after(longest, prompt[said:])
                return Prompt(longest.sequence + rest, prompt, longest)
            return Prompt(raw_prompts(self.tokenizer, [prompt], self._limit)[0], prompt, None)
        begun = [turn for turn in raw if prompt[: len(turn.sequence)] == turn.sequence]
        return Prompt(prompt, "", max(begun, key=lambda turn: len(turn.sequence), default=None))

    def _after(self, turn: Turn, rest: str) -> tuple[list[int], bool]:
        """Return the tokens of text after an answer that the model has not written, and whether both end it alike."""
        rest = rest.removeprefix(turn.stop_text)  # the answer as it was returned lacks it, and its tokens have it
        has_end = turn.messages is not None and not turn.stop_text
        said, reason = turn.output_ids, turn.finish_reason
        return tokens_after(self.tokenizer, rest, said, reason, self._limit, turn.end_ids, has_end)


def _begins_with(prompt: str, turn: Turn) -> bool:
    """Return whether a prompt is a turn's text, with the stop string that ended it, and more."""
    whole = turn.prompt_text + turn.text + turn.stop_text
    return bool(turn.prompt_text) and len(prompt) > len(whole) and prompt.startswith(whole)


def _check_text(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{what}: half of a surrogate pair, {error.object[error.start]!r}, is no text", what) from error


def _continued(messages: Sequence[Message], tools: Any, turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns whose conversation and answer `messages` begins with, the longest first."""

    def is_continued(turn: Turn) -> bool:
        if turn.messages is None or turn.answer is None or turn.is_aborted or turn.tools != tools:
            return False
        *before, said = messages[: len(turn.messages) + 1]
        return before == [*turn.messages] and _unspaced(said) == _unspaced(turn.answer)

    return sorted(filter(is_continued, reversed(turns)), key=lambda turn: -len(turn.messages or ()))


def _unspaced(message: Message) -> Message:
    """Return a message without the white space of its content: frameworks strip it or move it."""
    return {**message, "content": message["content"].split()}


MAX_SCORED_TOKENS = 1 << 17
"""largest number of scored tokens in a request: prompts and longest answers of all choices"""
SLICE_TOKENS = 1 << 14
"""scored at a time: between two slices, a request whose client has left ends"""


def check_scores(request: ModelRequest, can_score: bool) -> None:
    """Check that the engine computes the log-probabilities that a request wants."""
    if request.needs_scores and not can_score:
        message = "logprobs: this engine has no log-probabilities of prompts, nor the most likely tokens"
        raise ApiError(message, param="logprobs", code=UNSUPPORTED)
    gconfig = request.gconfig
    if request.needs_scores and request.is_generating and not gconfig.greedy and gconfig.temperature != 1:
        message = f"logprobs with echo, or above 0, at temperature {gconfig.temperature:g}; supported: 0 and 1"
        raise ApiError(message, param="temperature", code=UNSUPPORTED)


def check_num_scored(request: ModelRequest, lengths: Sequence[int], limit: int | None) -> None:
    """Check that a request does not want more scores than one request may.

    `limit`: tokens of the model's context, None if unknown.
    """
    if not request.needs_scores:
        return
    if not request.is_generating and limit is not None and (longest := max(lengths)) >= limit:
        message = f"the prompt has {longest} tokens; at most {limit - 1} are scored"
        raise ApiError(message, param="prompt", code="context_length_exceeded")
    num_new = request.gconfig.max_new_tokens if request.is_generating else 0
    num_scored = request.num_choices * sum(min(num + num_new, limit or num + num_new) for num in lengths)
    if num_scored > MAX_SCORED_TOKENS:
        message = (
            f"logprobs with echo, or above 0: {request.num_choices * len(lengths)} choices may have {num_scored} "
            f"tokens of prompt and answer; at most {MAX_SCORED_TOKENS} are scored per request: "
            "send fewer prompts, or set n or max_tokens lower"
        )
        raise ApiError(message, param="logprobs", code="invalid_value")


def slices(prompts: Sequence[list[int]]) -> Iterator[list[list[int]]]:
    """Yield the prompts in their order, in lists of at most `SLICE_TOKENS` tokens; a longer prompt is alone."""
    part: list[list[int]] = []
    for ids in prompts:
        if part and sum(map(len, part)) + len(ids) > SLICE_TOKENS:
            yield part
            part = []
        part.append(ids)
    yield part
