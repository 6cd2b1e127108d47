"""Turns that are continued token for token, for the ways in which common templates treat history."""

from __future__ import annotations

from typing import Any

import pytest

from rlite.assembly.quickstart.run import CHATML, byte_tokenizer
from rlite.services.endpoint.prompts import ChatPrompts
from rlite.services.endpoint.recording import Turn
from tests.agents import ADD, WITH_TOOLS

QUESTION = {"role": "user", "content": "a"}
NEXT = {"role": "user", "content": "b"}
# Phi-3 ends a conversation that waits for no answer with a token of its own.
ENDED = CHATML + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}"
# Qwen3 writes an empty thought before the last answer, if it has none, and none before earlier ones.
EMPTY_THOUGHT = CHATML.replace(
    "{{ message['content'] }}",
    "{% if loop.last and message['role'] == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ message['content'] }}",
)
# DeepSeek-R1 opens a thought for the model and leaves thoughts out of history.
OPENED = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
# gpt-oss ends the last answer with another token than earlier ones.
OTHER_END = CHATML.replace(
    "<|im_end|>\n{% endfor %}",
    "{% if loop.last and message['role'] == 'assistant' %}<|endoftext|>{% else %}<|im_end|>\n{% endif %}{% endfor %}",
)
TRIMMED = CHATML.replace("message['content'] }}", "message['content'] | trim }}")
NO_ANSWERS = "{% for message in messages if message.role == 'user' %}{{ message.content }}\n{% endfor %}"


def prompts(template: str) -> ChatPrompts:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return ChatPrompts(tokenizer)


def said(made: ChatPrompts, text: str, end: str = "<|im_end|>", answer: Any = None, tools: Any = None) -> Turn:
    """A turn that answers QUESTION with this text."""
    prompt = made.chat([QUESTION], tools, [])
    return Turn(
        id="1",
        prompt_ids=prompt.token_ids,
        output_ids=made.tokenizer(text + end)["input_ids"],
        logprobs=[],
        versions=[],
        finish_reason="stop" if end else "length",
        messages=[QUESTION],
        answer=answer or {"role": "assistant", "content": text},
        tools=tools,
        prompt_text=prompt.text,
        text=text,
    )


@pytest.mark.parametrize(
    ("template", "text", "end", "is_continued"),
    [
        (CHATML, "yes", "<|im_end|>", True),
        (CHATML, "yes", "", True),
        (CHATML, "yes", "<|endoftext|>", False),
        (ENDED, "yes", "<|im_end|>", True),
        (EMPTY_THOUGHT, "yes", "<|im_end|>", True),
        (OPENED, "hm</think>yes", "<|im_end|>", False),
        (OTHER_END, "yes", "<|im_end|>", True),
        (OTHER_END, "yes", "<|endoftext|>", False),
        (TRIMMED, "\n yes \n", "<|im_end|>", True),
        (NO_ANSWERS, "yes", "<|im_end|>", False),
    ],
)
def test_a_turn_is_continued_if_history_keeps_it(template: str, text: str, end: str, is_continued: bool) -> None:
    made = prompts(template)
    turn = said(made, text, end)
    messages = [QUESTION, turn.answer, NEXT]
    prompt = made.chat(messages, None, [turn])  # type: ignore[arg-type]
    rendered = made.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt.text == rendered
    assert prompt.parent is (turn if is_continued else None)
    if is_continued:
        assert prompt.token_ids[: len(turn.sequence)] == turn.sequence
    if text.strip() == text:
        assert made.tokenizer.decode(prompt.token_ids) == rendered


def test_calls_may_be_rendered_in_other_words_than_the_model_wrote() -> None:
    made = prompts(WITH_TOOLS)
    text = 'Hm.\n<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>'
    call = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turn = said(made, text, answer={"role": "assistant", "content": "Hm.", "tool_calls": [call]}, tools=[ADD])
    result = {"role": "tool", "content": "1", "tool_call_id": "call00001"}
    prompt = made.chat([QUESTION, turn.answer, result], [ADD], [turn])  # type: ignore[list-item]
    assert prompt.token_ids[: len(turn.sequence)] == turn.sequence
    added = made.tokenizer.decode(prompt.token_ids[len(turn.sequence) :])
    assert added == "\n<|im_start|>tool\n1<|im_end|>\n<|im_start|>assistant\n"
    assert made.chat([QUESTION, turn.answer, result], None, [turn]).parent is None, "other tools"  # type: ignore[list-item]


def test_a_template_that_takes_arguments_as_text_gets_them_as_text() -> None:
    made = prompts(WITH_TOOLS.replace("call.function.arguments | tojson", "'' + call.function.arguments"))
    call = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert '"arguments": {"a": 1}}' in made.chat(messages, [ADD], []).text


def test_the_longest_turn_is_continued() -> None:
    made = prompts(CHATML)
    first = said(made, "yes")
    second = said(made, "no")
    second.messages, second.answer = [QUESTION, first.answer, NEXT], {"role": "assistant", "content": "no"}  # type: ignore[list-item]
    again = made.chat(second.messages, None, [first])
    second.prompt_ids, second.prompt_text = again.token_ids, again.text
    prompt = made.chat([*second.messages, second.answer, NEXT], None, [second, first])
    assert prompt.parent is second
    second.is_aborted = True
    assert made.chat([*second.messages, second.answer, NEXT], None, [second, first]).parent is first
