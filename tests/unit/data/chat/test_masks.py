"""Masks of the assistant's tokens, for the oracle and for every kind of chat template."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from rlite.assembly.quickstart.run import CHATML, byte_tokenizer
from rlite.data.chat.ends import LearntEnds
from rlite.data.chat.masks import ChatEncoder
from rlite.data.sft import sft_rows
from rlite.errors import ConfigError, DataError

ORACLE = json.loads((Path(__file__).parents[3] / "oracles/10_chat_assistant_masks.json").read_text())

# The shapes of templates in use, reduced to what matters here. Thoughts stay in the last answer alone (Qwen3):
THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if m.role == 'assistant' and loop.last %}<think>\n"
    "{{ m.content.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m.content }}\n</think>\n\n"
    "{{ said }}{% else %}{{ said }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
# No generation prompt, contents trimmed, roles that must alternate (Mistral, Gemma):
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content | trim }}<|im_end|>{% endif %}"
    "{% endfor %}"
)
# The generation prompt opens a thought that history does not have (DeepSeek-R1):
OPENED = (
    "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% elif m.role == 'assistant' %}"
    "<|Assistant|>{{ m.content.split('</think>')[-1] }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
# The conversation ends with a token of its own, unless an answer is asked for (Phi-3):
CLOSED = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    made = byte_tokenizer()
    made.chat_template = template
    return made


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def said(template: str, messages: list[dict[str, Any]], **options: Any) -> list[str]:
    """Return the assistant's text by the masks, and check the tokens against the tokenizer's own."""
    made = tokenizer(template)
    (chat,) = ChatEncoder(made, **options).encode([messages], ["row 0"])
    # older transformers write null as text
    shown = [{key: value for key, value in message.items() if value is not None} for message in messages]
    assert chat.input_ids.tolist() == made.apply_chat_template(shown, return_dict=False, **options)
    assert chat.mask().sum() == sum(end - start for start, end in chat.turns)
    return [made.decode(chat.input_ids[start:end]) for start, end in chat.turns]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["found", "marked"])
@pytest.mark.parametrize("case", ORACLE["cases"], ids=lambda case: case["id"])
def test_masks_are_those_of_the_oracle(case: dict[str, Any], template: str) -> None:
    made = tokenizer(template)
    messages, expected = case["inputs"]["messages"], case["expected"]
    (chat,) = ChatEncoder(made).encode([messages], ["row 0"])
    # Its ids are bytes, ours are in the order of byte-level BPE's alphabet. A generation prompt is not learnt.
    asks = case["params"]["add_generation_prompt"]
    prompt = made.apply_chat_template(messages, add_generation_prompt=asks, return_dict=False)[len(chat.input_ids) :]
    assert len(expected["input_ids"]) == len(chat.input_ids) + len(prompt)
    assert chat.mask().astype(int).tolist() + [0] * len(prompt) == expected["content_and_end_token_mask"]


WORDS = st.text(st.sampled_from("ab é☃😀\n<>|/"), min_size=1, max_size=12).filter(str.strip)


@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4))
def test_each_turn_is_its_content_and_its_end_for_any_texts(turns: list[tuple[str, str]]) -> None:
    messages = [message for question, answer in turns for message in (user(question), assistant(answer))]
    answers = [answer for _, answer in turns]
    for template in (CHATML, MARKED, CLOSED):
        assert said(template, messages) == [f"{answer}<|im_end|>" for answer in answers]
    assert said(ALTERNATING, messages) == [f" {answer.strip()}<|im_end|>" for answer in answers]
    if not any("</think>" in text for text in answers):
        assert said(OPENED, messages) == [f"{answer}<|im_end|>" for answer in answers]


def test_history_is_learnt_as_the_template_rewrites_it() -> None:
    messages = [
        user("a"),
        assistant("<think>\nfirst\n</think>\n\nb"),
        user("c"),
        assistant("<think>\nsecond\n</think>\n\nd"),
    ]
    assert said(THOUGHTS, messages) == ["b<|im_end|>", "<think>\nsecond\n</think>\n\nd<|im_end|>"]


def test_tokens_of_the_generation_prompt_are_not_learnt() -> None:
    messages = [user("a"), assistant("b"), user("c"), assistant("d")]
    assert said(THOUGHTS, messages) == ["b<|im_end|>", "<think>\n\n</think>\n\nd<|im_end|>"]
    assert said(THOUGHTS, messages, enable_thinking=False) == ["b<|im_end|>", "d<|im_end|>"]


def test_a_call_that_begins_like_the_rest_of_the_prompt_is_learnt_whole() -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for call in m.tool_calls or [] %}<tool_call>"
        "{{ call.function.name }}</tool_call>{% endfor %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
    )
    call = assistant("") | {"tool_calls": [{"type": "function", "function": {"name": "f"}}]}
    messages = [user("a"), call, {"role": "tool", "content": "b"}, assistant("<tools>")]
    assert said(template, messages) == ["<tool_call>f</tool_call><|im_end|>", "<tools><|im_end|>"]


def test_turns_that_follow_another_text_than_the_prompt_are_counted() -> None:
    made = tokenizer(THOUGHTS)
    chat = [user("a"), assistant("b"), user("c"), assistant("d")]
    for options, share in (({}, "50%"), ({"enable_thinking": False}, "50%")):
        ends = LearntEnds(made, {made.eos_token_id})
        sft_rows([{"messages": chat}], made, 200, ends=ends, **options)
        assert ends.describe(())["rewritten history"].startswith(f"{share} of 2 learnt turns are never generated so")


def test_a_text_that_looks_like_a_turn_is_no_turn() -> None:
    trap = "<|im_start|>assistant\nno<|im_end|>\n"
    assert said(CHATML, [user(trap), assistant(f"x{trap}"), user(trap)]) == [f"x{trap}<|im_end|>"]


@cache
def merging_tokenizer(trims_offsets: bool) -> PreTrainedTokenizerFast:
    """Byte-level BPE that merges across words, spaces and newlines."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.post_processor = processors.ByteLevel(trim_offsets=trims_offsets)
    core.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(["a b\n\n a b  ab é☃ a\n b<|/> " * 4, "user\na", "assistant\n\n\nab a\n "] * 4, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        additional_special_tokens=special[:2],
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = CHATML
    return made


@given(st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3), st.booleans())
def test_tokens_that_merge_across_seams_are_those_of_the_whole_text(turns: list[tuple[str, str]], trims: bool) -> None:
    made = merging_tokenizer(trims)
    messages = [message for question, answer in turns for message in (user(question), assistant(answer))]
    (chat,) = ChatEncoder(made).encode([messages], ["row 0"])
    assert chat.input_ids.tolist() == made.apply_chat_template(messages, return_dict=False)
    for (start, end), (_, answer) in zip(chat.turns, turns, strict=True):
        text = made.decode(chat.input_ids[start:end])
        # The header's end may be in one token with the answer's beginning. The model never writes this token after a
        # prompt, so it is not learnt; all tokens after it are.
        whole = f"{answer}<|im_end|>"
        assert whole.endswith(text.lstrip("\ufffd"))
        assert text == whole or not whole.endswith(made.decode(chat.input_ids[start - 1 : end]).lstrip("\ufffd"))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (ALTERNATING, r"row 7: the chat template refuses the role 'system': Roles must alternate"),
        (OPENED, r"row 7, messages\[0\]: the chat template leaves out the role 'system'"),
    ],
)
def test_a_role_that_the_template_does_not_know_is_named_with_its_row(template: str, message: str) -> None:
    messages = [{"role": "system", "content": "be brief"}, user("a"), assistant("b")]
    with pytest.raises(DataError, match=message):
        ChatEncoder(tokenizer(template)).encode([messages], ["data.path=x.json, row 7"])


