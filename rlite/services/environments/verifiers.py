"""Tasksets and harnesses of verifiers as a workflow: what their model reads and writes is recorded exactly.

worker process: taskset, harness, scoring ──tokens──> loopback route with the token of the episode ──> engine
                                          trace ──> the recorded turns of its branches, rewarded ──> trajectory
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Unpack

from tensordict import TensorDict

from rlite.data.chat.template import Tokenizer
from rlite.errors import ConfigError
from rlite.rollout.environments.tool_episodes import task_index
from rlite.rollout.environments.workflow import ProcessOptions, sandboxed
from rlite.rollout.failures import EnvironmentRaised
from rlite.rollout.rewards.score import Reward, as_number
from rlite.rollout.workflow import RolloutWorkflow, of_trajectory
from rlite.runtime.sandbox.function import SandboxFunction
from rlite.services.endpoint.endpoint import AgentEndpoint
from rlite.services.endpoint.recording import Turn
from rlite.services.endpoint.session import AgentSession
from rlite.services.environments.verifiers_calls import VerifiersFunction
from rlite.types import AsyncInference, GenerationHyperparameters

OLDEST, REMEDY = (0, 4), "pip install 'rlite[verifiers]'"


def check_version() -> None:
    """Check that a version of verifiers is installed whose contract is `verifiers.v1`."""
    try:
        found = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f"an environment of verifiers needs the package verifiers: {REMEDY}") from error
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        raise ConfigError(f"verifiers {found} is installed, and its environments have no verifiers.v1: {REMEDY}")


class Trace(NamedTuple):
    """The end of one agent's run in an episode, as its process has told it."""

    reward: float
    rewards: dict[str, float]
    errors: list[str]
    is_trainable: bool
    branches: list[list[int]]
    """tokens of each line of conversation, from its beginning to its end"""


@dataclass(frozen=True)
class VerifiersEpisode:
    """The end of an episode."""

    errors: list[str]
    traces: list[Trace]

    @classmethod
    def read(cls, answer: Any) -> VerifiersEpisode | None:
        """Return the end of an episode in the answer of a process; None for any other answer."""
        try:
            errors, traces = answer
            return cls([str(error) for error in errors], [_trace(*trace) for trace in traces])
        except (AttributeError, TypeError, ValueError):  # of a process that is not trusted
            return None

    @property
    def failure(self) -> str:
        """The error of an episode, or of one of its traces, that has failed; "" if none has."""
        told = [error for trace in self.traces for error in trace.errors] + self.errors
        return told[0] if told else ""


def _trace(reward: Any, rewards: Any, errors: Any, is_trainable: Any, branches: Any) -> Trace:
    numbers = {str(name): as_number(value) for name, value in rewards.items()}
    if None in (as_number(reward), *numbers.values()):
        raise ValueError("a reward is no finite number")
    lines = [array("I", tokens).tolist() for tokens in branches]
    return Trace(float(reward), numbers, [str(one) for one in errors], is_trainable is True, lines)  # type: ignore[arg-type]


def _same(answer: Any) -> Any:
    return answer


class VerifiersEnvironment:
    """An environment of verifiers 0.4 or newer, whose episodes run in processes that can be killed.

    Args:
        environment: id of an installed taskset, path of a file with one, or verifiers' config of an environment, such
            as {"taskset": {"id": "my-taskset"}, "agent": {"harness": {"id": "null"}}}.
        timeout: seconds for one episode. A late episode is killed with everything that it has started.
        renderer: verifiers' config of the renderer, such as {"name": "qwen3"}. Default: verifiers' choice for the
            model; its fallback for unknown models renders no tools.
        **options: see `ProcessOptions`. `num_processes` is the number of episodes that run at the same time.

    Raises:
        ConfigError: verifiers is missing or too old, or an option is out of range.
    """

    def __init__(
        self,
        environment: str | Mapping[str, Any],
        timeout: float = 600.0,
        *,
        renderer: Mapping[str, Any] | None = None,
        **options: Unpack[ProcessOptions],
    ) -> None:
        check_version()
        config = {"taskset": {"id": environment}} if isinstance(environment, str) else dict(environment)
        if not isinstance(config.get("taskset"), Mapping) or not config["taskset"].get("id"):
            raise ConfigError(f"verifiers environment {config}: expected taskset.id, the id of a taskset")
        self.name = f"the verifiers environment {config['taskset']['id']}"
        self._config, self._renderer = config, dict(renderer) if renderer else None
        self._sandboxed = partial(sandboxed, timeout=timeout, what=self.name, **options)
        self._functions: dict[str, SandboxFunction] = {}

    def check(self) -> int | None:
        """Load the environment in its process. Do not call this method from within an event loop.

        Returns:
            The number of its tasks; None if they do not end.

        Raises:
            EnvironmentFailure: it cannot be loaded.
            ConfigError: it has no tasks.
        """
        [num_tasks] = asyncio.run(self._sandboxed(VerifiersFunction(self._config)).ask(_same, method="check"))
        if num_tasks == 0:
            raise ConfigError(f"{self.name} has no tasks")
        return num_tasks

    async def run(self, folder: str, **arguments: Any) -> VerifiersEpisode:
        """Return the end of one episode.

        Args:
            folder: the tokenizer's.
            **arguments: those of `LoadedEnvironment.run` but the renderer.

        Raises:
            EnvironmentRaised: verifiers reports an error. Other classes of EnvironmentFailure: the process failed.
        """
        if folder not in self._functions:
            renderer = {"renderer_model_name": folder, "renderer": self._renderer}
            self._functions[folder] = self._sandboxed(VerifiersFunction(self._config, renderer))
        episode = await self._functions[folder].ask(VerifiersEpisode.read, method="run", **arguments)
        if episode.failure:
            raise EnvironmentRaised(f"{self.name}: {episode.failure}")
        return episode


