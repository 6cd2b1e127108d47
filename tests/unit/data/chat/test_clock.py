"""A chat template writes a fixed time in every form in which it writes the present."""

from __future__ import annotations

from datetime import datetime

import pytest

from rlite.assembly.quickstart.run import CHATML
from rlite.data.chat.masks import ChatEncoder
from rlite.data.chat.template import CLOCK, ChatTemplate
from rlite.rollout.workflow import prompt_text
from tests.agents import tokenizer_with

TIME = datetime(2024, 2, 5, 7, 8, 9, 10)
FORMS = ["%d %B %Y", "%Y-%m-%d", "%-d %b %y", "%A %H:%M:%S.%f", "%I %p, day %j, week %U", "%x %X", "at 5"]
TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "template",
    [
        "{{{{ strftime_now({form!r}) }}}}\n" + CHATML.replace("{", "{{").replace("}", "}}"),
        "\n  {{%- if strftime_now is defined %}}{{% set date = strftime_now({form!r}) %}}{{% endif %}}"
        "\n {{{{ date }}}}\n" + CHATML.replace("{", "{{").replace("}", "}}"),
        "{{% macro head(f) %}}{{{{ strftime_now(f) }}}}{{% endmacro %}}  {{{{ head({form!r}) }}}}"
        + CHATML.replace("{", "{{").replace("}", "}}"),
    ],
)
def test_a_fixed_time_is_written_where_the_template_writes_the_present(template: str, form: str) -> None:
    source = template.format(form=form)
    tokenizer = tokenizer_with(source)
    plain = tokenizer_with(source.replace(f"strftime_now({form!r})", repr(TIME.strftime(form))).replace(
        "strftime_now(f)", repr(TIME.strftime(form))
    ).replace("strftime_now is defined", "true"))  # fmt: skip
    expected = ChatTemplate(plain).render(TALK)
    with CLOCK.fixed(TIME):
        assert ChatTemplate(tokenizer).render(TALK) == expected
        [chat] = ChatEncoder(tokenizer).encode([TALK], ["x"])
        assert prompt_text({"messages": TALK[:1]}, tokenizer).startswith(expected.partition("a<|im_end|>")[0][:-5])
    assert tokenizer.decode(chat.input_ids) == expected
    assert tokenizer.decode(chat.input_ids[chat.mask()]) == "a<|im_end|>"


def test_the_present_is_written_outside_of_a_run() -> None:
    tokenizer = tokenizer_with("{{ strftime_now('%f') }}" + CHATML)
    with CLOCK.fixed(TIME):
        assert ChatTemplate(tokenizer).render(TALK).startswith("000010")
        with CLOCK.fixed(datetime(2025, 1, 1)):
            assert ChatTemplate(tokenizer).render(TALK).startswith("000000")
        assert CLOCK.now() == TIME
    assert CLOCK.now() > TIME
    assert CLOCK.in_template("{{ strftime_now('%f') }}") == "{{ strftime_now('%f') }}"
