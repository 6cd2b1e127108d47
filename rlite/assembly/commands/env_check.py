"""`rlite env check SPEC`: plays an environment or a workflow with a scripted model, before a model is trained."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict

from rlite import config
from rlite.assembly.commands.doctor import Finding, tell
from rlite.assembly.commands.env_options import EnvConfig
from rlite.assembly.prints import Prints
from rlite.assembly.quickstart.run import CHATML, TURN_END, byte_tokenizer
from rlite.data.chat.template import with_template
from rlite.data.packs import check_has, check_trajectory, first_rows
from rlite.data.rows import check_prompts, read_source
from rlite.data.source import Source
from rlite.errors import ConfigError, RliteError
from rlite.imports import find_function
from rlite.nn.pretrained import load_tokenizer
from rlite.output import Result
from rlite.rollout import GenerationHyperparameters, RolloutWorkflow, ScriptedEngine
from rlite.rollout.environments.file import CONTRACTS, EnvironmentOptions, contract_of
from rlite.rollout.environments.tool_episodes import ToolEnvironmentWorkflow
from rlite.rollout.registry import WORKFLOWS
from rlite.rollout.tools.formats import ToolCall
from rlite.rollout.tools.workflow import ToolUseWorkflow
from rlite.runtime.sandbox.pool import close_shared_pool
from rlite.runtime.sandbox.prints import listening
from rlite.services.console.terminal import ConsoleReporter
from rlite.services.environments.contracts import contract_workflow
from rlite.trainer.rl.rollouts import TRAINED_ON, trajectory_rewards
from rlite.types import LLMRequest

TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
)
"""shows tools before ChatML's messages"""
CALLS = "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
TEXTS = ("", "yes", "0", "A", "I do not know.", "[1]", "{}", "left")
"""answers of a model that knows nothing"""
MISSING = re.compile(r"KeyError|missing .*argument")
"""failures that a column of the rows may mend"""
EXAMPLES: Mapping[str, Any] = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}
"""an argument of each type of JSON; others are texts"""


STEPS = {name: name for name in ("reset", "step", "reward", "close")} | {"make": "reset", "__aexit__": "close"}
STEPS |= dict.fromkeys(("call", "_call"), "a call of a tool")
"""steps of an episode by the names of methods that wait for them"""
LONGEST_BEGIN_S = 60.0
"""seconds for an environment to say its tools"""
CLOSING_S = 5.0
"""seconds for an episode to close after its time is up"""


@dataclass(frozen=True)
class Played:
    """One episode."""

    row: int
    script: int
    trajectory: TensorDict | None
    """None if the episode failed"""
    failure: str = ""


def main(argv: Sequence[str]) -> Result:
    """Print the findings.

    Returns:
        The findings; the exit status is 1 if something is wrong.
    """
    options = config.load(EnvConfig, EnvConfig.arguments(argv))
    try:
        console = ConsoleReporter(file=sys.stderr)
        with closing(console), listening(Prints(console, options, None, lambda episode: {}).take):
            return tell(check(options), "ready to train on")
    finally:
        close_shared_pool()


def check(options: EnvConfig) -> Iterator[Finding]:
    """Yield what is found in an environment, what is wrong first."""
    tokenizer = tokenizer_of(options)
    try:
        workflow = find_workflow(options, tokenizer)
    except RliteError as error:  # tools without a schema, a template that shows none, a file that cannot be imported
        yield Finding("loading", str(error), "FAILED")
        return
    yield Finding("loading", f"{options.spec}: {type(workflow).__name__}")
    rows = rows_of(options, workflow)
    if workflow.needs_prompt:
        check_prompts(rows, "data")
    pairs = [*itertools.product(range(len(rows)), range(options.episodes)), (0, 0)]  # the first one again, at the end
    played = [play(options, workflow, tokenizer, rows, *pair) for pair in pairs]
    yield from of_failures(played, "" if options.data.path else f"the rows have only {', '.join(rows[0])}")
    if good := [(each, each.trajectory) for each in played if each.trajectory is not None]:
        yield of_rewards([trajectory for _, trajectory in good], options)
        yield of_state(played)
        if is_environment(options.spec):
            yield from of_turns([trajectory for _, trajectory in good], options.max_turns)
        yield of_tokens([trajectory for _, trajectory in good], tokenizer)
        yield of_lines([trajectory for _, trajectory in good])


