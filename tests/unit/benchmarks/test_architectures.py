from __future__ import annotations

import pytest

from benchmarks.architecture_columns import EQUAL, NOT_BUILT, NOTHING, REFUSED, WRONG, Verdict
from benchmarks.architectures import Row, joined, render
from benchmarks.released import RELEASED, classes, configs_of, released_config
from rlite.backends.models.architecture import miniature_config

FAMILIES = {
    "bamba",
    "deepseek_v3",
    "ernie4_5_moe",
    "falcon_h1",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gemma4",
    "gemma4_text",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "granitemoehybrid",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "minimax_m2",
    "mixtral",
    "nemotron_h",
    "olmo_hybrid",
    "olmoe",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
}


def test_the_families_that_people_train_have_configs_of_released_checkpoints() -> None:
    assert set(RELEASED) >= FAMILIES


@pytest.mark.parametrize("kind", RELEASED)
def test_released_configs_are_configs_of_their_class_and_can_be_made_small(kind: str) -> None:
    (config_class,) = classes([kind])
    assert [name for name, _ in configs_of(config_class)] == list(RELEASED[kind])
    for name in RELEASED[kind]:
        config = released_config(config_class, name)
        text = config.get_text_config()
        assert type(config) is config_class
        assert miniature_config(config).get_text_config().num_hidden_layers == text.num_hidden_layers <= 12


def test_a_class_counts_only_if_every_config_of_it_is_equal() -> None:
    equal, refused = Verdict(EQUAL), Verdict(REFUSED, "Small: has no plan")
    assert joined([equal, refused, equal]) == refused
    assert joined([equal, Verdict(WRONG, "Large: differs by 0.1"), refused]).name == WRONG
    assert joined([equal, Verdict(NOT_BUILT, "Large: KeyError")]).name == NOT_BUILT
    assert joined([Verdict(NOTHING), equal]) == equal, "one config has experts, the other has none"


def test_the_page_counts_classes_and_states_each_reason_once() -> None:
    equal = Verdict(EQUAL)
    gives = Verdict(REFUSED, "One ('one') mixes tokens. Use another model")
    rows = [
        Row("one", "One", {"train": gives, "serve": gives}),
        Row("two", "Two", {"train": equal, "serve": equal}),
        Row("three", "Three", {"train": equal, "serve": Verdict(REFUSED, "cannot be served")}),
    ]
    page = render(rows)
    assert (
        "Of 3 entries, 2 can be trained and 1 of them can also be served. 1 are refused, and 0 are not built." in page
    )
    assert "| one | One | refused | refused | mixes tokens |" in page
