"""Reward models and judges on devices: an engine for each, beside the rollout engine or on devices of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import rlite
from rlite.data.chat.template import has_chat_template
from rlite.data.rows import stream_of
from rlite.engine.inference import RliteInferenceEngine
from rlite.engine.train import RliteTrainEngine
from rlite.errors import ConfigError, WorkerError
from rlite.nn.pretrained import load_config, load_tokenizer
from rlite.restarts import RestartBudget
from rlite.rollout.rewards.llm_judge import LlmJudge
from rlite.rollout.rewards.models import RewardModel, Tokens, functions_of, reward_models
from rlite.rollout.rewards.options import SERVING
from rlite.rollout.workflow import PromptWorkflow, RolloutWorkflow, prompt_ids, prompt_text
from rlite.runtime.parallel.tensor import max_positions
from rlite.runtime.replicas.engine import Engine
from rlite.trainer.model.options import ModelOptions, frozen_build_options
from rlite.trainer.model.scorers import is_decoder, scorer_module
from rlite.trainer.options import ServingOptions
from rlite.types import GenerationHyperparameters, LLMRequest
from rlite.wording import counted

logger = logging.getLogger(__name__)
MICROBATCH = 4096
"""tokens of a microbatch, unless a sequence is longer"""
Key = tuple[str, int, int | None]
"""checkpoint, number of its label, and number of own devices"""
Asked = tuple[RolloutWorkflow, Sequence[Mapping[str, Any]], str]
"""a workflow, its prompts, and their option for messages"""


def own_scores(scores: Tensor, data: Mapping[str, Any]) -> Tensor:
    """Return the scores [T] of a pack: a post_hook for `forward`.

    `scores`: the model's output `[T]`.
    """
    return scores.float()


def score_rows(engine: RliteTrainEngine, is_alone: bool, rows: Sequence[Tokens]) -> list[float]:
    """Return the score at the last token of each row."""
    if is_alone and len(rows) > 1:
        return [score for row in rows for score in score_rows(engine, True, [row])]
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    columns = {name: pad_sequence([torch.tensor(row[name]) for row in rows], batch_first=True) for name in rows[0]}
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    batch = TensorDict({**columns, "attention_mask": mask}, batch_size=[len(rows)])
    return engine.forward(batch, own_scores).gather(1, lengths[:, None] - 1)[:, 0].tolist()


class RecoveringScores:
    """The scores of an engine. If it loses workers, they are started again, and the same answers are scored again.

    Nothing is lost and nothing counts twice: a call returns the scores of its own answers, once.
    """

    def __init__(self, engine: RliteTrainEngine, is_alone: bool, budget: RestartBudget) -> None:
        self._engine, self._is_alone, self._budget = engine, is_alone, budget
        self._turn = threading.Lock()  # of calls in threads: one recovers, and the others wait
        self._began: list[float] = []

    def __call__(self, rows: Sequence[Tokens]) -> list[float]:
        """Return the score at the last token of each row."""
        with self._turn:
            while True:
                try:
                    if self._engine.has_died:
                        self._recover()
                    return score_rows(self._engine, self._is_alone, rows)
                except WorkerError:
                    if not self._engine.has_died or not self._budget.allows(self._began, time.monotonic()):
                        raise

    def _recover(self) -> None:
        now = time.monotonic()
        if self._budget.allows(self._began, now):
            self._began.append(now)
            self._engine.recover(None)
            logger.warning("%s: its workers were started again after %.1f s", self._engine.name, time.monotonic() - now)


@dataclass(frozen=True)
class JudgeEngine:
    """The engine of the judges that have one checkpoint and the same options of the engine."""

    judges: list[LlmJudge]
    tokenizer: Any
    engine: RliteInferenceEngine
    longest: int | None
    """tokens of the longest question and its reply; None: not known"""

    @classmethod
    def of(cls, judge: LlmJudge) -> JudgeEngine:
        """Return the engine of a judge, which is not built yet."""
        tokenizer = load_tokenizer(judge.options.model)
        if not has_chat_template(tokenizer):
            raise ConfigError(f"{judge.what}.model={judge.options.model}: no chat template, through which it is asked")
        return cls([judge], tokenizer, RliteInferenceEngine(judge.options.model, judge.options.executor), None)

    def tokens(self, judge: LlmJudge, text: str) -> list[int]:
        """Return the tokens of a message to a judge."""
        asked = {"messages": [{"role": "user", "content": text}]}
        return prompt_ids(asked, self.tokenizer, judge.options.options.get("chat_template_kwargs"))

    def checked(self, judge: LlmJudge, asked: Asked) -> JudgeEngine:
        """Return the engine with room for the questions of a workflow."""
        workflow, rows, where = asked
        limit = judge.options.max_model_len or max_positions(load_config(self.engine.path))[1]
        longest = self.longest or 0
        if not isinstance(workflow, PromptWorkflow) or stream_of(rows):
            return self
        for number, row in enumerate(rows):
            texts = {"prompt": prompt_text(row, workflow.tokenizer, workflow.chat_template_options), "completions": ""}
            num_new = workflow.gconfig.max_new_tokens + judge.options.max_new_tokens
            needed = len(self.tokens(judge, judge.question({**row, **texts}))) + num_new
            if needed > limit:
                told = f"rubric, prompt, answer and reply may have {needed} tokens, and the judge reads {limit}"
                raise ConfigError(f"{where}, row index {number}: {judge.what}: {told}; lower judge.max_new_tokens")
            longest = max(longest, needed)
        return replace(self, longest=longest or None)

    def build(self, num_devices: int, seed: int, is_deterministic: bool, beside: Engine | None) -> None:
        """Place the engine, and let the judges ask it.

        `beside`: the engine whose devices it shares; None: its own.
        """
        own = self.judges[0].options
        if num_devices % own.tp_size:
            raise ConfigError(f"{self.judges[0].what}.tp_size={own.tp_size} does not divide {num_devices} devices")
        given = {key: getattr(own, key) for key in SERVING if key != "max_model_len"}
        options = ServingOptions(**given, deterministic=is_deterministic).build_options(num_devices)
        length = own.max_model_len or self.longest
        self.engine.build(**options, max_model_len=length, seed=seed, colocate_with=beside)
        for judge in self.judges:
            judge.ask = partial(self._ask, judge, _sampling(judge, is_deterministic))

    async def _ask(self, judge: LlmJudge, gconfig: GenerationHyperparameters, text: str) -> str:
        request = LLMRequest(input_ids=self.tokens(judge, text), gconfig=gconfig)
        response = await self.engine.agenerate(request)
        return self.tokenizer.decode(response.output_tokens, skip_special_tokens=True)


def _sampling(judge: LlmJudge, is_deterministic: bool) -> GenerationHyperparameters:
    """Return the sampling of a judge: greedy, unless its options say otherwise."""
    options = {key: value for key, value in judge.options.options.items() if key != "chat_template_kwargs"}
    given = {"temperature": 0.0, "max_new_tokens": judge.options.max_new_tokens, **options}
    if is_deterministic and given["temperature"]:
        raise ConfigError(f"{judge.what}.options.temperature={given['temperature']}: deterministic=true needs 0")
    return GenerationHyperparameters.from_mapping({**given, "greedy": not given["temperature"]})


@dataclass(frozen=True)
class RewardEngines:
    """The engines of all reward models of a run. A checkpoint that several rewards name has one engine."""

    models: Mapping[Key, Sequence[RewardModel]]
    """reward models by their engine"""
    engines: Mapping[Key, RliteTrainEngine]
    """their engines"""
    judges: Mapping[tuple[Any, ...], JudgeEngine]
    """engines of judges by checkpoint, options of the engine and number of own devices"""
    length: int
    """tokens of the longest sequence"""
    is_deterministic: bool
    """a score has the same bits with any other answers"""
    budget: RestartBudget
    """limit on recoveries from lost workers of reward models"""

    @classmethod
    def of(cls, asked: Sequence[Asked], length: int, is_deterministic: bool, max_recoveries: int = 0) -> RewardEngines:
        """Return the engines of the models in the rewards of workflows, which are not built yet."""
        models: dict[Key, list[RewardModel]] = {}
        engines: dict[Key, RliteTrainEngine] = {}
        for workflow, rows, where in asked:
            for model in reward_models(getattr(workflow, "reward_fn", None)):
                key = model.path, model.label, model.num_devices
                engines[key] = engines[key] if key in engines else _engine(model)
                if not is_decoder(engines[key].module):
                    model.use_encoder()
                model.check(getattr(workflow, "tokenizer", None), () if stream_of(rows) else rows, length, where)
                models.setdefault(key, []).append(model)
        judges, budget = _judge_engines(asked, is_deterministic), RestartBudget(max_recoveries)
        return cls(models, engines, judges, length, is_deterministic, budget)

    def build_apart(self, world: int, seed: int) -> int:
        """Place the models that have devices of their own, before other engines.

        Returns the number of devices that are left.
        """
        num_own = sum(own or 0 for *_, own in (*self.engines, *self.judges))
        if num_own >= world:
            raise ConfigError(
                f"reward.NAME.num_devices: reward models take {num_own} devices of their own, and there are {world} in "
                "all. Give more (num_devices=2 launcher=ray), or leave it out: they share those of the rollouts"
            )
        for chosen in self.engines:
            if chosen[-1] is not None:
                self._build(chosen, None, chosen[-1], seed)
        for key, judge in self.judges.items():
            if key[-1] is not None:
                judge.build(key[-1], seed, self.is_deterministic, None)
        return world - num_own

    def build_beside(self, rollout: Engine, num_devices: int, seed: int) -> None:
        """Place the models that are not placed yet on the devices of the rollout engine."""
        for key, engine in self.engines.items():
            if not engine.is_built:
                self._build(key, rollout, num_devices, seed)
        for judge in self.judges.values():
            if not judge.engine.is_built:
                judge.build(num_devices, seed, self.is_deterministic, rollout)

    def _build(self, key: Key, beside: Engine | None, num_devices: int, seed: int) -> None:
        model = ModelOptions(model_name=key[0], max_length_per_device=max(self.length, MICROBATCH))
        options = frozen_build_options(model.build_options(num_devices, seed), rlite.current_session().device)
        self.engines[key].build(**options, colocate_with=beside)
        scores = RecoveringScores(self.engines[key], self.is_deterministic, self.budget)
        for each in self.models[key]:
            each.scores = scores

    def release(self) -> None:
        """Free the devices."""
        for engine in (*self.engines.values(), *(judge.engine for judge in self.judges.values())):
            engine.release()

    def topic(self) -> dict[str, str]:
        """Return each model's place, memory and what it reads, for the plan of built engines; {} without a model."""
        told = []
        for key, engine in self.engines.items():
            path, _, own = key
            reads = "prompt and answer as texts" if self.models[key][0].is_encoder else "texts in its own chat template"
            if self.models[key][0].reads_tokens:
                reads = "the policy's tokens"
            size = f"{engine.num_parameters / 1e6:.2f} M parameters, {_gib(engine):.2g} GiB on each device"
            told.append(f"{path}, {size}, {_where(own)}, reads {reads}")
        for (path, *_, own), judge in self.judges.items():
            size = f"{_gib(judge.engine):.2g} GiB on each device with its KV cache"
            told.append(f"judge {path}, executor {judge.engine.executor_name}, {size}, {_where(own)}")
        return {"reward models": "; ".join(told)} if told else {}


def _judge_engines(asked: Sequence[Asked], is_deterministic: bool) -> dict[tuple[Any, ...], JudgeEngine]:
    found: dict[tuple[Any, ...], JudgeEngine] = {}
    for each in asked:
        for judge in functions_of(getattr(each[0], "reward_fn", None)):
            if isinstance(judge, LlmJudge) and judge.options.url is None:
                _sampling(judge, is_deterministic)
                key = (*judge.options.engine_key, judge.num_devices)
                found[key] = found[key] if key in found else JudgeEngine.of(judge)
                found[key] = found[key].checked(judge, each)
                if judge not in found[key].judges:
                    found[key].judges.append(judge)
    return found


def _where(own: int | None) -> str:
    return f"on {counted(own, 'device')} of its own" if own else "on the devices of the rollouts"


def _gib(engine: Engine) -> float:
    return max(sum(parts.values()) for parts in engine.memory_bytes()) / 2**30


def _engine(model: RewardModel) -> RliteTrainEngine:
    return RliteTrainEngine(scorer_module(model.path, model.what, model.label))