def tokenizer_of(options: EnvConfig) -> Any:
    """Return the model's tokenizer; without a model, one of bytes whose template shows tools."""
    if options.model is not None:
        tokenizer = load_tokenizer(options.model)
    else:
        tokenizer = byte_tokenizer()
        chatml = CHATML.replace("{{ message['content'] }}<|im_end|>", "{{ message.content }}" + CALLS + TURN_END)
        tokenizer.chat_template = TOOLS + chatml
    return with_template(tokenizer, options.data.chat_template_path, "data.chat_template_path")


def find_workflow(options: EnvConfig, tokenizer: Any) -> RolloutWorkflow:
    """Return the workflow that the argument names.

    Raises:
        ConfigError: there is none, or it is no workflow.
    """
    spec, gconfig = options.spec, GenerationHyperparameters(max_new_tokens=512)
    make: Callable[..., Any]
    if spec in WORKFLOWS:
        made = WORKFLOWS[spec](gconfig, tokenizer)
    elif is_environment(spec):
        made = contract_workflow(spec)(gconfig, tokenizer, max_turns=options.max_turns)
    elif ":" in spec:
        make = find_function(spec, f"spec={spec}")
        made = make(gconfig, tokenizer)
    else:
        forms = f"expected file.py, file.py:function, CONTRACT:NAME with a contract of {', '.join(CONTRACTS)}"
        raise ConfigError(f"spec={spec}: {forms}, or a workflow; {WORKFLOWS.unknown(spec)}")
    if not isinstance(made, RolloutWorkflow):
        raise ConfigError(f"spec={spec}: it returned {type(made).__name__}; expected a RolloutWorkflow")
    return made


def is_environment(spec: str) -> bool:
    """Return whether the argument names an environment, as rollout.env_path does."""
    return spec not in WORKFLOWS and (bool(contract_of(spec)[0]) or spec.endswith(".py"))


def rows_of(options: EnvConfig, workflow: RolloutWorkflow) -> list[dict[str, Any]]:
    """Return the rows to play."""
    data = options.data
    if data.path is not None:
        source = Source(data.path, "data", data.columns, data.map, data.system_prompt)
        return [dict(row) for row in read_source(source, "prompts")[: options.rows]]
    question = {"messages": [{"role": "user", "content": "What is 2+3?"}]} if workflow.needs_prompt else {}
    return [{"seed": number, **question} for number in range(options.rows)]


def play(
    options: EnvConfig, workflow: RolloutWorkflow, tokenizer: Any, rows: Sequence[Any], row: int, script: int
) -> Played:
    """Return one episode of a row, in which the model answers by a script.

    Args:
        options: time-out, and answers to try first.
        workflow: runs the episode.
        tokenizer: makes tokens of the answers.
        rows: all rows.
        row: number of the row.
        script: number of the script.
    """
    texts = script_of(options, workflow, rows[row], script)
    turns = itertools.count()

    def answer(request: LLMRequest) -> list[int]:
        text = texts[min(next(turns), len(texts) - 1)] or " "
        return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    late = ""

    async def run() -> Any:
        nonlocal late
        task = asyncio.ensure_future(workflow.arun_episode(ScriptedEngine(answer), dict(rows[row])))
        if not (await asyncio.wait([task], timeout=options.timeout))[0]:
            late = step_of(task.get_coro())
            task.cancel()
            await asyncio.wait([task], timeout=CLOSING_S)
            raise TimeoutError
        return task.result()

    try:
        found = asyncio.run(run())
        if found is None:
            return Played(row, script, None, "the workflow returned None, which drops the group")
        check_trajectory(found, f"the trajectory of {type(workflow).__name__}")
        check_has(found, *TRAINED_ON)
        return Played(row, script, found)
    except TimeoutError:
        where = f"{late} did not end" if late else "it did not end"
        return Played(row, script, None, f"an episode ran for more than {options.timeout:g} s (timeout): {where}")
    except Exception as error:  # of the user's code
        return Played(row, script, None, f"{type(error).__name__}: {error}")


