"""Data that travels between the parts of rlite.

They are plain data: frozen, picklable, without torch. Token lists are Python lists of ints; log-probabilities are
natural logarithms.
"""

from __future__ import annotations

import math
import operator
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol

from rlite.errors import ConfigError, DataError, UnknownOptionError, did_you_mean

StopReason = Literal["stop", "length", "abort"]
Aggregation = Literal["token", "sequence", "constant"]
"""averages of a loss over tokens, see `rlite.algorithms.aggregate`"""
KLEstimator = Literal["k1", "abs", "k2", "k3"]
KLLossEstimator = Literal["abs", "k2", "k3"]
"""estimators of the KL at a token, see `rlite.algorithms.kl_penalty`"""
Schedule = Literal["constant", "linear", "cosine", "polynomial"]
"""schedules of the learning rate, see `rlite.algorithms.lr_factor`"""
Status = Literal[
    "trained",
    "evaluated",
    "skipped",
    "filtered",
    "refused",
    "too_old",
    "failed",
    "timed_out",
    "reward_killed",
    "aborted",
]
"""status of a rollout:

    trained        a batch that was trained on holds it
    evaluated      an evaluation counts it
    skipped        every update with one of its rows was skipped: not finite, or without a token to train on
    filtered       all rewards of its group were equal, and dynamic filtering replaced it
    refused        should_accept refused its group, the workflow returned None, or the trainer left it out
    too_old        exceeds max_head_offpolicyness
    failed         its episode, or one of its group, raised an error until no attempt was left
    timed_out      its episode did not end in time
    reward_killed  the reward's process was killed, died, or exceeded its limits
    aborted        it was under way when the run ended, or a program or the engine cancelled it
"""
PreferenceDivergence = Literal["reverse_kl", "forward_kl", "js"]
"""divergences from a reference, see `rlite.algorithms.preference_loss`"""
SMALLEST, LARGEST = 1e-6, 1e6
"""limits of temperatures above 0; also the smallest top_p"""
MAX_KEPT_IDS = 512
"""most token ids from which a request that asks for `kept_ids` samples, if it truncates"""
MAX_TOP_LOGPROBS = 20
"""most likely tokens that may be asked for at each place of a prompt: vLLM's default limit"""


_SAMPLING_ALIASES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "n": "n_samples"}
"""vLLM's names of parameters"""


@dataclass(frozen=True, kw_only=True)
class GenerationHyperparameters:
    """Sampling parameters of a request, in AReaL's names; `from_mapping` also takes vLLM's names."""

    n_samples: int = 1
    """completions per prompt"""
    max_new_tokens: int = 16384
    """a completion ends with `stop_reason="length"` here, or at the engine's `max_model_len` if that is nearer; the
    default is the same for every executor and every way to ask"""
    min_new_tokens: int = 0
    """stop tokens cannot be sampled before so many tokens"""
    greedy: bool = False
    """take the most likely token; log-probabilities are then those at temperature 1"""
    temperature: float = 1.0
    """divides the logits; 0 means greedy"""
    top_p: float = 1.0
    """keep the smallest set of tokens whose probability reaches this; 1 is off"""
    top_k: int = 0
    """keep this many most likely tokens; 0 and -1 are off"""
    stop: tuple[str, ...] = ()
    """a completion ends when its text contains one of these"""
    stop_token_ids: tuple[int, ...] = ()
    """a completion ends with one of these tokens, beside the model's own end tokens"""
    ignore_eos: bool = False
    """do not end at the model's own end tokens"""
    seed: int | None = None
    """makes this request reproducible; None draws from the engine's seed"""

    def __post_init__(self) -> None:
        for name, (as_plain, expected) in _FORMS.items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, as_plain(value))
            except (TypeError, ValueError, RuntimeError) as error:  # the last of tensors of several elements
                raise ConfigError(f"sampling parameter {name}={value!r}: expected {expected}") from error
        if self.temperature == 0:
            object.__setattr__(self, "greedy", True)
        rules = {
            "n_samples": (self.n_samples >= 1, "at least 1"),
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "min_new_tokens": (0 <= self.min_new_tokens <= self.max_new_tokens, "between 0 and max_new_tokens"),
            # others are 0 or infinite in float32, and what one request computes with it would end the others' too
            "temperature": (
                self.temperature == 0 or SMALLEST <= self.temperature <= LARGEST,
                f"0, or a number in [{SMALLEST:g}, {LARGEST:g}]",
            ),
            "top_p": (SMALLEST <= self.top_p <= 1, f"in [{SMALLEST:g}, 1]"),
            "top_k": (self.top_k >= -1, "at least 1, or 0 or -1 for off"),
            "stop": (all(isinstance(s, str) and s and _is_text(s) for s in self.stop), "non-empty strings"),
            "stop_token_ids": (all(0 <= token < 2**31 for token in self.stop_token_ids), "token ids"),
        }
        for name, (holds, expected) in rules.items():
            if not holds:
                raise ConfigError(f"sampling parameter {name}={getattr(self, name)!r}: expected {expected}")

    @property
    def is_truncating(self) -> bool:
        """True if top_p or top_k removes tokens from the distribution before a token is drawn."""
        return not self.greedy and (self.top_p < 1 or self.top_k > 0)

    def new(self, **changes: Any) -> GenerationHyperparameters:
        """Return a copy with changes."""
        return replace(self, **changes)

    @classmethod
    def names(cls) -> set[str]:
        """Return the names of all parameters, in both spellings."""
        return {field.name for field in fields(cls)} | set(_SAMPLING_ALIASES)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any] | GenerationHyperparameters | None) -> GenerationHyperparameters:
        """Return the parameters that a `sampling_params` mapping gives in AReaL's or vLLM's names.

        Raises:
            UnknownOptionError: neither library knows a name.
            ConfigError: a value is out of range, or a name is given in both spellings.
        """
        if isinstance(values, GenerationHyperparameters):
            return values
        given: dict[str, Any] = {}
        for key, value in (values or {}).items():
            if key not in cls.names():
                raise UnknownOptionError(f"unknown sampling parameter {key!r}; {did_you_mean(key, cls.names())}")
            name = _SAMPLING_ALIASES.get(key, key)
            if name in given:
                raise ConfigError(f"sampling parameter {name!r} is given twice, the second time as {key!r}")
            given[name] = value
        return cls(**given)


