"""KTO: its first step by hand from transformers, and the same steps however the work is divided."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.config import load
from rlite.data.sft import labelled_rows
from rlite.errors import ConfigError
from rlite.trainer.kto import KtoTrainer
from rlite.trainer.supervised_options import KtoConfig
from tests.integration.worlds import world

ROWS = [
    {"prompt": "ab", "completion": "cdefg", "label": True},
    {"prompt": "hijk", "completion": "l", "label": False},
    {"prompt": "m", "completion": "nop", "label": False},
    {"prompt": "qr", "completion": "stuvwxyz", "label": True},
    {"prompt": "0123456", "completion": "78", "label": True},
    {"prompt": "9", "completion": "9", "label": False},
]
END = byte_tokenizer().eos_token_id


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with world(2):
        yield


def trainer(models: dict[str, Path], out: Path, *settings: str) -> KtoTrainer:
    fixed = [
        f"actor.model_name={models['llama']}",
        "actor.lr=1e-2",
        "actor.gradient_checkpointing=false",
        "data.path=-",
    ]
    fixed += [f"trainer.save_dir={out}", "actor.desirable_weight=1.5", "actor.undesirable_weight=0.5"]
    rows = labelled_rows(ROWS, byte_tokenizer(), 32)
    return KtoTrainer(load(KtoConfig, [*fixed, "data.batch_size=6", *settings]), rows, rows)


def finished(learner: KtoTrainer) -> dict[str, float]:
    try:
        return learner.fit()
    finally:
        learner.engine.release()
        if not learner.reference.is_actor:
            learner.reference.engine.release()


def logprob(model: Any, prompt: str, answer: str) -> float:
    ids = [*prompt.encode(), *answer.encode()]
    tokens = torch.tensor([[*byte_tokenizer()(bytes(ids).decode())["input_ids"], END]])
    with torch.no_grad():
        logprobs = model(tokens).logits[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])
    return logprobs[len(prompt) - 1 :].sum().item()


def test_the_first_step_is_that_of_the_formula(models: dict[str, Path], tmp_path: Path) -> None:
    learner = trainer(models, tmp_path / "run", f"ref_actor.model_name={models['qwen3']}", "trainer.n_epochs=1")
    order = [ROWS[number] for number in learner.loader._order.take(6)]
    learner.loader._order.position = 0
    found = finished(learner)
    actor, reference = (AutoModelForCausalLM.from_pretrained(models[kind]).eval() for kind in ("llama", "qwen3"))

    def ratio(prompt: str, answer: str) -> float:
        return logprob(actor, prompt, answer) - logprob(reference, prompt, answer)

    shifted = [
        ratio(row["prompt"], other["completion"]) for row, other in zip(order, [*order[1:], order[0]], strict=True)
    ]
    point = max(0.0, sum(shifted) / 6)
    rewards = {label: [] for label in (True, False)}
    losses = []
    for row in order:
        sign, weight = (1, 1.5) if row["label"] else (-1, 0.5)
        rewards[row["label"]].append(value := ratio(row["prompt"], row["completion"]))
        losses.append(weight * (1 - torch.sigmoid(torch.tensor(0.1 * sign * (value - point))).item()))
    assert found["kl"] == pytest.approx(point, rel=1e-4, abs=1e-4)
    assert found["loss"] == pytest.approx(sum(losses) / 6, rel=1e-4)
    assert found["desirable_rewards"] == pytest.approx(0.1 * sum(rewards[True]) / 3, rel=1e-3)
    assert found["margin"] == pytest.approx(0.1 * (sum(rewards[True]) - sum(rewards[False])) / 3, rel=1e-3)


def test_the_reference_point_is_cut_to_the_longest_length_and_not_to_the_longest_row(
    models: dict[str, Path], tmp_path: Path
) -> None:
    order = [4, 3, 0, 1, 2, 5]  # a prompt of 7 tokens, with an answer of 9
    kinds = ("llama", "qwen3")
    found = {}
    for kind, other in (kinds, kinds[::-1]):
        settings = [f"actor.model_name={models[kind]}", f"ref_actor.model_name={models[other]}", "trainer.n_epochs=1"]
        learner = trainer(models, tmp_path / kind, *settings)
        assert learner.rows.lengths.max() == 11
        learner.start()
        found[kind] = learner.prepare(learner.rows.batch(order))["reference_point"].tolist()
        learner.engine.release()
        learner.reference.engine.release()
    loaded = {kind: AutoModelForCausalLM.from_pretrained(models[kind]).eval() for kind in kinds}
    pairs = [(ROWS[n]["prompt"], ROWS[m]["completion"]) for n, m in zip(order, [*order[1:], order[0]], strict=True)]
    ratios = [logprob(loaded["llama"], *pair) - logprob(loaded["qwen3"], *pair) for pair in pairs]
    point = sum(ratios) / 6
    assert found["llama"] == pytest.approx([max(0.0, point)] * 6, rel=1e-4, abs=1e-4)
    assert found["qwen3"] == pytest.approx([max(0.0, -point)] * 6, rel=1e-4, abs=1e-4)


def test_a_prompt_with_the_longest_answer_of_another_row_must_fit_the_devices(
    models: dict[str, Path], tmp_path: Path
) -> None:
    tight = "actor.max_length_per_device=13"
    with pytest.raises(ConfigError, match=r"rows of data, up to 16 tokens, and actor.max_length_per_device is 13; rai"):
        trainer(models, tmp_path / "tight", tight)
    assert trainer(models, tmp_path / "cut", tight, "data.max_length=13").rows.lengths.max() == 11
    assert trainer(models, tmp_path / "apo", tight, "actor.loss_type=apo_zero_unpaired").rows.lengths.max() == 11


LAYOUTS = [
    [],
    ["actor.max_length_per_device=16"],
    ["actor.ddp_size=2", "actor.max_length_per_device=13"],
    ["actor.tp_size=2"],
    ["actor.sp_size=2", "actor.max_length_per_device=16"],
]


@pytest.mark.parametrize(
    "extra", [pytest.param([], marks=pytest.mark.nightly), ["actor.lora.rank=4"]], ids=["weights", "adapters"]
)
def test_steps_are_independent_of_the_layout(models: dict[str, Path], tmp_path: Path, extra: list[str]) -> None:
    runs = []
    for number, layout in enumerate(LAYOUTS[: 5 - 3 * bool(extra)]):
        fixed = ["data.batch_size=5", "data.max_length=13", "trainer.n_epochs=2", "trainer.test_freq=4"]
        settings = [*fixed, *extra, *layout]
        runs.append(finished(trainer(models, tmp_path / str(number), *settings)))
    assert runs[0]["kl"] > 0 or runs[0]["test_kl"] > 0
    names = ["loss", "kl", "grad_norm", "test_loss", "test_kl", "test_margin", "test_desirable_rewards"]
    for other in runs[1:]:
        assert {name: other[name] for name in names} == pytest.approx(
            {name: runs[0][name] for name in names}, rel=2e-3, abs=1e-4
        )


def test_a_reference_without_a_model_of_its_own_is_the_actor_without_adapters(
    models: dict[str, Path], tmp_path: Path
) -> None:
    learner = trainer(models, tmp_path, "actor.lora.rank=4", "actor.loss_type=apo_zero_unpaired")
    assert learner.reference.engine is learner.engine
    found = finished(learner)
    assert found["kl"] == 0.0
    assert found["desirable_rewards"] == 0.0, "adapters begin as nothing"