class VerifiersWorkflow(RolloutWorkflow):
    """A workflow that trains any taskset and harness of verifiers.

    The item has a `task`, the place of a task in the taskset, or a `seed`, which means the same; places beyond the last
    task begin anew. Every branch of the episode's traces is a row, with the tokens, log-probabilities and versions of
    the engine; a turn that several branches share is trained on once. Rows of one episode are one member of the group,
    whose reward is the sum of its traces' rewards. Traces of agents that verifiers marks as not trainable are left out,
    and so are agents that play another model. A trace with an error is a failure with its reason, not a reward of zero.

    Args:
        environment: a VerifiersEnvironment, or the first argument of one.
        gconfig: sampling parameters of each turn. They override those of the environment.
        tokenizer: the model's tokenizer; its folder (`name_or_path`) is what verifiers' renderer loads.
        max_length: number of tokens of one sequence at which generation stops. None is the engine's maximum.

    Raises:
        ConfigError: an option is out of range, or verifiers is missing or too old.
    """

    needs_prompt = False

    def __init__(
        self,
        environment: VerifiersEnvironment | str | Mapping[str, Any],
        gconfig: GenerationHyperparameters | Mapping[str, Any],
        tokenizer: Tokenizer,
        max_length: int | None = None,
    ) -> None:
        if not isinstance(environment, VerifiersEnvironment):
            environment = VerifiersEnvironment(environment)
        self.environment = environment
        self.gconfig: GenerationHyperparameters = GenerationHyperparameters.from_mapping(gconfig)
        self.tokenizer, self.max_length = tokenizer, max_length
        self._endpoint = AgentEndpoint()

    async def arun_episode(self, engine: AsyncInference, data: dict[str, Any]) -> TensorDict:
        """Return the trajectory of one episode.

        Args:
            engine: generates the model's turns.
            data: the item, with `task` or `seed`.

        Raises:
            EnvironmentRaised: the episode failed. The message has verifiers' error.
            RliteError: the engine's error, if it was the engine that failed.
        """
        index = task_index(data, "the place of a task in the taskset, a whole number from 0")
        options: Any = {"max_length": self.max_length, "is_sampling_fixed": True}
        session = AgentSession(engine, self.tokenizer, self.gconfig, **options)
        folder = getattr(self.tokenizer, "name_or_path", "")
        sampling = {"max_tokens": self.gconfig.max_new_tokens, "temperature": self.gconfig.temperature}
        async with session.used(self._endpoint.serving) as access:
            asked = {"index": index, "model": access.model, "base_url": access.base_url, "key": access.api_key}
            episode = await self.environment.run(folder, **asked, sampling=sampling)
        return trajectory_of(session, episode.traces)


def trajectory_of(session: AgentSession, traces: Sequence[Trace]) -> TensorDict:
    """Return the recorded turns of an episode's trainable traces as a trajectory."""
    recording, left = session.recording, list(session.recording.completed())
    kept: set[Turn] = set()
    for trace in (trace for trace in traces if trace.is_trainable):
        turns = [turn for turn in left if any(_is_in(turn, branch) for branch in trace.branches)]
        left = [turn for turn in left if turn not in turns]
        kept.update(turns)
        if turns:
            recording.set_reward(turns[-1].id, trace.reward)
    recording.turns = [turn for turn in recording.turns if turn in kept]
    rows = session.export("concat")
    trained = [trace for trace in traces if trace.is_trainable]
    if len(trained) == 1:
        reward = Reward(trained[0].reward)
        reward.parts = trained[0].rewards if len(trained[0].rewards) > 1 else {}
        rows.update(of_trajectory(len(rows), rewards=reward))
    return rows


def _is_in(turn: Turn, branch: Sequence[int]) -> bool:
    """Return whether a line of conversation begins with what a turn has read and written."""
    size = len(turn.sequence)
    return size <= len(branch) and turn.sequence == branch[:size]