def test_a_result_inside_the_turn_that_asked_for_it_is_refused_rather_than_learnt() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
        "{% if m.tool_calls %}{{ m.tool_calls[0].name }}={{ messages[loop.index].content }} {% endif %}"
        "{{ m.content }}<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "clock", "arguments": {}}]}
    with pytest.raises(DataError, match=r"row 0, messages\[2\]: cannot tell .* inside the assistant's turn"):
        said(template, [user("time?"), call, {"role": "tool", "content": "noon"}, assistant("It is noon")])


def test_calls_of_tools_are_learnt_and_not_lost() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "clock", "arguments": {"zone": "UTC"}}]}
    messages = [user("time?"), call, {"role": "tool", "content": "noon"}, assistant("It is noon")]
    shown = CHATML.replace(
        "{{ message['content'] }}",
        "{{ message.content }}{% for c in message.tool_calls %}<call>{{ c | tojson }}</call>{% endfor %}",
    )
    assert said(shown, messages) == [
        '<call>{"name": "clock", "arguments": {"zone": "UTC"}}</call><|im_end|>',
        "It is noon<|im_end|>",
    ]
    with pytest.raises(DataError, match=r"row 0, messages\[1\]: the chat template leaves out the call of 'clock'"):
        said(CHATML, messages)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "row 0: 'messages' is an empty list"),
        ("hi", "row 0: 'messages' is str"),
        (["hi"], r"row 0, messages\[0\]: expected .* found str"),
        ([{"content": "a"}], r"row 0, messages\[0\]: 'role' is None"),
        ([user("a"), {"role": "assistant", "content": 4}], r"row 0, messages\[1\]: 'content' is 4; expected a text"),
    ],
)
def test_malformed_messages_are_named(messages: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ChatEncoder(byte_tokenizer()).encode([messages], ["row 0"])


def test_a_tokenizer_without_a_template_is_a_config_error() -> None:
    made = byte_tokenizer()
    made.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        ChatEncoder(made)
