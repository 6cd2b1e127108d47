from __future__ import annotations

import threading

import pytest

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.data.chat import forms
from rlite.data.chat.forms import TemplateLimit, limited
from rlite.data.chat.template import ChatTemplate, TemplateRefusal, check_template_limits

QUESTION = [{"role": "user", "content": "hello"}]


def render(template: str) -> str:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    check_template_limits(tokenizer)
    return ChatTemplate(tokenizer).render(QUESTION)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% set n = namespace(s=[0]) %}{% for i in range(90000) %}{% for j in n.s %}{% endfor %}"
        "{% set n.s = n.s + [i] %}{% endfor %}",
    ],
    ids=["loops", "recursion", "a growing list"],
)
def test_a_template_that_does_not_end_is_stopped(template: str) -> None:
    with pytest.raises(TemplateRefusal, match="it takes more than 1 s"):
        render(template)
    assert render("{{ messages[0].content }}") == "hello"


def test_a_template_that_doubles_a_string_is_stopped() -> None:
    doubling = "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}"
    with pytest.raises(TemplateRefusal, match=r"it takes more than|expected at most|MemoryError"):
        render(doubling)


@pytest.mark.parametrize("template", ["{{ 9 ** 9 ** 9 }}", "{{ 'a' * 10000000000 }}", "{% set x = 0xffffffffff %}"])
def test_an_operation_that_cannot_be_interrupted_is_refused(template: str) -> None:
    with pytest.raises(TemplateLimit, match="powers or with numbers above"):
        render(template)


@pytest.mark.parametrize("template", ["**bold** 2 ** 3", "{{ dict(**{'a': 1}).a }}", "{{ '5 ** 3' }}{{ 999999 }}"])
def test_text_and_keyword_arguments_are_no_powers(template: str) -> None:
    assert render(template)


def test_a_long_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "MAX_CHARACTERS", 2**20)
    with pytest.raises(TemplateRefusal, match="it writes 2000000 characters, expected at most 1048576"):
        render("{{ ('a' * 2000) * 1000 }}")


def test_other_errors_pass_and_threads_do_not_disturb_each_other() -> None:
    def fail() -> str:
        raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        limited(fail)
    stopped: list[str] = []

    def loop() -> None:
        try:
            render("{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}")
        except TemplateRefusal:
            stopped.append("stopped")

    threads = [threading.Thread(target=loop) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert {render("{{ messages[0].content }}") for _ in range(200)} == {"hello"}
    for thread in threads:
        thread.join()
    assert stopped == ["stopped"] * 2
