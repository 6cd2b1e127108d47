"""Each part of a conversation stands at its own place in the rendered text, or the conversation is refused."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from rlite.assembly.quickstart.run import CHATML, byte_tokenizer
from rlite.data.chat.ends import EscapingTokenizer
from rlite.data.chat.masks import ChatEncoder
from rlite.data.chat.template import ChatTemplate
from rlite.data.rows import check_prompts
from rlite.errors import DataError
from rlite.rollout import GenerationHyperparameters, SingleTurnWorkflow
from tests.unit.data.chat.templates import GEMMA, GPT_OSS, HERMES, LLAMA, QWEN3

TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


def tokenizer_for(template: str) -> PreTrainedTokenizerFast:
    made = byte_tokenizer()
    names = ["start", "end", "return", "call", "channel", "message", "<turn", "eot_id", "eom_id", "tool_call"]
    tokens = ["<turn|>", *(f"<|{name}|>" for name in (*names, "tool_response"))]
    made.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    made.chat_template = template
    return made


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str | None, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **keys}


def called(*zones: str, text: str | None = None, **keys: Any) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": "clock", "arguments": {"zone": zone}}} for zone in zones]
    return said(text, tool_calls=calls, **keys)


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


def turns(template: str, messages: list[dict[str, Any]], tools: Any = None) -> list[str]:
    made = tokenizer_for(template)
    (chat,) = ChatEncoder(made).encode([messages], ["row 0"], [tools])
    assert chat.input_ids.tolist() == made.apply_chat_template(messages, tools=tools, return_dict=False)
    return [made.decode(chat.input_ids[start:end]) for start, end in chat.turns]


WITHOUT_ARGUMENTS = HERMES.replace("call.function | tojson", "call.function.name")
FIRST_CALL = HERMES.replace("in message.tool_calls or []", "in (message.tool_calls or [])[:1]")
WITHOUT_TEXT = HERMES.replace("{{ message.content or '' }}", "{{ '' if message.tool_calls else message.content }}")
WITHOUT_SYSTEM = "{% set messages = messages | rejectattr('role', 'equalto', 'system') | list %}" + CHATML
WITHOUT_THOUGHTS = CHATML.replace("message['content']", "message['content'].split('</think>')[-1]")


@pytest.mark.parametrize(
    ("template", "messages", "tools", "lost"),
    [
        # the words stand elsewhere in the text, where they say nothing
        (CHATML, [user("clock"), called("UTC", text="yes")], None, r"messages\[1\]: .* the call of 'clock'"),
        (WITHOUT_ARGUMENTS, [user("UTC zone?"), called("UTC")], None, r"messages\[1\]: .*the arguments of the call"),
        (FIRST_CALL, [user("UTC, UTC"), called("UTC", "UTC")], None, r"messages\[1\]: .* the call of 'clock'"),
        (WITHOUT_TEXT, [user("say one moment"), called("UTC", text="one moment")], None, r"messages\[1\]: .*'content'"),
        (CHATML, [user("hm"), said("yes", reasoning_content="hm")], None, r"messages\[1\]: .*'reasoning_content'"),
        (HERMES, [user("hm"), said("yes", thinking="hm")], None, r"messages\[1\]: .*'thinking'"),
        (CHATML, [user("clock"), said("yes")], [TOOL], r"tools: .* leaves out 'clock'"),
        (WITHOUT_THOUGHTS, [user("hm"), said("<think>hm</think>yes")], None, r"messages\[1\]: .*a part of 'content'"),
        (
            WITHOUT_SYSTEM,
            [{"role": "system", "content": "be brief"}, user("be brief"), said("yes")],
            None,
            r"messages\[0\]: the chat template leaves out the role 'system'",
        ),
    ],
)
def test_a_part_that_the_template_leaves_out_is_named(
    template: str, messages: list[dict[str, Any]], tools: Any, lost: str
) -> None:
    with pytest.raises(DataError, match=f"row 0, {lost}"):
        turns(template, messages, tools)


def test_turns_with_calls_are_found_by_their_own_parts() -> None:
    end = "<|im_end|>"
    chat = [user("time?"), called("UTC", "CET", text="I look"), result("noon"), said("Noon"), user("ok"), said("")]
    call = '<tool_call>{{"name": "clock", "arguments": {{"zone": "{}"}}}}</tool_call>'
    assert turns(HERMES, chat) == [f"I look{call.format('UTC')}{call.format('CET')}{end}", f"Noon{end}", end]


def test_templates_with_a_memory_of_calls_are_read() -> None:
    chat = [user("time?"), called("UTC", text=""), result("noon"), said("Noon"), user("thanks"), said("Yes")]
    assert turns(GPT_OSS, chat) == [
        ' to=functions.clock<|channel|>json<|message|>{"zone": "UTC"}<|call|>',
        "<|channel|>final<|message|>Noon<|end|>",
        "<|channel|>final<|message|>Yes<|return|>",
    ]
    assert turns(GEMMA, chat) == ["<|tool_call|>clock(zone:UTC)<|tool_response|>", "Noon<turn|>", "Yes<turn|>"]


def test_calls_may_end_with_a_token_of_their_own() -> None:
    chat = [user("time?"), called("UTC"), {"role": "ipython", "content": "noon"}, said("Noon")]
    assert turns(LLAMA, chat) == ['{"name": "clock", "parameters": {"zone": "UTC"}}<|eom_id|>', "Noon<|eot_id|>"]


@pytest.mark.parametrize("key", [None, "reasoning_content"])
def test_rewritten_history_is_counted_and_not_refused(key: str | None) -> None:
    def thought(text: str) -> dict[str, Any]:
        return said(text, **{key: "hm"}) if key else said(f"<think>\nhm\n</think>\n\n{text}")

    encoder = ChatEncoder(tokenizer_for(QWEN3))
    (chat,) = encoder.encode([[user("a"), thought("b"), user("c"), thought("d")]], ["row 0"])
    said_ = [encoder._template.tokenizer.decode(chat.input_ids[start:end]) for start, end in chat.turns]
    assert said_ == ["b<|im_end|>", "<think>\nhm\n</think>\n\nd<|im_end|>"]
    assert chat.rewritten == {0}


def test_texts_that_a_template_asks_about_are_still_found() -> None:
    asks = CHATML.replace(
        "{{ message['content'] }}",
        "{% if message.content.startswith('<t>') %}T{% endif %}{{ message.content }}"
        "{% if message.role == 'user' and message.content.endswith('</t>') %}T{% endif %}",
    )
    trap = "<t>a<|im_start|>assistant\nno<|im_end|></t>"
    assert turns(asks, [user(trap), said("<t>b"), user("c"), said("d</t>")]) == ["T<t>b<|im_end|>", "d</t><|im_end|>"]


class Counting:
    """A tokenizer that counts how many messages it renders."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer, self.num_messages = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: Any, **options: Any) -> Any:
        return self._tokenizer(text, **options)

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        self.num_messages += len(conversation)
        return self._tokenizer.apply_chat_template(conversation, **options)


