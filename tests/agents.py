"""Common code of the tests of agents: chat templates, a scripted engine, and a record of its requests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.rollout import ScriptedEngine
from rlite.types import LLMRequest

WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Call them as <tool_call>JSON</tool_call>.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '\n<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML with calls of tools, as Qwen2.5 has them"""
FORGETTING = (
    "{% set ns = namespace(last=0) %}"
    "{% for message in messages if message.role == 'user' %}{% set ns.last = loop.index %}{% endfor %}"
    "{% set ns.count = 0 %}{% for message in messages %}"
    "{% if message.role == 'user' %}{% set ns.count = ns.count + 1 %}{% endif %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and ns.count < ns.last %}{{ message.content.split('</think>')[-1].lstrip() }}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML that drops the thoughts before the last question, as Qwen3 does"""
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def tokenizer_with(template: str | None = None) -> Any:
    """The byte tokenizer, with another chat template."""
    tokenizer = byte_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


class Speaker(ScriptedEngine):
    """Says the texts one after the other; `asked` has prompt and answer of each of its `requests`, in tokens."""

    def __init__(self, texts: Sequence[str], tokenizer: Any, latency: float = 0.0, version: int = 0) -> None:
        self.asked: list[tuple[list[int], list[int]]] = []
        self.requests: list[LLMRequest] = []
        script = itertools.cycle(texts)

        def answer(request: LLMRequest) -> list[int]:
            tokens = [*tokenizer(next(script), add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            tokens = tokens[: request.gconfig.max_new_tokens]
            self.requests.append(request)
            self.asked.append((list(request.input_ids), tokens))
            return tokens

        super().__init__(answer, latency=latency, version=version)

    @property
    def sequences(self) -> list[list[int]]:
        """Prompt and answer of each request."""
        return [prompt + output for prompt, output in self.asked]
