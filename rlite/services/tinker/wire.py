"""Bytes of the Tinker API: requests of `forward_backward`, and results of training and sampling.

The messages are those of `tinker.proto`, which clients send since tinker 0.25.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlite.errors import DataError
from rlite.imports import optional
from rlite.services.tinker.losses import ForwardRequest, Row
from rlite.types import LLMResponse, PromptLogprobs

with optional("rlite tinker needs", "tinker"):
    from google.protobuf.message import DecodeError
    from tinker.proto import tinker_public_pb2 as messages

PROTOBUF = "application/x-protobuf"
OLDEST = (0, 25)
"""the first release of the client that sends protobuf"""
_DTYPES: dict[int, np.dtype[Any]] = {
    messages.DTYPE_FLOAT32: np.dtype(np.float32),
    messages.DTYPE_INT64: np.dtype(np.int64),
    messages.DTYPE_INT32: np.dtype(np.int32),
}
MAX_DENSE = 1 << 26
"""cells of the sparse tensors of a request, which become dense"""
_EMPTY_TOP = -99999.0
"""log-probability of a cell without a token"""


def read_forward(body: bytes) -> tuple[ForwardRequest, bytes]:
    """Return a request, and bytes that are equal for equal requests.

    Args:
        body: a `ForwardBackwardRequest`.

    Raises:
        DataError: the body is no such message, or a datum has another form than text and tensors.
    """
    message = messages.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise DataError(f"the body is no ForwardBackwardRequest: {error}") from error
    texts = {name: value.text for name, value in message.loss_fn_config_v2.items() if value.HasField("text")}
    if texts:
        name, text = min(texts.items())
        raise DataError(f"loss_fn_config: {name}={text!r} is a text; the losses of this server take numbers alone")
    tensors = [tensor for datum in message.data for tensor in datum.loss_fn_inputs.values()]
    cells = sum(abs(math.prod(tensor.shape)) for tensor in tensors if tensor.WhichOneof("encoding") == "sparse_csr")
    if not message.data or cells > MAX_DENSE:
        raise DataError(f"data: expected one datum or more, with at most {MAX_DENSE} cells of sparse tensors")
    rows = [_row(datum, f"data[{number}]") for number, datum in enumerate(message.data)]
    request = ForwardRequest(
        message.model_id, message.seq_id, message.loss_fn, dict(message.loss_fn_config), message.forward_only, rows
    )
    return request, message.SerializeToString(deterministic=True)


def _row(datum: Any, where: str) -> Row:
    kinds = {chunk.WhichOneof("chunk") or "nothing" for chunk in datum.model_input} - {"encoded_text"}
    if kinds:
        raise DataError(f"{where}.model_input: expected chunks of tokens alone, found {', '.join(sorted(kinds))}")
    tokens = [int(token) for chunk in datum.model_input for token in np.frombuffer(chunk.encoded_text.tokens, np.int32)]
    if not tokens:
        raise DataError(f"{where}.model_input: expected one token or more, found none")
    return Row(tokens, {name: _tensor(each, f"{where}.{name}") for name, each in datum.loss_fn_inputs.items()})


def _tensor(message: Any, where: str) -> Tensor:
    """Return a tensor; a sparse one becomes dense, with zeros.

    Raises:
        DataError: the bytes do not fill the shape.
    """
    if message.dtype not in _DTYPES or min(message.shape, default=0) < 0:
        told = f"found dtype {message.dtype} and shape {list(message.shape)}"
        raise DataError(f"{where}: expected float32, int64 or int32 and a shape, {told}")
    dtype, shape = _DTYPES[message.dtype], tuple(message.shape)
    try:
        if message.WhichOneof("encoding") == "sparse_csr":
            return torch.from_numpy(_filled(message.sparse_csr, shape, dtype))
        flat = np.frombuffer(message.dense, dtype)
        return torch.from_numpy(flat.reshape(shape or (-1,)).copy())
    except (ValueError, IndexError) as error:
        raise DataError(f"{where}: the values do not fill the shape {list(shape)}: {error}") from error


def _filled(sparse: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return a sparse tensor with its zeros.

    Raises:
        ValueError: the indices, or the values, do not belong to the shape.
        IndexError: a column is beyond the shape.
    """
    crow, columns = (np.frombuffer(each, np.int64) for each in (sparse.crow_indices, sparse.col_indices))
    counts = np.diff(crow)
    is_bad = bool(((counts < 0) | (counts > len(columns))).any() or (columns < 0).any() or crow[:1].any())
    if is_bad or len(shape) != 2 or len(counts) != shape[0] or counts.sum() != len(columns):
        raise ValueError("expected two dimensions, and row indices from 0 to the number of columns")
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = np.frombuffer(sparse.values, dtype)
    return dense


