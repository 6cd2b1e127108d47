"""Tokens between two answers, for the ways in which common templates treat history."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tokenizers import AddedToken

from rlite.assembly.quickstart.run import CHATML, byte_tokenizer
from rlite.errors import ConfigError, DataError
from rlite.rollout import Conversation, GenerationHyperparameters, RolloutError, ScriptedEngine
from tests.tiny import tokenizer_with_bos

QUESTION = {"role": "user", "content": "a"}
NEXT = {"role": "user", "content": "b"}
USUAL = "<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
# Qwen3 writes an empty thought before the last answer, if it has none, and none before earlier ones.
EMPTY_THOUGHT = CHATML.replace(
    "{{ message['content'] }}",
    "{% if loop.last and message['role'] == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ message['content'] }}",
)
# DeepSeek-R1 opens a thought for the model and leaves thoughts out of history.
OPENED = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}").replace(
    "message['content'] }}", "message['content'].split('</think>')[-1] }}"
)
# Mistral and Gemma trim contents, and want roles to alternate; there is no generation prompt.
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content | trim }}<|im_end|>{% endif %}"
    "{% endfor %}"
)
# Llama 3.1 writes what is not an answer, results of tools, as JSON.
AS_JSON = CHATML.replace(
    "{{ message['content'] }}",
    "{{ message['content'] if message['role'] == 'assistant' else message['content'] | tojson }}",
)


def talk(template: str, text: str, *replies: Any, tokenizer: Any = None, history: Any = "tokens") -> Conversation:
    """A conversation in which the model has said `text` and read `replies`."""
    tokenizer = tokenizer or byte_tokenizer()
    tokenizer.chat_template = template
    conversation = Conversation(tokenizer, {"messages": [QUESTION]}, history=history)
    answer = tokenizer(text, add_special_tokens=False)["input_ids"]
    asyncio.run(conversation.ask(ScriptedEngine([answer]), GenerationHyperparameters(max_new_tokens=99)))
    conversation.reply(*replies)
    return conversation


@pytest.mark.parametrize(
    ("template", "text", "expected"),
    [
        (CHATML, "yes<|im_end|>", USUAL.removeprefix("<|im_end|>")),
        (CHATML, "yes", USUAL),
        (CHATML, "yes<|endoftext|>", USUAL),
        (EMPTY_THOUGHT, "hm</think>yes", USUAL),
        (OPENED, "hm</think>yes", USUAL + "<think>\n"),
        (ALTERNATING, " yes ", "<|im_end|>[INST] b [/INST]"),
        (AS_JSON, "yes", USUAL.replace("b<", '"b"<')),
    ],
)
def test_template_text_between_answers_is_appended(template: str, text: str, expected: str) -> None:
    conversation = talk(template, text, NEXT)
    assert conversation.transcript.tokens == byte_tokenizer()(conversation.prompt + text + expected)["input_ids"]
    assert [message["role"] for message in conversation.messages] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    ("template", "text", "is_kept"),
    [
        (CHATML, "yes<|im_end|>", True),
        (CHATML, "yes", True),
        (OPENED, "hm</think>yes<|im_end|>", False),
        (ALTERNATING, " yes ", False),
    ],
)
def test_with_the_templates_history_the_model_reads_what_the_template_renders(
    template: str, text: str, is_kept: bool
) -> None:
    conversation = talk(template, text, NEXT, history="template")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    said = {"role": "assistant", "content": text.removesuffix("<|im_end|>")}
    rendered = tokenizer.apply_chat_template([QUESTION, said, NEXT], add_generation_prompt=True, return_dict=False)
    assert conversation.transcript.tokens == rendered
    asyncio.run(conversation.ask(ScriptedEngine([[65]]), GenerationHyperparameters()))
    assert len(conversation.transcript.trajectory(1.0)) == (1 if is_kept else 2)


def test_nothing_is_put_before_what_is_appended() -> None:
    tokenizer = tokenizer_with_bos()
    conversation = talk(CHATML, "yes", NEXT, tokenizer=tokenizer)
    assert tokenizer.bos_token_id not in conversation.transcript.tokens, "the template says none"


def test_several_messages_and_an_answer_of_ones_own() -> None:
    results = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    conversation = talk(CHATML, "x", *results)
    between = "<|im_end|>\n<|im_start|>tool\n1<|im_end|>\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n"
    assert conversation.transcript.tokens == byte_tokenizer()(conversation.prompt + "x" + between)["input_ids"]
    with pytest.raises(ConfigError, match="leaves out messages of the role 'tool'"):
        talk(CHATML.replace("message['content']", "message.role != 'tool' and message['content'] or ''"), "x", *results)


def test_a_reply_without_an_answer_and_an_item_without_a_prompt_are_errors() -> None:
    conversation = Conversation(byte_tokenizer(), {"messages": [QUESTION]})
    assert not conversation.is_answered
    with pytest.raises(RolloutError, match="the model has given none"):
        conversation.reply(NEXT)
    with pytest.raises(DataError, match="and no prompt"):
        Conversation(byte_tokenizer(), {"seed": 3})
    with pytest.raises(RolloutError, match="ended the completion after 0 tokens"):
        asyncio.run(conversation.ask(ScriptedEngine([[]]), GenerationHyperparameters()))


def test_a_template_that_takes_arguments_of_calls_as_text_is_given_text() -> None:
    calling = CHATML.replace(
        "{{ message['content'] }}",
        "{{ message['content'] }}"
        "{% for call in message.tool_calls or [] %}{{ 'f' + call.function.arguments }}{% endfor %}",
    )
    conversation = talk(calling, "yes", NEXT, history="template")
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    asyncio.run(conversation.ask(ScriptedEngine([[5]]), GenerationHyperparameters(max_new_tokens=9)))
    conversation.reply(NEXT, answer={"role": "assistant", "content": "", "tool_calls": [call]})
    text = byte_tokenizer().decode(conversation.transcript.tokens)
    assert 'f{"x": 1}' in text


def speak(tokenizer: Any, text: str, item: Any, ends: Any = (), **gconfig: Any) -> Conversation:
    conversation = Conversation(tokenizer, item)
    engine = ScriptedEngine([tokenizer(text)["input_ids"]], end_ids=ends)
    asyncio.run(conversation.ask(engine, GenerationHyperparameters(max_new_tokens=99, **gconfig)))
    return conversation


def undeclared() -> Any:
    """A tokenizer whose end of turn is no special token."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<|end|>", normalized=False)])
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "<|end|>")
    return tokenizer


