"""Forms of the Tinker API's requests, as far as the server reads them. Values of the address count as the body's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Gt, Le, Lt, MaxLen
from pydantic import BaseModel, ConfigDict, FiniteFloat, Strict, ValidationError

from rlite.errors import DataError
from rlite.services.endpoint.requests import parse_json

Number = Annotated[int, Ge(0), Le(10**12)]
"""number of a request"""
Place = Annotated[int, Ge(0), Lt(10**9)]
"""number of a model or a sampler in its session"""
Seed = Annotated[int, Ge(-(2**63)), Lt(2**63)]
Count = Annotated[int, Ge(1), Lt(2**31)]
Seconds = Annotated[int, Gt(0), Le(10 * 366 * 24 * 3600)]
Metadata = Annotated[dict[Annotated[str, MaxLen(256)], Annotated[str, MaxLen(4096)]], MaxLen(64)]
"""notes of the client, which lists tell again"""


class Body(BaseModel):
    """A request. Keys that the server does not read are ignored: clients add them with each release."""

    model_config = ConfigDict(protected_namespaces=(), extra="ignore")


class Client(Body):
    """Body of client/config and create_session."""

    sdk_version: str | None = None


class SessionBody(Body):
    """Body of requests about a session."""

    session_id: str


class LoraConfig(Body):
    """The adapter of create_model."""

    rank: Annotated[int, Ge(1), Le(4096)]
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(Body):
    """The optimizer of a model."""

    type: Literal["adamw"] = "adamw"


class NewModel(SessionBody):
    """Body of create_model."""

    model_seq_id: Place
    base_model: str
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()
    user_metadata: Metadata | None = None


class ModelBody(Body):
    """Body of requests about a model."""

    model_id: str


class Adam(Body):
    """Options of a step of AdamW."""

    learning_rate: Annotated[FiniteFloat, Ge(0)] = 1e-4
    beta1: Annotated[FiniteFloat, Ge(0), Lt(1)] = 0.9
    beta2: Annotated[FiniteFloat, Ge(0), Lt(1)] = 0.95
    eps: Annotated[FiniteFloat, Ge(0)] = 1e-12
    weight_decay: Annotated[FiniteFloat, Ge(0)] = 0.0
    grad_clip_norm: Annotated[FiniteFloat, Ge(0)] = 0.0


class OptimStep(ModelBody):
    """Body of optim_step."""

    seq_id: Number
    adam_params: Adam | None = None


class SaveWeights(ModelBody):
    """Body of save_weights."""

    seq_id: Number
    path: str | None = None
    ttl_seconds: Seconds | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveForSampler(SaveWeights):
    """Body of save_weights_for_sampler."""

    sampling_session_seq_id: Place | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"


class LoadWeights(Body):
    """Body of load_weights, into a model or into a new one."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: Number | None = None
    session_id: str | None = None
    model_seq_id: Place | None = None
    base_model: str | None = None
    optimizer_config: OptimizerConfig | None = None
    user_metadata: Metadata | None = None


class NewSampler(SessionBody):
    """Body of create_sampling_session."""

    sampling_session_seq_id: Place
    base_model: str | None = None
    model_path: str | None = None


class SamplerBody(Body):
    """Body of requests about a sampler."""

    sampling_session_id: str


class SamplingParams(Body):
    """Parameters of sampling."""

    max_tokens: Count | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: Annotated[FiniteFloat, Ge(0)] = 1.0
    top_k: Annotated[int, Ge(-1), Lt(2**31)] = -1
    top_p: Annotated[FiniteFloat, Gt(0), Le(1)] = 1.0


class Chunk(Body):
    """A part of a prompt: text."""

    type: Literal["encoded_text"]
    tokens: list[Annotated[int, Strict(), Ge(0), Lt(2**31)]]


class Prompt(Body):
    """The prompt of asample."""

    chunks: list[Chunk]


class Sample(SamplerBody):
    """Body of asample."""

    seq_id: Number
    num_samples: Annotated[int, Ge(1), Le(1024)] = 1
    prompt: Prompt
    sampling_params: SamplingParams
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Ge(0), Le(20)] = 0
    prompt_logprobs_last_n: Count | None = None
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None


class Retrieve(Body):
    """Body of requests about a result."""

    request_id: str


class CopyWeights(Body):
    """Body of copy_weights."""

    source_path: str
    session_id: str | None = None
    model_seq_id: Place | None = None
    ttl_seconds: Seconds | None = None


class WeightsInfo(Body):
    """Body of weights_info."""

    tinker_path: str


class SavedName(ModelBody):
    """Address of saved weights."""

    kind: str
    name: str
    ttl_seconds: Seconds | None = None

    @property
    def path(self) -> str:
        """The address as the client writes it."""
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"


class Page(Body):
    """A part of a list."""

    limit: Annotated[int, Ge(1), Le(1000)] = 100
    offset: Number = 0
    model_id: str | None = None


B = TypeVar("B", bound=Body)


def read(cls: type[B], body: bytes, address: Mapping[str, str]) -> B:
    """Return a request.

    Args:
        cls: its form.
        body: a JSON object; empty for none.
        address: values in the address, by name.

    Raises:
        DataError: the message names the key.
    """
    found = parse_json(body) if body else {}
    if not isinstance(found, dict):
        raise DataError(f"the body: expected a JSON object, found {type(found).__name__}")
    try:
        return cls.model_validate({**found, **address})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise DataError(f"{where}: {first['msg']}") from error
