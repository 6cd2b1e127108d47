"""Rewards from reward models: sequence classification with one score, read at the last token of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlite.data.chat.answers import prompted_answer_encoder
from rlite.data.chat.template import reads_alike
from rlite.data.prompts import special_ids
from rlite.errors import ConfigError, DataError
from rlite.nn.pretrained import load_config, load_tokenizer
from rlite.rollout.rewards.function import RewardFunction
from rlite.rollout.rewards.score import Unusable
from rlite.rollout.rewards.weighted import WeightedRewards

SCORER = "ForSequenceClassification"
"""end of the names of classes that score"""
BATCH = 64
"""answers of different episodes that are scored in one pass"""
Scores = Callable[[Sequence[Sequence[int]]], list[float]]
"""token rows -> the score at the last token of each"""


def check_scorer(path: str, what: str) -> None:
    """Check that a checkpoint gives one score.

    Args:
        path: folder or hub name of the checkpoint.
        what: option and value that name it, for error messages.

    Raises:
        ConfigError: it is a model of another kind, or gives several numbers.
    """
    config = load_config(path)
    kind = next(iter(config.architectures or []), config.model_type)
    if not kind.endswith(SCORER):
        raise ConfigError(f"{what}: {kind} gives no score; expected a model such as `rlite rm` trains, *{SCORER}")
    if config.num_labels != 1:
        raise ConfigError(f"{what}: {kind} gives num_labels={config.num_labels} numbers; expected one score")


class RewardModel:
    """A reward function of lists: the score of a reward model at the last token of each answer.

    A trainer puts the model on devices before it generates. If the policy has the vocabulary and the chat template of
    the model, the model reads the policy's own tokens. Otherwise its own tokenizer and template read the texts.

        reward = RewardFunction(RewardModel("runs/rm/latest"), in_process=True, batch_size=64, timeout=120)

    Args:
        path: folder or hub name of the checkpoint.
        what: option and value that name it, for error messages.
        num_devices: devices that only score; None: the model shares the devices of the rollout engine.

    Raises:
        ConfigError: the checkpoint gives no score, or several.
    """

    def __init__(self, path: str, what: str = "RewardModel", num_devices: int | None = None) -> None:
        check_scorer(path, what)
        self.path, self.what, self.num_devices = path, what, num_devices
        self.tokenizer = load_tokenizer(path)
        self.max_length: int | None = getattr(load_config(path).get_text_config(), "max_position_embeddings", None)
        """tokens of prompt and answer together"""
        self.reads_tokens = False
        """the policy's tokens are the model's"""
        self.scores: Scores | None = None
        """None: the model is on no device"""
        self._ends: frozenset[int] = frozenset()

    def check(self, tokenizer: Any, rows: Sequence[Mapping[str, Any]], length: int, where: str) -> None:
        """Compare the policy's tokenizer and the longest sequences with the model's, before work starts.

        Args:
            tokenizer: the policy's.
            rows: the prompts.
            length: tokens of the run's longest sequence.
            where: option of the rows, for messages.

        Raises:
            ConfigError: the model has no chat template for messages, or its context is shorter than the run's.
            DataError: the model's chat template refuses a prompt.
        """
        self.reads_tokens = reads_alike(self.tokenizer, tokenizer)
        if self.max_length is not None and length > self.max_length:
            remedy = "lower rollout.max_model_len or rollout.train_sampling_params.max_new_tokens"
            raise ConfigError(
                f"{self.what}: it reads at most {self.max_length} tokens (max_position_embeddings), and sequences may "
                f"have {length}; {remedy}"
            )
        self._ends = special_ids(tokenizer)
        for number, row in enumerate(() if self.reads_tokens else rows):
            messages = {"messages": row["prompt"]} if isinstance(row.get("prompt"), list) else {}
            try:
                self._tokenised({"prompt": "", **row, **messages, "completions": "a", "completion_ids": []})
            except DataError as error:
                raise DataError(f"{where}, row index {number}: {self.what}: {error}") from error

    async def __call__(self, /, **columns: Sequence[Any]) -> list[Any]:
        """Return the score of each answer, or why it has none.

        Args:
            **columns: arguments of a reward function, as lists.
        """
        read = [self._read(dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)]
        rows = [ids for ids in read if isinstance(ids, list)]
        scores = iter(await asyncio.to_thread(self._scores, rows) if rows else [])
        return [next(scores) if isinstance(ids, list) else ids for ids in read]

    def _scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        if self.scores is None:
            raise ConfigError(f"{self.what}: the model is on no device; rlite ppo, grpo and eval put it there")
        return self.scores(rows)

    def _read(self, row: Mapping[str, Any]) -> list[int] | Unusable:
        """Return a prompt and its answer as tokens. An answer that was cut has no end."""
        if self.reads_tokens:
            ids = [*row["prompt_ids"], *row["completion_ids"]]
        else:
            ids = self._tokenised(row)
        if self.max_length is not None and len(ids) > self.max_length:
            return Unusable(
                f"no score: prompt and answer have {len(ids)} tokens, and the model reads {self.max_length}"
            )
        return ids

    def _tokenised(self, row: Mapping[str, Any]) -> list[int]:
        encode = prompted_answer_encoder([row], self.tokenizer, ["completions"], {}, self.what, {})
        [[(found, _)]] = encode(range(1))
        ids, ends = found.tolist(), special_ids(self.tokenizer)
        is_cut = not self._ends.intersection(row["completion_ids"][-1:])
        while is_cut and ids[-1] in ends:
            ids.pop()
        return ids


def reward_models(reward: Any) -> list[RewardModel]:
    """Return the reward models in a reward function, or in several."""
    return [fn for fn in functions_of(reward) if isinstance(fn, RewardModel)]


def functions_of(reward: Any) -> list[Callable[..., Any]]:
    """Return what the parts of a reward function call."""
    functions = [part.function for part in reward.parts.values()] if isinstance(reward, WeightedRewards) else [reward]
    return [one.fn for one in functions if isinstance(one, RewardFunction)]
