"""A tokenizer whose chat template shows tools, and answers of a scripted model."""

from __future__ import annotations

import json
from typing import Any

from rlite.assembly.quickstart.run import byte_tokenizer

TEMPLATE = (  # as Qwen2.5's
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    '<tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n{% endif %}'
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user"
    "{% endif %}<tool_response>{{ message.content }}</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENIZER = byte_tokenizer()
TOKENIZER.chat_template = TEMPLATE


def said(text: str) -> list[int]:
    """Tokens of an answer."""
    return [*TOKENIZER(text, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]


def called(name: str, **arguments: Any) -> list[int]:
    """Tokens of a call of a tool."""
    return said(f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>")


def text_of(rows: Any) -> str:
    """Text of the first row."""
    return TOKENIZER.decode(rows["input_ids"][0].tolist())
