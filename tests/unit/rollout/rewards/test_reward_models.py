"""Checks of reward models before work starts, and what they read."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from rlite.assembly.quickstart.run import CHATML, byte_tokenizer
from rlite.errors import ConfigError, DataError
from rlite.rollout.failures import RewardInvalid, RewardRaised
from rlite.rollout.rewards.function import RewardFunction
from rlite.rollout.rewards.models import RewardModel
from tests.agents import tokenizer_with
from tests.tiny import build_model_dir

ROWS: list[dict[str, Any]] = [{"messages": [{"role": "user", "content": "2+2="}]}]


def scorer(path: Path, template: str | None = None, kind: str = "qwen2", **config: Any) -> str:
    tokenizer = byte_tokenizer() if template is None else tokenizer_with(template)
    shape = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "num_labels": 1}
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    made = AutoConfig.for_model(kind, **{**shape, **heads, **special, **config})
    AutoModelForSequenceClassification.from_config(made).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def test_a_model_that_writes_text_is_no_reward_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward.model=x: Qwen2ForCausalLM gives no score"):
        RewardModel(str(build_model_dir(tmp_path, hidden=32)), "reward.model=x")


def test_a_classifier_of_several_labels_is_no_reward_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_labels=3 numbers; expected one score"):
        RewardModel(scorer(tmp_path, num_labels=3))


def test_a_label_is_named_by_its_name_or_its_number(tmp_path: Path) -> None:
    path = scorer(tmp_path, num_labels=2, id2label={0: "bad", 1: "good"})
    assert [RewardModel(path, label=label).label for label in ("good", "0")] == [1, 0]
    with pytest.raises(ConfigError, match="label=god: did you mean 'good'"):
        RewardModel(path, label="god")


def test_sequences_that_may_outgrow_the_model_are_refused_before_work_starts(tmp_path: Path) -> None:
    model = RewardModel(scorer(tmp_path))
    with pytest.raises(ConfigError, match=r"reads at most 64 tokens .* may have 65"):
        model.check(byte_tokenizer(), ROWS, 65, "train_data")


def test_a_model_without_a_template_for_messages_is_refused_before_work_starts(tmp_path: Path) -> None:
    tokenizer, model = tokenizer_with(CHATML), RewardModel(scorer(tmp_path))
    model.tokenizer.chat_template = None
    with pytest.raises((ConfigError, DataError), match="chat template"):
        model.check(tokenizer, ROWS, 64, "train_data")


def read(model: RewardModel, **row: Any) -> list[int]:
    rows: list[Any] = []

    def keep(given: Any) -> list[float]:
        rows.extend(given)
        return [0.0] * len(given)

    model.scores = keep
    asyncio.run(RewardFunction(model, in_process=True, batch_size=4)(**row))
    [found] = rows
    return list(found["input_ids"])


def test_the_policys_own_tokens_are_read_if_vocabulary_and_template_are_the_same(tmp_path: Path) -> None:
    model = RewardModel(scorer(tmp_path, CHATML))
    model.check(tokenizer_with(CHATML), ROWS, 64, "train_data")
    assert model.reads_tokens
    assert read(model, prompt="ab", completions="c", prompt_ids=[5, 6], completion_ids=[7]) == [5, 6, 7]
    assert read(model, prompt="ab", completions="", prompt_ids=[5, 6], completion_ids=[]) == [5, 6]


@pytest.mark.parametrize("is_cut", [False, True])
def test_texts_are_rendered_in_the_models_template_with_an_end_unless_the_answer_was_cut(
    tmp_path: Path, is_cut: bool
) -> None:
    other = CHATML.replace("assistant", "judge")
    model, policy = RewardModel(scorer(tmp_path, CHATML)), tokenizer_with(other)
    model.check(policy, ROWS, 64, "train_data")
    assert not model.reads_tokens
    ids = [9] if is_cut else [9, policy.eos_token_id]
    found = model.tokenizer.decode(
        read(model, prompt="", completions="4", prompt_ids=[1], completion_ids=ids, **ROWS[0])
    )
    rendered = "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n4"
    assert found == (rendered if is_cut else f"{rendered}<|im_end|>")


def test_an_answer_that_is_too_long_fails_with_a_reason(tmp_path: Path) -> None:
    model = RewardModel(scorer(tmp_path, CHATML))
    model.check(tokenizer_with(CHATML), ROWS, 64, "train_data")
    model.scores = lambda rows: [0.0] * len(rows)
    reward = RewardFunction(model, in_process=True, batch_size=4)
    with pytest.raises(RewardInvalid, match="have 65 tokens, and the model reads 64"):
        asyncio.run(reward(prompt="", completions="", prompt_ids=[1] * 64, completion_ids=[2]))


def test_a_model_on_no_device_says_so(tmp_path: Path) -> None:
    reward = RewardFunction(RewardModel(scorer(tmp_path)), in_process=True, batch_size=4)
    with pytest.raises(RewardRaised, match="on no device"):
        asyncio.run(reward(prompt="a", completions="b", prompt_ids=[1], completion_ids=[2]))
