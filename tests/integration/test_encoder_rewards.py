"""Encoders and classifiers of several labels as reward models: the logits of transformers, text by text."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import rlite
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.errors import ConfigError
from rlite.rollout import RewardFunction, SingleTurnWorkflow
from rlite.rollout.failures import RewardInvalid
from rlite.rollout.rewards.models import RewardModel
from rlite.trainer.rl.reward_engines import RewardEngines
from tests.tiny import build_model_dir
from tests.unit.rollout.rewards.test_reward_models import scorer

TEXTS = [("a", "b"), ("What is 2+3?", "5"), ("x" * 20, ""), ("", "yes, it is so"), ("long " * 5, "short")]


@pytest.fixture(autouse=True)
def no_session() -> Iterator[None]:
    yield
    rlite.shutdown()


def workflow(reward: RewardFunction) -> SingleTurnWorkflow:
    return SingleTurnWorkflow(reward, {"max_new_tokens": 8}, byte_tokenizer())


def encoder(path: Path, kind: str, **config: Any) -> str:
    found = scorer(path, kind=kind, **config)
    tokenizer = byte_tokenizer()
    tokenizer.model_input_names = ["input_ids", "attention_mask", *(["token_type_ids"] if kind == "bert" else [])]
    tokenizer.save_pretrained(path)
    return found


def scores(folder: Path, model: RewardModel, texts: list[tuple[str, str]]) -> list[float]:
    """Return the scores of texts, computed together."""
    reward = RewardFunction(model, in_process=True, batch_size=8)
    engines = RewardEngines.of([(workflow(reward), [{"prompt": "a"}], "train_data")], 64, False)
    rlite.init(num_devices=1, launcher="inprocess")
    policy = rlite.RliteInferenceEngine(str(build_model_dir(folder / "policy", hidden=32)), executor="torch")
    policy.build(max_model_len=64)
    engines.build_beside(policy, 1, 0)

    async def together() -> list[float]:
        calls = (reward(prompt=p, completions=c, prompt_ids=[9], completion_ids=[9]) for p, c in texts)
        return await asyncio.gather(*calls)

    return asyncio.run(together())


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "modernbert"])
def test_a_batch_of_an_encoder_has_the_logits_of_single_texts(tmp_path: Path, kind: str) -> None:
    path = encoder(tmp_path / "rm", kind, max_position_embeddings=320, num_hidden_layers=2, initializer_range=0.5)
    found = scores(tmp_path, RewardModel(path), TEXTS)
    direct, tokenizer = AutoModelForSequenceClassification.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    with torch.no_grad():
        theirs = [direct.eval()(**tokenizer(*pair, return_tensors="pt")).logits[0, 0].item() for pair in TEXTS]
    assert found == pytest.approx(theirs, abs=1e-5, rel=1e-5)
    assert len({round(score, 4) for score in theirs}) == len(TEXTS)


@pytest.mark.parametrize("kind", ["bert", "qwen2"])
def test_the_score_is_the_logit_of_the_label_that_is_named(tmp_path: Path, kind: str) -> None:
    labels = {0: "bad", 1: "fair", 2: "good"}
    path = encoder(tmp_path / "rm", kind, id2label=labels, num_labels=3, initializer_range=0.5)
    with pytest.raises(ConfigError, match="expected one score, or label=NAME of bad, fair, good"):
        RewardModel(path)
    model = RewardModel(path, label="good")
    [found] = scores(tmp_path, model, TEXTS[1:2])
    direct, tokenizer = AutoModelForSequenceClassification.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    direct.config.pad_token_id = None
    given = tokenizer(*TEXTS[1], return_tensors="pt") if kind == "bert" else {"input_ids": torch.tensor([[9, 9]])}
    with torch.no_grad():
        assert found == pytest.approx(direct.eval()(**given).logits[0, 2].item(), abs=1e-5)


def test_a_text_that_is_too_long_for_an_encoder_fails_with_a_reason(tmp_path: Path) -> None:
    path = encoder(tmp_path / "rm", "bert", max_position_embeddings=64)
    with pytest.raises(RewardInvalid, match="and the model reads 64"):
        scores(tmp_path, RewardModel(path), [("x" * 70, "y")])


def test_a_model_of_encoder_and_decoder_is_refused(tmp_path: Path) -> None:
    path = scorer(tmp_path, kind="bart", d_model=32, encoder_layers=1, decoder_layers=1)
    reward = RewardFunction(RewardModel(path), in_process=True, batch_size=8)
    with pytest.raises(ConfigError, match="bart has an encoder and a decoder"):
        RewardEngines.of([(workflow(reward), [{"prompt": "a"}], "train_data")], 8, False)