def step_of(coroutine: Any) -> str:
    """Return what an episode waits for: reset, step, reward, close or a tool; "" if it is none of them."""
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        name, owner = frame.f_code.co_name, type(frame.f_locals.get("self")).__name__
        method = frame.f_locals.get("method")
        if name == "__call__" and "Reward" in owner:
            return "reward"
        if (step := method if isinstance(method, str) else name) in STEPS:
            return STEPS[step]
        coroutine = coroutine.cr_await
    return ""


def script_of(options: EnvConfig, workflow: RolloutWorkflow, row: Mapping[str, Any], script: int) -> list[str]:
    """Return the texts of the turns of an episode; the last one is repeated.

    Args:
        options: answers to try first.
        workflow: its tools are called, if it has some.
        row: its texts are tried, too.
        script: number of the script, which chooses the text of the first turn, or after a call of a tool.
    """
    own = [value for value in row.values() if isinstance(value, str) and value]
    known = [*options.answers, *map(str, (row.get(name) for name in ("answer", "solution") if name in row)), *own]
    texts = [*dict.fromkeys([*known, *TEXTS])]
    text = texts[script % len(texts)]
    schemas = schemas_of(workflow, row)
    if not schemas:
        return [text, *texts]
    calls = [example_call(schema, text) for schema in schemas]
    call = calls[script % len(calls)]
    written = json.dumps({"name": call.name, "arguments": call.arguments})
    return [f"<tool_call>{written}</tool_call>", text]


