"""Answers of a model on the command line.

    rlite generate MODEL "PROMPT" [temperature=0 max_new_tokens=64 n=4 ...]
    rlite generate runs/sft "PROMPT"                    the newest model of a run
    rlite generate MODEL prompt_file=prompts.txt        one prompt in each line; prompt_file=- reads the standard input

The answers go to the standard output. A single answer is printed as it is generated.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TextStreamer

import rlite
from rlite import config
from rlite.assembly.commands.options import GenerateConfig
from rlite.assembly.launch import init_devices
from rlite.data.chat.template import has_chat_template
from rlite.engine.inference import RliteInferenceEngine
from rlite.errors import ConfigError
from rlite.nn.pretrained import load_config
from rlite.rollout import workflow
from rlite.trainer.model.prompt_lengths import check_ids, vocab_size_of
from rlite.trainer.options import LaunchOptions
from rlite.types import GenerationHyperparameters, LLMRequest

_SCORER = "ForSequenceClassification"


def main(argv: Sequence[str]) -> None:
    """Print answers of a model."""
    options = config.load(GenerateConfig, GenerateConfig.arguments(argv))
    folder = model_folder(options.model)
    prompts = read_prompts(options)
    init_devices(LaunchOptions(launcher=options.launcher, num_devices=options.tp_size))
    check_writes(folder)
    engine = RliteInferenceEngine(folder, executor=options.executor)
    items = [prompt_item(prompt, engine.tokenizer, options.chat, options.system_prompt) for prompt in prompts]
    tokens = [workflow.prompt_ids(item, engine.tokenizer, options.chat_template_options) for item in items]
    vocab_size = vocab_size_of(folder)
    for ids in tokens:
        check_ids(ids, vocab_size)
    dtype: dict[str, Any] = {} if options.dtype is None else {"dtype": options.dtype}
    engine.build(tensor_parallel_size=options.tp_size, **dtype, **options.executor_options)
    sampling = options.gconfig(seed=secrets.randbits(31) if options.seed is None else options.seed)
    if len(tokens) * options.n == 1 and not options.stop:
        asyncio.run(stream(engine, tokens[0], sampling))
    else:
        print_answers(engine, tokens, sampling.new(n_samples=options.n))
    rlite.shutdown()


def model_folder(given: str) -> str:
    """Return the model that a path means: of a run's folder, the newest model."""
    folder = Path(given).expanduser()
    if not folder.is_dir() or (folder / "config.json").exists():
        return given
    if (folder / "adapter_config.json").exists():
        raise ConfigError(f"model={given}: an adapter alone; make a model of it with `rlite merge {given} OUT`")
    if (folder / "latest" / "config.json").exists():
        return str(folder / "latest")
    if (folder / "config.yaml").exists():
        raise ConfigError(f"model={given}: a run that has not saved a model yet: it has no latest/")
    return given


def check_writes(model: str) -> None:
    """Check that a model writes text."""
    architectures = load_config(model).architectures or []
    if any(name.endswith(_SCORER) for name in architectures):
        raise ConfigError(f"model={model}: {architectures[0]} scores text and writes none; expected a causal model")


def read_prompts(options: GenerateConfig) -> list[str]:
    """Return the prompts that the options give."""
    if options.prompt_file is None:
        return [options.prompt]
    try:
        text = sys.stdin.read() if options.prompt_file == "-" else Path(options.prompt_file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompt_file={options.prompt_file}: {error}") from error
    prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ConfigError(f"prompt_file={options.prompt_file}: no prompt in it; expected one in each line")
    return prompts


def prompt_item(
    prompt: str, tokenizer: PreTrainedTokenizerBase, chat: bool | None, system_prompt: str | None = None
) -> dict[str, Any]:
    """Return a prompt as an item: `messages` of a chat, or a raw `prompt`.

    `chat`: whether the text is the user's message in a chat. None: if the tokenizer has a chat template.
    """
    has_template = has_chat_template(tokenizer)
    if not has_template and (chat or system_prompt is not None):
        raise ConfigError("chat=true and system_prompt need a chat template, which the model's tokenizer does not have")
    if not (has_template if chat is None else chat):
        return {"prompt": prompt}
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return {"messages": [*system, {"role": "user", "content": prompt}]}


async def stream(engine: RliteInferenceEngine, tokens: list[int], sampling: GenerationHyperparameters) -> None:
    """Print one answer while it is generated."""
    printer: Any = TextStreamer(engine.tokenizer, skip_special_tokens=True)
    reason, last = None, list[int]()
    async for chunk in engine.stream(LLMRequest(input_ids=tokens, gconfig=sampling)):
        reason = chunk.finish_reason
        made = [*last, *chunk.token_ids]
        said, last = made[:-1], made[-1:]
        if said:
            printer.put(torch.tensor(said))
    if last and reason != "stop":  # else the last token is the end token
        printer.put(torch.tensor(last))
    printer.end()
    if reason == "length":
        print(f"(ended by a limit: max_new_tokens={sampling.max_new_tokens}, or the model's context)", file=sys.stderr)


def print_answers(
    engine: RliteInferenceEngine, tokens: Sequence[list[int]], sampling: GenerationHyperparameters
) -> None:
    """Print all answers, each below a line with its number if there are several."""
    for number, output in enumerate(engine.generate(tokens, sampling), 1):
        for answer in output.outputs:
            if len(tokens) * sampling.n_samples > 1:
                print(f"--- prompt {number}, answer {answer.index + 1} of {sampling.n_samples}")
            print(answer.text)