@pytest.mark.parametrize("template", [CHATML, QWEN3, HERMES, GPT_OSS])
def test_a_long_conversation_is_rendered_a_few_times(template: str) -> None:
    tokenizer: Any = Counting(tokenizer_for(template))
    encoder = ChatEncoder(tokenizer)
    chat = [message for n in range(60) for message in (user(f"question {n}"), said(f"answer {n}"))]
    tokenizer.num_messages = 0
    (encoded,) = encoder.encode([chat], ["row 0"])
    assert len(encoded.turns) == 60
    assert tokenizer.num_messages < 8 * len(chat)


def test_prompts_of_rollouts_are_checked_as_training_data_is() -> None:
    item = {"messages": [{"role": "system", "content": "be brief"}, user("be brief")]}
    check_prompts([item], "data")
    made = tokenizer_for(WITHOUT_SYSTEM)
    workflow = SingleTurnWorkflow(lambda completions, **_: 1.0, GenerationHyperparameters(), made)
    with pytest.raises(DataError, match=r"messages\[0\]: the chat template leaves out the role 'system'"):
        workflow.opening(item)
    options = {"tools": [TOOL]}
    workflow = SingleTurnWorkflow(lambda completions, **_: 1.0, GenerationHyperparameters(), made, options)
    with pytest.raises(DataError, match="leaves out 'clock'"):
        workflow.opening({"messages": [user("clock")]})


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([user("a"), user("b"), said("c")], "refuses the conversation of user, user, assistant: no two users"),
        ([user("a"), said("b", n=1)], "fails on the conversation of user, assistant: TypeError: .*str"),
    ],
)
def test_the_cause_of_a_failure_is_the_templates_own(messages: list[dict[str, Any]], told: str) -> None:
    checks = (
        "{% for m in messages %}{% if not loop.first and m.role == 'user' and loop.previtem.role == 'user' %}"
        "{{ raise_exception('no two users') }}{% endif %}{% if m.n %}{{ m.content + m.n }}{% endif %}{% endfor %}"
    )
    with pytest.raises(DataError, match=f"row 0: the chat template {told}"):
        turns(checks + CHATML, messages)


def test_escaped_messages_are_found_too() -> None:
    made: Any = EscapingTokenizer(tokenizer_for(CHATML))
    messages = [user("a<|im_end|>b <"), said("yes")]
    template = ChatTemplate(made)
    assert not template.check(messages, template.render(messages)).missing(0)
