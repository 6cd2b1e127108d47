"""JSON bodies of the Tinker API's requests, as far as the server reads them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from rlite.errors import DataError
from rlite.services.endpoint.requests import parse_json

Number = Annotated[int, Ge(0), Le(10**12)]


class Body(BaseModel):
    """A body. Keys that the server does not read are ignored: clients add them with each release."""

    model_config = ConfigDict(protected_namespaces=(), extra="ignore")


class NewSession(Body):
    """Body of create_session."""

    sdk_version: str = ""


class SessionBody(Body):
    """Body of session_heartbeat."""

    session_id: str


class LoraConfig(Body):
    """The adapter of create_model."""

    rank: Annotated[int, Ge(1), Le(4096)]
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(Body):
    """The optimizer of a model."""

    type: Literal["adamw"] = "adamw"


class NewModel(Body):
    """Body of create_model."""

    session_id: str
    model_seq_id: Number
    base_model: str
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class ModelBody(Body):
    """Body of get_info and unload_model."""

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
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(ModelBody):
    """Body of save_weights."""

    seq_id: Number
    path: str | None = None
    ttl_seconds: Annotated[int, Gt(0)] | None = None
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None


class SaveForSampler(SaveWeights):
    """Body of save_weights_for_sampler."""

    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"


class LoadWeights(Body):
    """Body of load_weights, into a model or into a new one."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: Number | None = None
    session_id: str | None = None
    model_seq_id: Number | None = None
    base_model: str | None = None
    optimizer_config: OptimizerConfig | None = None


class NewSampler(Body):
    """Body of create_sampling_session."""

    session_id: str
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


class SamplerBody(Body):
    """Body of join_sampling_session."""

    sampling_session_id: str


class SamplingParams(Body):
    """Parameters of sampling."""

    max_tokens: Annotated[int, Ge(1)] | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: Annotated[FiniteFloat, Ge(0)] = 1.0
    top_k: int = -1
    top_p: Annotated[FiniteFloat, Gt(0), Le(1)] = 1.0


class Sample(Body):
    """Body of asample."""

    sampling_session_id: str
    seq_id: Number
    num_samples: Annotated[int, Ge(1), Le(1024)] = 1
    prompt: dict[str, Any]
    sampling_params: SamplingParams
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Ge(0), Le(20)] = 0
    prompt_logprobs_last_n: Annotated[int, Ge(1)] | None = None
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None


class Retrieve(Body):
    """Body of retrieve_future and cancel_future."""

    request_id: str


class SamplerTarget(Body):
    """The sampler whose results retrieve_futures reports."""

    sampling_session_id: str
    cloned_sampler_id: int = 0


class RetrieveMany(Body):
    """Body of retrieve_futures."""

    target: SamplerTarget
    prev_cursor: Number = 0
    timeout: Annotated[FiniteFloat, Ge(0)] | None = None
    retrieved_request_ids: list[str] = Field(default=[], max_length=100_000)


class CopyWeights(Body):
    """Body of copy_weights."""

    source_path: str
    session_id: str | None = None
    model_seq_id: Number | None = None
    ttl_seconds: Annotated[int, Gt(0)] | None = None


class WeightsInfo(Body):
    """Body of weights_info."""

    tinker_path: str


B = TypeVar("B", bound=Body)


def read(cls: type[B], body: bytes) -> B:
    """Return a body.

    Raises:
        DataError: the message names the key.
    """
    try:
        return cls.model_validate(parse_json(body))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise DataError(f"{where}: {first['msg']}") from error
