"""Types that a request accepts as token ids."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.errors import DataError
from rlite.rollout import GenerationHyperparameters, ScriptedEngine, SingleTurnWorkflow
from rlite.types import LLMRequest


@pytest.mark.parametrize(
    "value",
    [
        [1, 2, 3],
        (1, 2, 3),
        [[1, 2, 3]],
        range(1, 4),
        np.array([1, 2, 3]),
        [np.int64(1), 2, 3],
        torch.tensor([[1, 2, 3]]),
        [torch.tensor([1, 2, 3])],
        list(torch.tensor([1, 2, 3])),
        {"input_ids": [[1, 2, 3]]},
        {"input_ids": torch.tensor([[1, 2, 3]]), "attention_mask": torch.ones(1, 3)[:, :3].long()},
        BatchEncoding({"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1]}),
    ],
)
def test_a_request_takes_token_ids_in_every_usual_form(value: Any) -> None:
    ids = LLMRequest(input_ids=value).input_ids
    assert ids == [1, 2, 3]
    assert {type(token) for token in ids} == {int}


def test_a_request_takes_what_a_chat_template_returns() -> None:
    tokenizer = byte_tokenizer()
    messages = [{"role": "user", "content": "Hi"}]
    expected = tokenizer.apply_chat_template(messages, return_dict=False)
    for options in ({}, {"return_tensors": "pt"}, {"return_dict": False, "return_tensors": "pt"}):
        assert LLMRequest(input_ids=tokenizer.apply_chat_template(messages, **options)).input_ids == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 1.5], r"holds 1.5: token ids are whole numbers"),
        ([1.0], r"holds 1.0"),
        (torch.tensor([1.5]), r"holds 1.5"),
        ([True, 2], "true or false"),
        (np.array([True]), "true or false"),
        ([np.True_], "true or false"),
        (["1"], "holds '1'"),
        ([None], "holds None"),
        ([[1], [2]], "one prompt, found 2 rows"),
        ([1, [2]], "found 2 rows"),
        ("text", "is 'text': expected token ids"),
        (None, "is None: expected token ids"),
        (5, "is 5"),
        ({"ids": [1]}, r"has the keys \['ids'\]: expected input_ids"),
        ({"input_ids": [0, 1], "attention_mask": [0, 1]}, "is padded"),
    ],
)
def test_invalid_token_ids_are_refused_by_value(value: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        LLMRequest(input_ids=value)
    workflow = SingleTurnWorkflow(lambda **_: 0.0, GenerationHyperparameters(), byte_tokenizer())
    with pytest.raises(DataError, match=message):
        asyncio.run(workflow.arun_episode(ScriptedEngine([[1]]), {"input_ids": value}))
