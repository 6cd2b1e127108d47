"""Signatures of reward functions are distinguished, and their columns are checked, before anything is built."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from rlite.errors import ConfigError, DataError
from rlite.rollout import RewardFunction, from_trl, from_verl
from rlite.rollout.rewards.configured_rewards import adapt, check_columns

CALL = {"prompt": "2+2=", "completions": "4", "prompt_ids": [1], "completion_ids": [2]}


def ours(prompt, completions, prompt_ids, completion_ids, answer, **data):
    return float(completions == answer)


def ours_without_rest(prompt, completions, *, answer):
    return float(completions == answer)


def ours_by_annotation(completions: str, answer: str, **data: Any) -> float:
    return float(completions == answer)


def trl(prompts, completions, answer, **columns):
    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]


def trl_without_rest(completions, answer):
    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]


async def trl_async(completions, answer, trainer_state, log_metric, **columns):
    log_metric("length", 1.0)
    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]


def verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth)}


def verl_short(solution_str, ground_truth, method="strict"):
    return float(solution_str == ground_truth)


@pytest.mark.parametrize(
    ("fn", "kind"),
    [
        *((fn, "rlite") for fn in (ours, ours_without_rest, ours_by_annotation, from_trl(trl), from_verl(verl))),
        *((fn, "TRL") for fn in (trl, trl_without_rest, trl_async)),
        *((fn, "verl") for fn in (verl, verl_short, partial(verl, extra_info={}))),
    ],
)
def test_each_signature_gets_what_it_names(fn: Callable[..., Any], kind: str) -> None:
    adapted = adapt(fn, "reward.path=my.py:fn")
    assert adapted.kind == kind
    row = {"answer": "4", "reward_model": {"ground_truth": "4"}, "other": None}
    assert asyncio.run(RewardFunction(adapted.fn, in_process=True)(**CALL, **row)) == 1.0


def test_functions_of_trl_get_messages_if_the_row_has_some() -> None:
    def chat(prompts, completions, **columns):
        return [float(prompts == [[{"role": "user"}]] and completions[0][0] == {"role": "assistant", "content": "4"})]

    reward = RewardFunction(adapt(chat, "reward").fn, in_process=True)
    assert asyncio.run(reward(**CALL, messages=[{"role": "user"}])) == 1.0
    assert asyncio.run(reward(**CALL)) == 0.0


@pytest.mark.parametrize(
    "fn",
    [
        lambda text, gold: 1.0,
        lambda **columns: [1.0],
        lambda completions, /, **columns: [1.0],
        lambda data_sources, solution_strs, ground_truths, extra_infos: [1.0],
        lambda solution_str, ground_truth, strictness: 1.0,
        lambda prompt, completion: 1.0,
        max,
    ],
)
def test_another_signature_is_refused_with_the_three_that_are_accepted(fn: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"reward\.path=my\.py:fn: .*\(.*\) has none of the accepted") as refused:
        adapt(fn, "reward.path=my.py:fn")
    for signature in ("fn(prompt, completions, prompt_ids", "fn(prompts, completions, **columns)", "compute_score("):
        assert signature in str(refused.value)


@pytest.mark.parametrize("fn", [ours, trl, trl_without_rest])
def test_a_column_that_is_not_there_is_refused_with_the_nearest(fn: Callable[..., Any]) -> None:
    adapted = adapt(fn, "reward")
    check_columns(adapted, [{"prompt": "a", "answer": 1, "more": 2}], "reward.path=f", "train_data")
    with pytest.raises(DataError, match=r"train_data, row index 1: no column 'answer', .* did you mean 'anwser'\?"):
        check_columns(adapted, [{"answer": 1}, {"prompt": "a", "anwser": 1}], "reward.path=f", "train_data")


def test_rows_of_verl_need_a_ground_truth_and_no_data_source() -> None:
    adapted = adapt(verl, "reward")
    for row in ({"reward_model": {"style": "rule", "ground_truth": "4"}}, {"ground_truth": "4"}):
        check_columns(adapted, [row], "reward.path=f", "train_data")
    with pytest.raises(DataError, match=r"no column 'ground_truth', .*verl's signature.*known: answer, prompt"):
        check_columns(adapted, [{"prompt": "a", "answer": "4"}], "reward.path=f", "train_data")


# -- decorators, caches and classes ------------------------------------------------------------------------------------


class Scorer:
    def __call__(self, prompt, completions, **row):
        return 1.0

    def score(self, prompt, completions, **row):
        return 1.0


class CachedScorer:
    @functools.lru_cache  # noqa: B019 - as a user writes it
    def __call__(self, prompt, completions, **row):
        return 1.0


def passing_on(function):
    @functools.wraps(function)
    def wrapper(*args, **keywords):
        return function(*args, **keywords)

    return wrapper


def of_the_text(function):
    @functools.wraps(function)
    def wrapper(prompt, completions):
        return function(prompt, completions)

    return wrapper


def of_one(prompt, completions, **row):
    return 1.0


def of_text_alone(completions: str, prompt, answer):
    return 1.0


def of_lists(completions, **columns):
    return [1.0] * len(completions)


CACHED = {
    "cache": functools.cache(of_one),
    "lru_cache": functools.lru_cache(maxsize=9)(of_one),
    "TRL": functools.cache(of_lists),
    "verl": functools.cache(verl),
    "partial": partial(functools.cache(of_one)),
    "callable object": CachedScorer(),
    "below a decorator": passing_on(functools.cache(of_one)),
    "above a decorator": functools.cache(passing_on(of_one)),
    "ids": functools.cache(ours),
}


@pytest.mark.parametrize("kind", CACHED)
def test_a_cache_whose_keys_would_be_lists_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"reward.path=x: functools.cache refuses lists and dicts"):
        adapt(CACHED[kind], "reward.path=x")


CALLABLE = {
    "cache of texts": functools.cache(of_text_alone),
    "cache of verl's texts": functools.cache(verl_short),
    "decorator of fewer arguments above a cache": of_the_text(functools.cache(of_one)),
    "decorator of fewer arguments": of_the_text(of_one),
    "decorator": passing_on(of_one),
    "partial": partial(of_one, more=1),
    "object": Scorer(),
    "method": Scorer().score,
}


@pytest.mark.parametrize("kind", CALLABLE)
def test_what_is_accepted_can_be_called(kind: str) -> None:
    adapted = adapt(CALLABLE[kind], "reward.path=x")
    call = {**CALL, "answer": "4", "ground_truth": "4"}
    assert asyncio.run(RewardFunction(adapted.fn, in_process=True)(**call)) == 1.0


def test_a_class_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reward.path=x: Scorer is a class; name a function, or an object of the"):
        adapt(Scorer, "reward.path=x")
