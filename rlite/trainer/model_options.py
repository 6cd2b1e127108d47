"""Options of the commands that use a model: `rlite generate` and `rlite merge`. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt

from rlite.config import Count, Natural, Options, Share
from rlite.types import GenerationHyperparameters


class AnswerOptions(Options):
    """The sampling of answers on the command line."""

    max_new_tokens: Count = 1024
    """longest answer in tokens, in each turn"""
    temperature: Annotated[float, Ge(0)] | None = None
    """0 is greedy; default: 0 with samples=1, else 1"""
    top_p: Annotated[Share, Gt(0)] = 1.0
    """1 is off"""
    top_k: Natural = 0
    """0 is off"""
    stop: list[str] = []
    """texts that end an answer"""

    def gconfig(self, **changes: Any) -> GenerationHyperparameters:
        """Return these options as a request takes them, with changes."""
        given = {name: getattr(self, name) for name in AnswerOptions.model_fields}
        return GenerationHyperparameters(**{**given, "stop": tuple(self.stop), **changes})


class GenerateConfig(AnswerOptions):
    """Options of `rlite generate MODEL "PROMPT"`."""

    help_example: ClassVar[str] = 'runs/sft "What is 2+3?" temperature=0'
    help_first: ClassVar[tuple[str, ...]] = ("prompt", "prompt_file", "chat", "system_prompt", "n")

    model: str
    """folder of a model or of a run (its newest model), or hub name; the first argument without a key"""
    prompt: str = ""
    """the prompt; the second argument without a key"""
    prompt_file: str | None = None
    """text file with one prompt in each line, - is the standard input; in place of prompt"""
    chat: bool | None = None
    """true: the prompt is the user's message in the model's chat template; null: true if the model has a template"""
    system_prompt: str | None = None
    """message of the system before the prompt, in a chat"""
    chat_template_options: dict[str, Any] = {}
    """options of the chat template, such as {enable_thinking: false}"""
    n: Count = 1
    """answers to each prompt"""
    max_new_tokens: Count = 512
    """longest answer in tokens"""
    temperature: Annotated[float, Ge(0)] = 1.0
    """0 is greedy"""
    seed: int | None = None
    """seed of the sampling; null draws one"""
    executor: str = "torch"
    """inference executor"""
    tp_size: Count = 1
    """devices that share the model"""
    dtype: str | None = None
    """type of the weights; default: the checkpoint's"""
    launcher: Literal["inprocess", "torchrun", "ray"] | None = None
    """launcher of the workers; default: one process"""

    def problems(self) -> Iterator[str]:
        """Yield a message for a prompt that is missing or given twice, and for options of a chat without one."""
        if bool(self.prompt) == (self.prompt_file is not None):
            yield 'prompt: expected a prompt, as in `rlite generate MODEL "PROMPT"`, or prompt_file=FILE, and not both'
        if self.chat is False and (self.system_prompt is not None or self.chat_template_options):
            yield "chat=false: system_prompt and chat_template_options are options of a chat; leave them or chat out"


class MergeConfig(Options):
    """Options of `rlite merge ADAPTER OUT`."""

    help_example: ClassVar[str] = "runs/sft/latest/adapter merged"

    adapter: str
    """folder of a PEFT adapter, or of a run or an export with one; the first argument without a key"""
    out: str
    """folder to write, which must not exist or be empty; the second argument without a key"""
    base_model: str | None = None
    """folder or hub name of the model that the adapter belongs to; default: the adapter's config names it"""