def _as_texts(value: Any) -> tuple[Any, ...]:
    if isinstance(value, str):
        return (value,) if value else ()
    return () if value is None else tuple(value)


def _as_ids(value: Any) -> tuple[int, ...]:
    return () if value is None else tuple(map(operator.index, value))


def _as_float(value: Any) -> float:
    if isinstance(value, str | bytes):
        raise TypeError("a text is no number")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _as_bool(value: Any) -> bool:
    if value not in (True, False):
        raise TypeError("neither true nor false")
    return bool(value)


_FORMS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "stop": (_as_texts, "non-empty strings"),
    "stop_token_ids": (_as_ids, "token ids"),
    **dict.fromkeys(("n_samples", "max_new_tokens", "min_new_tokens", "top_k"), (operator.index, "a whole number")),
    **dict.fromkeys(("temperature", "top_p"), (_as_float, "a number")),
    **dict.fromkeys(("greedy", "ignore_eos"), (_as_bool, "true or false")),
    "seed": (lambda value: None if value is None else operator.index(value), "a whole number or None"),
}
"""sampling parameter -> its form as Python's own value: others would fail only in the batch, for all its requests"""


def _is_text(value: str) -> bool:
    """Return whether a string has a form in UTF-8; halves of surrogate pairs have none."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def token_ids(value: Any, where: str) -> list[int]:
    """Return the token ids of one prompt as Python's integers.

    Args:
        value: a list, array or tensor of whole numbers, [L] or [1, L], or a mapping with such `input_ids`, which
            `apply_chat_template(tokenize=True)` returns.
        where: names the value in messages.

    Raises:
        DataError: the value is of another kind, is padded, or has several rows.
    """
    if isinstance(value, Mapping):
        if "input_ids" not in value:
            raise DataError(f"{where} has the keys {sorted(map(str, value))}: expected input_ids")
        mask = value.get("attention_mask")
        if mask is not None and not all(token_ids(mask, f"{where}'s attention_mask")):
            raise DataError(f"{where} is padded: expected a prompt without padding")
        value = value["input_ids"]
    if type(value) is list and set(map(type, value)) <= {int}:
        return value
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise DataError(f"{where} is {value!r:.80}: expected token ids")
    rows = [row for row in value if isinstance(row, Sequence) or len(getattr(row, "shape", ()))]
    if rows and (len(value) > 1 or isinstance(rows[0], str | bytes)):
        raise DataError(f"{where} holds {rows[0]!r:.80}: expected the token ids of one prompt, found {len(value)} rows")
    if rows:
        return token_ids(rows[0], where)
    try:
        ids = [operator.index(token) for token in value if not _is_bool(token)]
    except TypeError as error:
        wrong = next(token for token in value if not hasattr(token, "__index__"))
        raise DataError(f"{where} holds {wrong!r}: token ids are whole numbers") from error
    if len(ids) < len(value):
        raise DataError(f"{where} holds true or false: token ids are whole numbers")
    return ids


def _is_bool(value: Any) -> bool:
    """Return whether a value is a truth value of Python or NumPy."""
    return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")


@dataclass(frozen=True, kw_only=True)
class LLMRequest:
    """One request for one completion. `rid` is affinity, not identity: concurrent requests may share one.

    `input_ids` takes the forms that `token_ids` takes, and holds a list. Other values raise DataError.
    """

    input_ids: list[int]
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    metadata: dict[str, Any] = field(default_factory=dict)
    extras: tuple[str, ...] = ()
    """names of further columns that the response shall have, of those that the executor offers. `kept_ids`: for each
    token the ids among which top-p and top-k let it be drawn, at most `MAX_KEPT_IDS`; [] if nothing was removed"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_ids", token_ids(self.input_ids, "LLMRequest.input_ids"))