def schemas_of(workflow: RolloutWorkflow, row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the schemas of a workflow's tools; those of an environment are known when an episode begins."""
    if isinstance(workflow, ToolUseWorkflow):
        return workflow.toolbox.schemas
    if not isinstance(workflow, ToolEnvironmentWorkflow):
        return []

    async def begun() -> Sequence[Mapping[str, Any]]:
        async with asyncio.timeout(LONGEST_BEGIN_S), workflow.environment.episode(row) as episode:
            return list(episode.schemas)

    try:
        return asyncio.run(begun())
    except Exception:  # the episode itself reports it
        return []


def example_call(schema: Mapping[str, Any], text: str) -> ToolCall:
    """Return a call of a tool with arguments of the types that its schema names.

    Args:
        schema: schema of the tool.
        text: value of arguments that are texts.
    """
    function = schema["function"]
    properties = (function.get("parameters") or {}).get("properties") or {}
    values = {
        name: (each.get("enum") or [EXAMPLES.get(str(each.get("type")), text)])[0] for name, each in properties.items()
    }
    return ToolCall(function["name"], values)


def of_failures(played: Sequence[Played], lack: str = "") -> Iterator[Finding]:
    """Yield the causes of failed episodes, the most frequent first.

    Args:
        played: all episodes.
        lack: what the rows lack that a missing name may be, if they are not the user's.
    """
    causes = Counter(each.failure.partition("\n")[0][:500] for each in played if each.failure)
    for cause, count in causes.most_common(3):
        remedy = f" ({lack}; give yours with data.path=ROWS)" if lack and MISSING.search(cause) else ""
        yield Finding("episodes", f"{count} of {len(played)} failed: {cause}{remedy}", "FAILED")
    if not causes:
        yield Finding("episodes", f"{len(played)} ended without a failure")


def of_rewards(trajectories: Sequence[TensorDict], options: EnvConfig) -> Finding:
    """Return whether different answers have different rewards."""
    rewards = sorted({value for each in trajectories for value in trajectory_rewards(each).tolist()})
    if len(rewards) > 1:
        return Finding("rewards", f"{len(rewards)} different ones, from {rewards[0]:g} to {rewards[-1]:g}")
    remedy = (
        "name a right answer (answers='[...]'), or rows that have one (data.path=...), to see whether it is always so"
    )
    found = (
        f"all {len(trajectories)} episodes have the reward {rewards[0]:g}, whatever was answered, which teaches nothing"
    )
    return Finding("rewards", f"{found}; {remedy}", "note" if not options.answers else "FAILED")


def of_state(played: Sequence[Played]) -> Finding:
    """Return whether the first episode, played again after all others, goes as it did."""
    first, again = played[0].trajectory, played[-1].trajectory
    if (first is None) != (again is None):
        return Finding("state", "the first episode, played again at the end, ends otherwise: state leaks", "FAILED")
    if first is None or again is None:
        return Finding("state", "not compared: the first episode failed", "note")
    differing = [key for key in ("input_ids", "rewards") if not _same(first[key], again[key])]
    if differing:
        what = {"input_ids": "the model reads something else", "rewards": "the reward is another"}
        told = " and ".join(what[key] for key in differing)
        cause = "state leaks between episodes, or chance plays a part that the row's seed does not decide"
        return Finding("state", f"the same row with the same answers, at the end: {told}; {cause}", "FAILED")
    return Finding("state", "the same row with the same answers goes the same way after other episodes")


def _same(first: Any, second: Any) -> bool:
    return first.shape == second.shape and bool((first == second).all())


def of_tokens(trajectories: Sequence[TensorDict], tokenizer: Any) -> Finding:
    """Return whether sequences have the same tokens after decoding and encoding."""
    rows = [ids[mask.bool()].tolist() for each in trajectories for ids, mask in _rows(each)]
    odd = []
    for ids in rows:
        again = tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"]
        if again != ids:
            place = next((at for at, (a, b) in enumerate(zip(ids, again, strict=False)) if a != b), len(again))
            odd.append(tokenizer.decode(ids[max(place - 3, 0) : place + 3]))
    if not odd:
        return Finding("tokens", f"{len(rows)} sequences have the same tokens after decoding and encoding")
    told = f"{len(odd)} of {len(rows)} sequences change when their text is tokenised again, near {odd[0]!r}"
    return Finding(
        "tokens", f"{told}: rlite keeps the tokens, but a program that sends texts begins new branches", "note"
    )


def _rows(trajectory: TensorDict) -> Iterator[tuple[Any, Any]]:
    yield from zip(trajectory["input_ids"], trajectory["attention_mask"], strict=True)


def of_turns(trajectories: Sequence[TensorDict], played: int) -> Iterator[Finding]:
    """Yield the turns that episodes need, unless the environment counts its own, and the option of training."""
    if not (counted := [each for each in trajectories if "turn_limited" in each]):
        return
    most, default = max(int(each["num_turns"][0]) for each in counted), EnvironmentOptions().max_turns
    remedy = f"or more (its default: {default})"
    if num_cut := sum(bool(each["turn_limited"][0]) for each in counted):
        found = f"{num_cut} of {len(counted)} episodes did not end within the max_turns={played} of this check"
        yield Finding("turns", f"{found}; train with rollout.max_turns={played} {remedy}", "note")
    elif most > default:
        found = f"up to {most} in an episode (this check allows max_turns={played})"
        yield Finding("turns", f"{found}; train with rollout.max_turns={most} {remedy}", "note")
    else:
        yield Finding("turns", f"{most} in an episode: rollout.max_turns={default}, its default, is enough")


def of_lines(trajectories: Sequence[TensorDict]) -> Finding:
    """Return how many sequences an episode has, and whether the model's tokens are trained on."""
    if any(not each["loss_mask"].any() for each in trajectories):
        return Finding("sequences", "an episode has no token that is trained on (loss_mask is empty)", "FAILED")
    most = max(len(each) / len(first_rows(each)) for each in trajectories)
    if most > 1:
        told = "history is rewritten between turns (a template that drops thoughts, or an environment that does)"
        return Finding("sequences", f"up to {most:g} in a trajectory: {told}; each is a row, see adv.credit", "note")
    return Finding("sequences", "one in each trajectory")
