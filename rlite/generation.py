"""Sampling parameters and outputs of `generate`, in AReaL's and vLLM's names. `rlite.types` has these names, too.

A value that would fail only in the batch, for all its requests, is refused when the request is made.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from rlite.errors import ConfigError, DataError, ParameterError, UnknownOptionError, did_you_mean

StopReason = Literal["stop", "length", "abort"]
SMALLEST, LARGEST = 1e-6, 1e6
"""limits of temperatures above 0; also the smallest top_p"""

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
                raise ParameterError(f"sampling parameter {name}={value!r}: expected {expected}", name) from error
        if self.temperature == 0:
            object.__setattr__(self, "greedy", True)
        is_warm = SMALLEST <= self.temperature <= LARGEST
        rules = {
            "n_samples": (self.n_samples >= 1, "at least 1"),
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "min_new_tokens": (0 <= self.min_new_tokens <= self.max_new_tokens, "between 0 and max_new_tokens"),
            # others are 0 or infinite in float32, and what one request computes with it would end the others' too
            "temperature": (self.temperature == 0 or is_warm, f"0, or a number in [{SMALLEST:g}, {LARGEST:g}]"),
            "top_p": (SMALLEST <= self.top_p <= 1, f"in [{SMALLEST:g}, 1]"),
            "top_k": (self.top_k >= -1, "at least 1, or 0 or -1 for off"),
            "stop": (all(isinstance(s, str) and s and _is_text(s) for s in self.stop), "non-empty strings"),
            "stop_token_ids": (all(0 <= token < 2**31 for token in self.stop_token_ids), "token ids"),
        }
        for name, (holds, expected) in rules.items():
            if not holds:
                raise ParameterError(f"sampling parameter {name}={getattr(self, name)!r}: expected {expected}", name)

    @functools.cached_property
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
    if value is None or isinstance(value, str):
        return (value,) if value else ()
    return tuple(value)


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
    if any(type(token).__name__ in ("bool", "bool_") for token in value):  # of Python or NumPy
        raise DataError(f"{where} holds true or false: token ids are whole numbers")
    try:
        return list(map(operator.index, value))
    except TypeError as error:
        wrong = next(token for token in value if not hasattr(token, "__index__"))
        raise DataError(f"{where} holds {wrong!r}: token ids are whole numbers") from error


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
