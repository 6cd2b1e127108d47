"""Notebooks: a session as a block, a chat, engines that say what they are, new methods for a built module."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import rlite
from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.errors import ConfigError, DataError, RliteError
from tests.integration.modules import make_batch, num_counted, on_meta, token_loss
from tests.integration.redefinition import run_cell


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # tests with several ranks leave torch's
    with rlite.session(device="cpu", num_devices=1, num_threads=1):
        yield


@pytest.fixture
def train(session: None, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> RliteTrainEngine:
    engine = RliteTrainEngine(on_meta(run_cell(monkeypatch, "1"), models["llama"]))
    engine.build()
    return engine


def test_a_session_ends_with_its_block_and_is_one_at_a_time() -> None:
    def cell() -> None:
        with rlite.session(device="cpu", num_devices=1) as opened:
            assert rlite.current_session() is opened
            with pytest.raises(ConfigError, match="was called before in this process"), rlite.session():
                pass
            assert rlite.current_session() is opened, "the refusal ended the outer session"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cell()
    with pytest.raises(RliteError, match=r"call rlite\.init\(\) first"):
        rlite.current_session()


def test_one_process_has_no_rank_in_front_of_its_tracebacks(session: None) -> None:
    assert "distributed" not in sys.excepthook.__qualname__


def test_a_chat_is_the_completion_of_the_rendered_conversation(session: None, models: dict[str, Path]) -> None:
    engine = RliteInferenceEngine(models["llama"])
    assert repr(engine) == f"RliteInferenceEngine({models['llama']}, executor torch, not built)"
    engine.build(max_model_len=128, max_num_seqs=2)
    assert repr(engine) == (
        f"RliteInferenceEngine({models['llama']}, 1 replica of 1, 1 x cpu, executor torch, weights on the device, "
        "version 0)"
    )
    greedy = {"temperature": 0.0, "max_new_tokens": 6}
    messages = [{"role": "user", "content": "hi"}]
    rendered = engine.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    answer, (expected,) = engine.chat(messages, greedy), engine.generate(rendered, greedy)
    assert (answer.prompt, answer.prompt_token_ids) == (rendered, expected.prompt_token_ids)
    assert answer.text == expected.outputs[0].text
    assert engine.chat("hi", greedy).outputs[0].token_ids == answer.outputs[0].token_ids
    with pytest.raises(DataError, match=r"chat, messages\[0\]: 'role' is None"):
        engine.chat([{"content": "hi"}])
    with pytest.raises(
        ConfigError, match=r"a parameter of sampling; write chat\(messages, \{'max_new_tokens': \.\.\.\}"
    ):
        engine.chat("hi", max_new_tokens=4)
    with pytest.raises(ConfigError, match=r"chat\.loud: the model's chat template reads no such variable"):
        engine.chat("hi", loud=True)


def test_new_methods_are_called_and_weights_and_optimizer_stay(
    train: RliteTrainEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train.answer() == 1
    batch = make_batch([5, 7])
    train.train_batch(batch, token_loss, num_counted)
    weights, held = train.state_dict(), train.memory_bytes()
    assert held[0]["optimizer"] > 0
    run_cell(monkeypatch, "super().device.type + self.extra()\n\n    def extra(self):\n        return '!'")
    assert train.reload_methods() == ["answer", "extra"]
    assert (train.answer(), train.extra()) == ("cpu!", ["!"])
    assert train.reload_methods() == []
    assert train.memory_bytes() == held
    assert all(torch.equal(value, weights[name]) for name, value in train.state_dict().items())
    train.train_batch(batch, token_loss, num_counted)
    train.meta()
    train.load()
    assert train.answer() == "cpu!", "the module that is made again has the new methods"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lr": "1e-3"}, "on_weights_materialized was changed"),
        ({"LlamaForCausalLM": "Qwen2ForCausalLM"}, "is now a subclass of .*Qwen2ForCausalLM"),
        ({"answer": "train_batch"}, "defines train_batch, which the engine has itself"),
    ],
)
def test_a_definition_that_does_not_fit_is_refused_and_changes_nothing(
    train: RliteTrainEngine, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str], message: str
) -> None:
    run_cell(monkeypatch, "2", **changed)
    with pytest.raises(ConfigError, match=message):
        train.reload_methods()
    assert train.answer() == 1
    run_cell(monkeypatch, "3")
    assert train.reload_methods() == ["answer"]
    assert train.answer() == 3


def test_a_train_engine_says_what_it_is(train: RliteTrainEngine) -> None:
    millions = f"{train.num_parameters / 1e6:.2f}"
    assert repr(train) == (
        f"RliteTrainEngine(Notebook, {millions} M parameters, {train.dims}, 1 x cpu, executor fsdp2, "
        "weights on the device)"
    )
    train.release()
    assert repr(train) == f"RliteTrainEngine(Notebook, {millions} M parameters, not built)"
