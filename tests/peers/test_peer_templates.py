"""Turns of real chat templates, against the same templates with generation marks that TRL made for training."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.data.chat.masks import ChatEncoder

pytestmark = pytest.mark.peers
FOLDER = Path(sys.prefix) / "peers/trl/chat_templates"
TOKEN = re.compile(r"<[|｜][^|｜<>{}'\"]{1,40}[|｜]>|<(?:start|end)_of_turn>")
HEADER = re.compile(r"^(<\|start\|>assistant|<｜Assistant｜>)")
CALL = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}
PLAIN = [("user", "a b"), ("assistant", "c"), ("user", "d"), ("assistant", " e f")]
ANSWERED: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in PLAIN]
CALLED = [
    ANSWERED[0],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "clock", "content": "noon"},
    ANSWERED[3],
]
WITH_CALLS = ["gptoss", "muse_glimmer", "qwen2_5", "qwen3_instruct_2507", "qwen3_vl"]
WITHOUT = ["cohere", "cohere2", "deepseekv3", "gemma", "gemma3", "lfm2", "llama3", "qwen2_5_vl"]


def turns(name: str, messages: list[dict[str, Any]]) -> list[str]:
    template = (FOLDER / f"{name}.jinja").read_text()
    tokenizer = byte_tokenizer()
    tokens = [AddedToken(token, special=True, normalized=False) for token in sorted({*TOKEN.findall(template)})]
    tokenizer.add_tokens(tokens)
    tokenizer.chat_template, tokenizer.bos_token = template, "<|endoftext|>"
    (chat,) = ChatEncoder(tokenizer).encode([messages], [name])
    return [tokenizer.decode(chat.input_ids[start:end]).strip() for start, end in chat.turns]


@pytest.mark.skipif(not FOLDER.exists(), reason="TRL is not installed")
@pytest.mark.parametrize("name", [*WITH_CALLS, *WITHOUT])
def test_turns_without_marks_are_those_that_training_templates_mark(name: str) -> None:
    for messages in (ANSWERED, CALLED) if name in WITH_CALLS else (ANSWERED,):
        ours, theirs = turns(name, messages), turns(f"{name}_training", messages)
        assert len(ours) == len(theirs) == 2
        for own, marked in zip(ours, theirs, strict=True):  # some of TRL's marks hold the header as well
            assert HEADER.sub("", marked).strip() == own
