from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.errors import ConfigError, DataError
from rlite.rollout import (
    CollectorOptions,
    EnvironmentRaised,
    EnvironmentTimeout,
    GenerationHyperparameters,
    GymEnvironment,
    GymWorkflow,
    LLMRequest,
    RolloutCollector,
    ScriptedEngine,
)
from rlite.rollout.environments.file import is_gym_file
from rlite.runtime.sandbox.pool import close_shared_pool
from tests.games import PEERS, Countdown, Dice, Sometimes, Unseeded, gem_game, textarena_game

TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_token_id


@pytest.fixture(autouse=True, scope="module")
def _no_process_is_left() -> Iterator[None]:
    yield
    close_shared_pool()


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


HALF = ids("é")[0]


def run(
    answer: Any, make: Callable[..., Any] | Path = Dice, timeout: float = 60.0, in_process: bool = True, **options: Any
) -> Any:
    environment = GymEnvironment(make, timeout, num_processes=1, in_process=in_process)
    item = {"seed": 5, **{key: options.pop(key) for key in ("env_options", "seed") if key in options}}
    gconfig = GenerationHyperparameters(max_new_tokens=32)
    workflow = GymWorkflow(environment, gconfig, options.pop("tokenizer", TOKENIZER), **options)
    return asyncio.run(workflow.arun_episode(ScriptedEngine(answer), item))


def expected_numbers(seed: int, count: int) -> list[str]:
    drawn, also = random.Random(seed), np.random.RandomState(seed)
    return [f"{drawn.random()} {also.random()}" for _ in range(count)]


@pytest.mark.parametrize("in_process", [True, False])
def test_turns_are_appended_token_by_token_and_rewarded_each(in_process: bool) -> None:
    answers = [[*ids("a"), HALF, END], ids("b"), [*ids("c"), END]]  # half a character is no UTF-8
    options = {"num_steps": 3}
    row = run(answers, in_process=in_process, env_options=options, system_prompt="Play.")
    first, second, third = expected_numbers(5, 3)
    system = [{"role": "system", "content": "Play."}, {"role": "user", "content": first}]
    prompt = TOKENIZER.apply_chat_template(system, add_generation_prompt=True, return_dict=False)
    one = ids(f"\n<|im_start|>user\na\ufffd|{second}<|im_end|>\n<|im_start|>assistant\n")
    two = ids(f"<|im_end|>\n<|im_start|>user\na\ufffdb|{third}<|im_end|>\n<|im_start|>assistant\n")
    parts = [prompt, answers[0], one, answers[1], two, answers[2]]
    assert row["input_ids"].tolist() == [[*chain(*parts)]]
    assert row["loss_mask"].int().tolist() == [[index % 2 for index, part in enumerate(parts) for _ in part]]
    ends = [sum(map(len, parts[: 2 * turn])) - 1 for turn in (1, 2, 3)]
    assert row["token_rewards"][0].nonzero()[:, 0].tolist() == ends
    assert (row["rewards"].item(), row["num_turns"].item(), row["turn_limited"].item()) == (1.5, 3, 0)


def test_episode_depends_only_on_its_seed() -> None:
    environment = GymEnvironment(Dice, num_processes=1)

    async def episode(seed: int, pause: asyncio.Event | None = None) -> list[str]:
        async with environment.episode(seed, {"num_steps": 3}) as game:
            said = [game.observation]
            for _ in range(2):
                said.append((await game.step("")).observation.strip("|"))
        return said

    async def unseeded(seed: int) -> str:
        async with GymEnvironment(Unseeded, num_processes=1).episode(seed) as game:
            return game.observation

    async def both() -> list[list[str]]:
        return list(await asyncio.gather(episode(1), episode(2), episode(1)))

    assert asyncio.run(both()) == [expected_numbers(seed, 3) for seed in (1, 2, 1)]
    before = random.getstate()
    assert asyncio.run(unseeded(7)) == str(random.Random(7).random()), "also what its factory draws"
    assert random.getstate() == before, "the program's own are left alone"


def test_raw_observations_follow_each_other_without_a_template() -> None:
    row = run([ids("a"), ids("b")], is_chat=False, system_prompt="q ")
    first, second = expected_numbers(5, 2)
    assert TOKENIZER.decode(row["input_ids"][0]) == f"q {first}aa|{second}b"
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    assert run([ids("a"), ids("b")], tokenizer=tokenizer, system_prompt="q ")["input_ids"].equal(row["input_ids"])
    with pytest.raises(ConfigError, match="no chat template"):
        run([ids("a")], tokenizer=tokenizer, is_chat=True)