@pytest.mark.parametrize("is_known", [True, False])
def test_an_end_token_that_is_not_special_is_not_doubled(is_known: bool) -> None:
    tokenizer = undeclared()
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    conversation = speak(tokenizer, "yes<|end|>", {"messages": [QUESTION]}, ends=[end] if is_known else ())
    assert conversation.answer == ("yes" if is_known else "yes<|end|>")
    conversation.reply(NEXT)
    assert conversation.transcript.tokens.count(end) == 3


def test_a_stop_string_with_which_the_template_ends_an_answer_is_not_doubled() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "<end>")  # no token of the tokenizer
    conversation = speak(tokenizer, "yes<end>", {"messages": [QUESTION]}, stop=["<end>"])
    assert conversation.answer == "yes"
    conversation.reply(NEXT)
    said = [QUESTION, {"role": "assistant", "content": "yes"}, NEXT]
    expected = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(conversation.transcript.tokens) == expected == conversation.text
    assert speak(tokenizer, "x: 1;", {"messages": [QUESTION]}, stop=[";"]).answer == "x: 1;", "a part of the answer"


def test_a_raw_reply_may_begin_with_the_last_token_of_an_answer() -> None:
    conversation = speak(byte_tokenizer(), "one\n", {"prompt": "say: "}, stop=["\n"])
    conversation.reply({"role": "user", "content": "\ntwo"})
    assert byte_tokenizer().decode(conversation.transcript.tokens) == "say: one\n\ntwo"
