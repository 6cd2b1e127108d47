"""Data that travels between the parts of rlite.

They are plain data: frozen, picklable, without torch. Token lists are Python lists of ints; log-probabilities are
natural logarithms.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rlite.generation import CompletionOutput as CompletionOutput
from rlite.generation import GenerationHyperparameters as GenerationHyperparameters
from rlite.generation import PromptLogprobs as PromptLogprobs
from rlite.generation import RequestOutput as RequestOutput
from rlite.generation import StopReason as StopReason
from rlite.generation import token_ids as token_ids

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
BalanceBy = Literal["tokens", "flops"]
"""quantity of a batch that data-parallel ranks share evenly"""
PackingMethod = Literal["first_fit_decreasing", "karmarkar_karp"]
"""ways to fill microbatches, see `rlite.runtime.parallel.microbatch_plan.plan_microbatches`"""
ExpertsImplementation = Literal["auto", "eager", "grouped_mm", "batched_mm"]
"""ways to compute the experts of a mixture"""
RoutingSource = Literal["auto", "off", "old_policy", "rollout"]
"""passes whose chosen experts the trainer of a mixture replays"""
MAX_KEPT_IDS = 512
"""most token ids from which a request that asks for `kept_ids` samples, if it truncates"""
MAX_TOP_LOGPROBS = 20
"""most likely tokens that may be asked for at each place of a prompt: vLLM's default limit"""


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
    token the ids among which top-p and top-k let it be drawn, at most `MAX_KEPT_IDS`; [] if nothing was removed.
    `routed_experts`: the experts that a mixture of experts has chosen, see `rlite.data.routing`"""
    adapter: str | None = None
    """name of the adapter that completes it; None is the policy"""

    def __post_init__(self) -> None:
        if type(self.input_ids) is not list or set(map(type, self.input_ids)) != {int}:
            object.__setattr__(self, "input_ids", token_ids(self.input_ids, "LLMRequest.input_ids"))


@dataclass(frozen=True, kw_only=True)
class LLMResponse:
    """One completion, token by token.

    `output_logprobs[i]` is log_softmax(logits / temperature) of token i under the unfiltered distribution
    (temperature 1 when greedy). If the request asked for `kept_ids`, it is over the kept ids of token i, if there are
    any. `output_versions[i]` is the policy version that made token i, or the version of the request's adapter.
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
    adapter: str | None = None
    """name of the adapter that completes it; None is the policy"""


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

    def stream(self, request: LLMRequest) -> AsyncIterator[TokenChunk]:
        """Return the tokens of one request as they are made; the last chunk has a finish_reason.

        Closing the iterator cancels the request.
        """

    def get_version(self) -> int:
        """Return the policy version: the number of weight updates."""

    def pause(self) -> None:
        """Hold generation; requests are kept."""

    def resume(self) -> None:
        """Go on with generation after `pause`."""