@dataclass(frozen=True, kw_only=True)
class LLMResponse:
    """One completion, token by token.

    `output_logprobs[i]` is log_softmax(logits / temperature) of token i under the unfiltered distribution
    (temperature 1 when greedy). If the request asked for `kept_ids`, it is over the kept ids of token i, if there are
    any. `output_versions[i]` is the policy version that made token i.
    """

    input_tokens: list[int]
    output_tokens: list[int]
    output_logprobs: list[float]
    output_versions: list[int]
    stop_reason: StopReason
    latency: float
    """seconds from submission to the last token"""
    ttft: float
    """seconds from submission to the first token"""
    sampling_logprobs: list[float] = field(default_factory=list)
    """log-probabilities under the distribution that was sampled from, after top-k and top-p"""
    metadata: dict[str, Any] = field(default_factory=dict)
    extras: dict[str, list[Any]] = field(default_factory=dict)
    """the columns that the request asked for, with an entry for each output token"""

    @property
    def input_len(self) -> int:
        """Number of prompt tokens."""
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        """Number of generated tokens."""
        return len(self.output_tokens)


@dataclass(frozen=True, kw_only=True)
class TokenChunk:
    """New tokens of one request, as a worker reports them. All lists have the same length (it may be 0).

    A request's life, as seen from its chunks:  chunk, chunk, ..., chunk with a finish_reason  (or `error`).
    """

    request_id: int
    version: int
    """policy version that made all tokens of this chunk"""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    finish_reason: StopReason | None = None
    error: str | None = None
    """why this request alone was refused, e.g. a prompt longer than max_model_len, or failed"""
    is_nonfinite: bool = False
    """the error is about NaN or infinity among the model's outputs"""
    extras: dict[str, list[Any]] = field(default_factory=dict)
    """the columns that the request asked for, with an entry for each token"""


@dataclass(frozen=True, kw_only=True)
class SequenceRequest:
    """One completion as an inference worker sees it: an `LLMRequest` for one sample, with its number and its seed."""

    request_id: int
    input_ids: list[int]
    gconfig: GenerationHyperparameters
    seed: int
    output_ids: list[int] = field(default_factory=list)
    """tokens already generated by a worker that was lost. Generation resumes after them, and only new tokens are
    reported; limits and stop strings count from the completion's beginning"""
    extras: tuple[str, ...] = ()
    """names of the columns that its chunks contain"""


@dataclass(frozen=True, kw_only=True)
class PromptLogprobs:
    """Log-probabilities of the tokens of one prompt, each but the first: log_softmax(logits) at temperature 1."""

    logprobs: list[float]
    top_ids: list[list[int]]
    """for each token, the most likely tokens at its place, the most likely first"""
    top_logprobs: list[list[float]]
    """log-probabilities of `top_ids`"""


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One of a prompt's completions, in vLLM's names."""

    index: int
    token_ids: list[int]
    text: str
    logprobs: list[float]
    sampling_logprobs: list[float]
    versions: list[int]
    finish_reason: StopReason
    stop_reason: str | int | None
    """the stop string, or the token of `stop_token_ids`, that ended the completion; None if something else did"""

    @property
    def cumulative_logprob(self) -> float:
        """Sum of `logprobs`."""
        return math.fsum(self.logprobs)


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A prompt with its completions, in vLLM's names."""

    request_id: str
    """unique within the engine"""
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[float | None] | None = None
    """log_softmax(logits) of each prompt token, None for the first; None if `sampling_params` did not ask for them"""
    finished: bool = True
    """every completion has ended, as always when `generate` returns"""

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.outputs[0].text


OnChunk = Callable[[TokenChunk], object]
"""called as tokens are made, in any thread"""


class AsyncInference(Protocol):
    """The interface of an inference engine that rollouts use.

    An engine may also have `context_length`, the most tokens of prompt and completion together: longer texts are then
    refused before they are tokenised whole. It may also have `extras`, the names of the columns that a request may ask
    for, `end_ids`, the model's own end tokens, and `seed`, from which requests without a seed get one that another
    attempt repeats.
    """

    async def agenerate(self, request: LLMRequest, on_chunk: OnChunk | None = None) -> LLMResponse:
        """Return the completion of one request; `on_chunk` is called as its tokens are made."""
        ...

    def stream(self, request: LLMRequest) -> AsyncIterator[TokenChunk]:
        """Return the tokens of one request as they are made; the last chunk has a finish_reason.

        Closing the iterator cancels the request.
        """
        ...

    def get_version(self) -> int:
        """Return the policy version: the number of weight updates."""
        ...

    def pause(self) -> None:
        """Hold generation; requests are kept."""
        ...

    def resume(self) -> None:
        """Go on with generation after `pause`."""
        ...