def write_forward(logprobs: Sequence[Tensor], metrics: Mapping[str, float]) -> bytes:
    """Return a `ForwardBackwardOutput`.

    Args:
        logprobs: of each datum, [tokens] or [tokens, targets].
        metrics: by `name:reduction`.
    """
    output = messages.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    width = {tuple(each.shape[1:]) for each in logprobs}
    for group in [logprobs] if len(width) == 1 else [[each] for each in logprobs]:
        record = output.loss_fn_outputs.add(num_datums=len(group))
        parts = [each.float().numpy().tobytes() for each in group]
        field = record.fields["logprobs"]
        field.dtype, field.data = messages.DTYPE_FLOAT32, b"".join(parts)
        field.offsets = np.cumsum([0, *map(len, parts)]).astype(np.int64).tobytes()
        field.trailing_shape.extend(group[0].shape[1:])
    return output.SerializeToString(deterministic=True)


def write_samples(answers: Sequence[LLMResponse], scored: PromptLogprobs | None, num_top: int, last: int) -> bytes:
    """Return a `SampleResponse`.

    Args:
        answers: the samples of one prompt.
        scored: log-probabilities of the prompt's tokens but the first; None if they were not asked for.
        num_top: number of most likely tokens at each place of the prompt; 0 leaves them out.
        last: number of tokens at the prompt's end that are scored; 0 is all.
    """
    response = messages.SampleResponse()
    for answer in answers:
        is_long = answer.stop_reason == "length"
        response.sequences.add(
            stop_reason=messages.STOP_REASON_LENGTH if is_long else messages.STOP_REASON_STOP,
            tokens=np.asarray(answer.output_tokens, np.int32).tobytes(),
            logprobs=np.asarray(answer.output_logprobs, np.float32).tobytes(),
        )
    if scored is not None:
        values = np.asarray([np.nan, *scored.logprobs], np.float32)
        hidden = len(values) - last if last else 0
        values[:hidden] = np.nan
        response.prompt_logprobs = values.tobytes()
        if num_top:
            ids, tops = np.zeros((len(values), num_top), np.int32), np.full((len(values), num_top), _EMPTY_TOP, "f4")
            for place in range(max(1, hidden), len(values)):
                ids[place] = scored.top_ids[place - 1][:num_top]
                tops[place] = scored.top_logprobs[place - 1][:num_top]
            told = response.topk_prompt_logprobs
            told.k, told.length, told.token_ids, told.logprobs = num_top, len(values), ids.tobytes(), tops.tobytes()
    return response.SerializeToString(deterministic=True)


def check_version(version: str) -> None:
    """Refuse a client that does not send protobuf.

    Raises:
        DataError: the message says which release does.
    """
    numbers = [int(part) for part in re.findall(r"\d+", version)[:2]]
    if numbers and tuple(numbers) < OLDEST:
        raise DataError(upgrade(version))


def upgrade(version: str) -> str:
    """Return the message for a client that is too old."""
    oldest = ".".join(map(str, OLDEST))
    return f"the client is tinker {version[:40]}, and this server needs {oldest} or newer: pip install -U tinker"
