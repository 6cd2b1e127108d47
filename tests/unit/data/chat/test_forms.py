"""Contents and arguments of calls reach a template in the form that it takes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from rlite.assembly.quickstart.run import CHATML, byte_tokenizer
from rlite.data.chat.forms import forms_of
from rlite.data.chat.masks import ChatEncoder
from rlite.data.chat.template import ChatTemplate
from rlite.data.rows import check_prompts
from rlite.errors import DataError
from rlite.rollout.workflow import prompt_text

CONTENT = "{{ message['content'] }}"
EITHER = (
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
)
PARTS_ALONE = "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
TEMPLATES = {
    "text": CHATML,
    "text in JSON": CHATML.replace(CONTENT, "{{ message.content | tojson }}"),
    "text, else nothing": CHATML.replace(CONTENT, "{% if message.content is string %}{{ message.content }}{% endif %}"),
    "the first part": CHATML.replace(
        CONTENT,
        "{% if message.content is string %}{{ message.content }}{% else %}{{ message.content[0].text }}{% endif %}",
    ),
    "either": CHATML.replace(CONTENT, EITHER),
    "parts": CHATML.replace(CONTENT, PARTS_ALONE),
    "one part": CHATML.replace(CONTENT, "{{ '' + message.content[0].text }}"),
    "parts of users, one part of others": CHATML.replace(
        CONTENT,
        "{% if message.role == 'user' %}" + PARTS_ALONE + "{% else %}{{ '' + message.content[0].text }}{% endif %}",
    ),
    "parts of users, texts of others": CHATML.replace(
        CONTENT, "{% if message.role == 'user' %}" + PARTS_ALONE + "{% else %}{{ message.content }}{% endif %}"
    ),
}


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    made = byte_tokenizer()
    made.chat_template = template
    return made


def parts(*texts: str, kind: str = "text") -> list[dict[str, str]]:
    return [{"type": kind, "text": text} for text in texts]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", ["text", "input_text"])
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_parts_are_read_by_every_template_as_their_texts(name: str, kind: str, role: str) -> None:
    chat = [{"role": "user", "content": parts("one", "two", kind=kind)}, {"role": "assistant", "content": parts("yes")}]
    if role != "user":
        chat[0 if role == "system" else 1 : 1] = [{"role": role, "content": parts("one", "two", kind=kind)}]
    text = ChatTemplate(tokenizer(TEMPLATES[name])).render(chat)
    assert "onetwo" in text or "one\ntwo" in text or r"one\ntwo" in text
    assert "type" not in text
    assert kind.replace("text", "") not in text or kind == "text"
    assert "yes" in text


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_text_and_its_one_part_are_the_same_to_training_and_to_prompts(name: str) -> None:
    made = tokenizer(TEMPLATES[name])
    forms: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in (("ask", "yes"), (parts("ask"), parts("yes")))
    ]
    first, second = ChatEncoder(made).encode(forms, ["x", "x"])
    assert first.input_ids.tolist() == second.input_ids.tolist()
    assert first.turns == second.turns
    assert "yes" in made.decode(second.input_ids[second.mask()])
    prompts = [{"messages": chat[:1]} for chat in forms]
    check_prompts(prompts, "x")
    assert prompt_text(prompts[0], made) == prompt_text(prompts[1], made)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "is of the type 'image_url'; models here read text alone"),
        ({"type": "image"}, "is of the type 'image'; models here"),
        ({"type": "input_audio", "input_audio": {}}, "is of the type 'input_audio'; models here"),
        ({"type": "video", "video": "x"}, "is of the type 'video'; models here"),
        ({"type": "text"}, "has the 'text' None; expected a text"),
        ({"text": "a"}, r"is \{'text': 'a'\}; expected \{'type': 'text'"),
        ("a", "is 'a'; expected"),
    ],
)
def test_a_part_that_cannot_be_read_is_refused_with_the_reason(part: Any, message: str) -> None:
    chat = [{"role": "user", "content": [*parts("see"), part]}]
    with pytest.raises(DataError, match=rf"x, row index 0, messages\[0\]: 'content'\[1\] {message}"):
        check_prompts([{"messages": chat}], "x")
    with pytest.raises(DataError, match=rf"y, messages\[0\]: 'content'\[1\] {message}"):
        ChatEncoder(byte_tokenizer()).encode([chat], ["y"])


def test_a_part_of_another_type_is_left_to_a_template_that_reads_it() -> None:
    chat = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]},
    ]
    reading = EITHER.replace(
        "{% endif %}{% endfor %}", '{% elif part.type == "thinking" %}({{ part.thinking }}){% endif %}{% endfor %}'
    )
    assert "(hm)" in ChatTemplate(tokenizer(CHATML.replace(CONTENT, reading))).render(chat)
    with pytest.raises(DataError, match=r"y, messages\[1\]: 'content' has a part of the type 'thinking', which the"):
        ChatEncoder(byte_tokenizer()).encode([chat], ["y"])


# -- arguments of calls ------------------------------------------------------------------------------------------------


def calling(arguments: str) -> str:
    each = (
        "{% for call in message.tool_calls or [] %}<call>{{ call.function.name }} " + arguments + "</call>{% endfor %}"
    )
    return CHATML.replace(CONTENT, "{{ message['content'] or '' }}" + each)


CALLS = {
    "an object, as JSON": calling("{{ call.function.arguments | tojson }}"),
    "an object, item by item": calling(
        "{% for k, v in call.function.arguments | items %}{{ k }}={{ v | tojson }}{% endfor %}"
    ),
    "text that is joined": calling("{{ '' + call.function.arguments }}"),
    "text that is written": calling("{{ call.function.arguments }}"),
    "either": calling(
        "{% if call.function.arguments is string %}{{ call.function.arguments }}"
        "{% else %}{{ call.function.arguments | tojson }}{% endif %}"
    ),
    "text in further braces, else item by item": calling(
        "{% set given = call.function.arguments %}{% if given is string %}{ {{- given -}} }"
        "{% else %}{% for k, v in given | items %}{{ k }}={{ v | tojson }}{% endfor %}{% endif %}"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("as_text", [False, True], ids=["object", "text"])
def test_arguments_are_learnt_as_the_template_writes_them(name: str, as_text: bool) -> None:
    arguments = {"city": "Zürich"}
    given: Any = json.dumps(arguments, ensure_ascii=False) if as_text else arguments
    answer = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": given}}]}
    made = tokenizer(CALLS[name])
    [chat] = ChatEncoder(made).encode([[{"role": "user", "content": "q"}, answer]], ["x"])
    said = made.decode(chat.input_ids[chat.mask()])
    written = 'city="Zürich"' if "items" in CALLS[name] else '{"city": "Zürich"}'
    assert said == f"<call>f {written}</call><|im_end|>"


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("missing", [{}, {"arguments": None}, {"arguments": ""}])
def test_a_call_without_arguments_has_an_empty_object(name: str, missing: dict[str, Any]) -> None:
    answer = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", **missing}}]}
    text = ChatTemplate(tokenizer(CALLS[name])).render([{"role": "user", "content": "q"}, answer])
    assert ("<call>f </call>" if "items" in CALLS[name] else "<call>f {}</call>") in text


@pytest.mark.parametrize("name", CALLS)
def test_a_call_without_a_content_is_rendered_by_a_template_that_joins_it(name: str) -> None:
    template = CALLS[name].replace("{{ message['content'] or '' }}", "{{ '' + message['content'] }}")
    assert template != CALLS[name]
    call = {"type": "function", "function": {"name": "f", "arguments": {"city": "Bern"}}}
    rendered = [
        ChatTemplate(tokenizer(template)).render(
            [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call], **content}]
        )
        for content in ({"content": ""}, {"content": None}, {})
    ]
    assert len({*rendered}) == 1
    assert "Bern" in rendered[0]


@pytest.mark.parametrize("arguments", ["{", "[1]", "plain"])
def test_arguments_that_are_no_json_object_are_named(arguments: str) -> None:
    answer = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    with pytest.raises(
        DataError, match=r"y, messages\[1\]: the arguments of the call of 'f' are the text .*no JSON obj"
    ):
        ChatEncoder(tokenizer(CALLS["an object, as JSON"])).encode([[{"role": "user", "content": "q"}, answer]], ["y"])


def test_messages_in_the_right_form_are_not_copied() -> None:
    message = {"role": "user", "content": "q"}
    assert forms_of(CHATML).fitted([message])[0] is message


def test_what_is_null_is_left_out_and_not_written_by_a_template() -> None:
    call = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}
    message = {"role": "assistant", "content": None, "reasoning_content": None, "tool_calls": [call]}
    [fitted] = forms_of("{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}").fitted([message])
    assert fitted.keys() == {"role", "tool_calls"}
