"""Rewards from reward models: sequence classification with one score, read at the last token of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlite.data.chat.answers import prompted_answer_encoder
from rlite.data.chat.template import has_chat_template, reads_alike
from rlite.data.prompts import special_ids
from rlite.errors import ConfigError, DataError, did_you_mean
from rlite.nn.pretrained import load_config, load_tokenizer
from rlite.rollout.rewards.function import RewardFunction
from rlite.rollout.rewards.score import Unusable
from rlite.rollout.rewards.weighted import WeightedRewards

SCORER = "ForSequenceClassification"
"""end of the names of classes that score"""
BATCH = 64
"""answers of different episodes that are scored in one pass"""
Tokens = Mapping[str, list[int]]
"""`input_ids` of a row, and `token_type_ids` if the model has them"""
Scores = Callable[[Sequence[Tokens]], list[float]]
"""token rows -> the score at the last token of each"""


def check_scorer(path: str, what: str, label: str | None = None) -> int:
    """Return the number of the label whose logit is the score.

    `label`: name or number of the label; None: the checkpoint has one.
    """
    config = load_config(path)
    kind = next(iter(config.architectures or []), config.model_type)
    if not kind.endswith(SCORER):
        raise ConfigError(f"{what}: {kind} gives no score; expected a model such as `rlite rm` trains, *{SCORER}")
    names = {str(name): number for number, name in config.id2label.items()}
    known = {**{str(number): number for number in names.values()}, **names}
    if label is None and config.num_labels != 1:
        told = f"{kind} gives num_labels={config.num_labels} numbers; expected one score, or label=NAME of"
        raise ConfigError(f"{what}: {told} {', '.join(names)}")
    if label is not None and label not in known:
        raise ConfigError(f"{what}: label={label}: {did_you_mean(label, names)}")
    return known.get(str(label), 0)


class RewardModel:
    """A reward function of lists: the score of a reward model at the last token of each answer.

    A trainer puts the model on devices before it generates. If the policy has the vocabulary and the chat template of
    the model, the model reads the policy's own tokens. Otherwise its own tokenizer and template read the texts.

        reward = RewardFunction(RewardModel("runs/rm/latest"), in_process=True, batch_size=64, timeout=120)

    `num_devices`: devices that only score; None: the model shares the devices of the rollout engine.
    """

    def __init__(
        self, path: str, what: str = "RewardModel", num_devices: int | None = None, label: str | None = None
    ) -> None:
        self.label = check_scorer(path, what, label)
        self.is_encoder = False
        """the model reads a whole text; see `use_encoder`"""
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
        """Compare the policy's tokenizer and the longest sequences with the model's, before work starts."""
        self.reads_tokens = not self.is_encoder and reads_alike(self.tokenizer, tokenizer)
        if self.max_length is not None and length > self.max_length:
            remedy = "lower rollout.max_model_len or rollout.train_sampling_params.max_new_tokens"
            told = f"{self.what}: it reads at most {self.max_length} tokens (max_position_embeddings)"
            raise ConfigError(f"{told}, and sequences may have {length}; {remedy}")
        self._ends = special_ids(tokenizer)
        for number, row in enumerate(() if self.reads_tokens else rows):
            messages = {"messages": row["prompt"]} if isinstance(row.get("prompt"), list) else {}
            try:
                self._tokenised({"prompt": "", **row, **messages, "completions": "a", "completion_ids": []})
            except DataError as error:
                raise DataError(f"{where}, row index {number}: {self.what}: {error}") from error

    async def __call__(self, /, **columns: Sequence[Any]) -> list[Any]:
        """Return the score of each answer, or why it has none."""
        read = [self._read(dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)]
        rows = [ids for ids in read if not isinstance(ids, Unusable)]
        scores = iter(await asyncio.to_thread(self._scores, rows) if rows else [])
        return [next(scores) if not isinstance(ids, Unusable) else ids for ids in read]

    def _scores(self, rows: Sequence[Tokens]) -> list[float]:
        if self.scores is None:
            raise ConfigError(f"{self.what}: the model is on no device; rlite ppo, grpo and eval put it there")
        return self.scores(rows)

    def _read(self, row: Mapping[str, Any]) -> Tokens | Unusable:
        """Return a prompt and its answer as tokens. An answer that was cut has no end."""
        if self.reads_tokens:
            tokens: Tokens = {"input_ids": [*row["prompt_ids"], *row["completion_ids"]]}
        else:
            tokens = self._tokenised(row)
        length = len(tokens["input_ids"])
        if self.max_length is not None and length > self.max_length:
            return Unusable(f"no score: prompt and answer have {length} tokens, and the model reads {self.max_length}")
        return tokens

    def use_encoder(self) -> None:
        """Let the model read pairs of texts, as encoders are trained: of the prompt and the answer."""
        self.is_encoder = True
        limits = [limit for limit in (self.max_length, self.tokenizer.model_max_length) if limit is not None]
        self.max_length = min(limits)

    def _pair(self, row: Mapping[str, Any]) -> Tokens:
        messages = row.get("messages") or [{"content": row["prompt"]}]
        pair = self.tokenizer("\n".join(str(message["content"]) for message in messages), row["completions"])
        return {name: pair[name] for name in ("input_ids", "token_type_ids") if name in pair}

    def _tokenised(self, row: Mapping[str, Any]) -> Tokens:
        if self.is_encoder and not has_chat_template(self.tokenizer):
            return self._pair(row)
        encode = prompted_answer_encoder([row], self.tokenizer, ["completions"], {}, self.what, {})
        [[(found, _)]] = encode(range(1))
        ids, ends = found.tolist(), special_ids(self.tokenizer)
        is_cut = not self._ends.intersection(row["completion_ids"][-1:])
        while is_cut and ids[-1] in ends:
            ids.pop()
        return {"input_ids": ids}


def reward_models(reward: Any) -> list[RewardModel]:
    """Return the reward models in a reward function, or in several."""
    return [fn for fn in functions_of(reward) if isinstance(fn, RewardModel)]


def functions_of(reward: Any) -> list[Callable[..., Any]]:
    """Return what the parts of a reward function call."""
    functions = [part.function for part in reward.parts.values()] if isinstance(reward, WeightedRewards) else [reward]
    return [one.fn for one in functions if isinstance(one, RewardFunction)]