def test_max_turns_and_max_length_end_an_episode() -> None:
    options = {"num_steps": 99}
    row = run([ids("a")], max_turns=2, env_options=options)
    assert (row["num_turns"].item(), row["turn_limited"].item()) == (2, 1)
    row = run([ids("a")], max_length=200, max_turns=99, env_options=options)
    assert row["turn_limited"].item() == 0
    assert row["truncated"].item()
    assert row["loss_mask"][0, -1], "what cannot be answered is dropped"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise", "ValueError: no such move"),
        ("exit", "raised SystemExit: game over"),
        ("reset", r"reset\(\) returned \(3, \{\}\); expected \(observation, info\)"),
        ("four", r"step\(\) returned \('x', 1.0, False, \{\}\); expected \(observation, reward, terminated"),
        ("nan", "returned the reward nan; expected a finite number"),
        ("text", "returned the observation None; expected a text"),
        ("flag", r"terminated, truncated = \['no', False\]; expected two booleans"),
    ],
)
def test_an_environment_that_raises_or_answers_nonsense_is_a_reason(fault: str, message: str) -> None:
    with pytest.raises(EnvironmentRaised, match=message) as raised:
        run([ids("a")], env_options={"fault": fault})
    assert getattr(raised.value, "__notes__", []) == ([] if fault == "reset" else ["turn 1, action: 'a'"])


def test_a_step_that_hangs_is_ended() -> None:
    with pytest.raises(EnvironmentTimeout, match=r"Dice ran for more than 1\.5 s; its process was killed"):
        run([ids("a")], in_process=False, timeout=1.5, env_options={"fault": "hang"})


def test_an_environment_that_cannot_be_pickled_runs_in_process() -> None:
    with pytest.raises(EnvironmentRaised, match=r"Dice cannot be kept as bytes .* run it with in_process=True"):
        run([ids("a")], in_process=False, env_options={"fault": "lock"})
    assert run([ids("a")], env_options={"fault": "lock"})["num_turns"].item() == 2


def test_missing_parts_of_rows_and_factories_are_named() -> None:
    for seed in (None, -1, "3", 0.5):
        with pytest.raises(DataError, match="expected a seed, a whole number from 0"):
            run([ids("a")], seed=seed)
    with pytest.raises(EnvironmentRaised, match=r"make\(\) returned \[\]; expected an environment with reset"):
        run([ids("a")], make=list)
    with pytest.raises(EnvironmentRaised, match="unexpected keyword argument 'colour'"):
        run([ids("a")], env_options={"colour": 1})


def test_a_file_with_make_is_an_environment(tmp_path: Path) -> None:
    path = tmp_path / "echo.py"
    path.write_text(
        "class Echo:\n"
        "    def reset(self, seed):\n        self.seed = seed\n        return 'say', {}\n"
        "    def step(self, action):\n        return '', len(action) + self.seed, True, False, {}\n"
        "def make(**options):\n    return Echo(**options)\n"
    )
    assert is_gym_file(path)
    environment = GymEnvironment(path, num_processes=1)
    environment.check()
    assert run([ids("abc")], make=path, in_process=False)["rewards"].item() == 8.0
    path.write_text("async def step(state, action, extra_info): ...\ndef make(): ...")
    assert not is_gym_file(path), "a file with a step is an environment of its own"
    path.write_text("from elsewhere import make")
    assert is_gym_file(path)
    path.write_text("def make(")
    with pytest.raises(ConfigError, match="is no Python file"):
        is_gym_file(path)
    path.write_text("make = 3")
    with pytest.raises(EnvironmentRaised, match="expected `def make"):
        GymEnvironment(path).check()


def test_an_environment_that_raises_costs_its_own_group_and_the_run_goes_on() -> None:
    environment = GymEnvironment(Sometimes, in_process=True)
    workflow = GymWorkflow(environment, GenerationHyperparameters(max_new_tokens=4), TOKENIZER)
    collector = RolloutCollector(ScriptedEngine([ids("a")]), CollectorOptions(request_retries=1))
    try:
        batch = collector.rollout_batch([{"seed": seed} for seed in range(9)], workflow, group_size=2)
        assert len(batch) == 2 * 6
        assert collector.failed_attempts["raised"] >= 6
    finally:
        collector.close()


def test_a_textarena_game_is_played_by_the_same_workflow() -> None:
    requests: list[LLMRequest] = []

    def answer(request: LLMRequest) -> list[int]:
        requests.append(request)
        return ids("m;")

    row = run(answer, make=Countdown, is_chat=False)
    assert TOKENIZER.decode(row["input_ids"][0]) == "from 5m;after m;m;"
    assert row["rewards"].item() == 0.75
    row = run(answer, make=Countdown, is_chat=False, env_options={"wrapped": True})
    assert TOKENIZER.decode(row["input_ids"][0]) == "<from 5>m;<m;><after m;>m;"


@pytest.mark.parametrize(("make", "form"), [(gem_game, r"\boxed{%d}"), (textarena_game, "[%d]")])
def test_games_that_others_wrote_are_played_to_their_end(make: Any, form: str) -> None:
    if make is gem_game and not (PEERS / "gem").is_dir():
        pytest.skip(f"gem is not in {PEERS}: `make test` installs it")

    def answer(request: LLMRequest) -> list[int]:
        return [*ids(form % (TOKENIZER.decode(request.input_ids).count("assistant\n"))), END]

    rows = [run(answer, make=make, in_process=False, max_turns=30) for _ in range(2)]
    assert rows[0]["input_ids"].equal(rows[1]["input_ids"]), "one seed, one game"
    assert 0 < rows[0]["rewards"].item() <= 1
    assert rows[0]["num_turns"].item() > 1
