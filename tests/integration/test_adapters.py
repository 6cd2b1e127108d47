"""Several adapters beside one base model: each trains, is saved and is loaded as if it were alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlite import RliteTrainEngine
from rlite.algorithms import PerToken
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.data.sft import sft_rows
from rlite.errors import CheckpointError, ConfigError, DamagedCheckpointError
from rlite.runtime.replicas.adapters import AdapterWeights
from rlite.trainer.model.modules import policy_module
from tests.adapters import ADAPTERS
from tests.integration.modules import Qwen2Policy, make_batch, next_token_logprobs, num_counted, on_meta, token_loss
from tests.integration.worlds import world

WIDE, NARROW = ADAPTERS["wide"], ADAPTERS["narrow"]
LENGTHS = [9, 4, 17, 2, 11, 5, 8, 3]


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with world(2):
        yield


def build(engines: list[Any], models: dict[str, Path], size: int = 1, copies: int = 1, **options: Any) -> Any:
    engine = RliteTrainEngine(on_meta(Qwen2Policy, models["qwen2"]))
    engine.build(tensor_parallel_size=size, data_parallel_size=copies, colocate_with=engines[:1], **options)
    engines.append(engine)
    return engine


def sum_loss(logits: Tensor, data: dict[str, Any]) -> Any:
    """Sum of the losses of the counted tokens, as in the losses of RL services."""
    logprobs = next_token_logprobs(logits, data)
    return -(logprobs * data["loss_mask"]).sum(), {"logprobs": PerToken(logprobs.detach())}


def rows_of(batch: dict[str, Tensor], rows: list[int]) -> dict[str, Tensor]:
    return {key: value[rows] for key, value in batch.items()}


def learn(engine: RliteTrainEngine, name: str, seed: int) -> dict[str, float]:
    engine.forward_backward(make_batch(LENGTHS, seed), token_loss, num_counted, adapter=name)
    return engine.optimizer_step(name, lr=1e-2, betas=(0.9, 0.95), max_grad_norm=0.5)


def values(engine: RliteTrainEngine, name: str, folder: Path) -> dict[str, Tensor]:
    engine.save_adapter(name, folder / name)
    return load_file(folder / name / "adapter_model.safetensors")


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=tolerance, rtol=0, msg=name)


@pytest.mark.parametrize(
    "options",
    [
        {"deterministic": True},
        {"size": 2},
        {"size": 2, "compute_dtype": "bfloat16", "gradient_checkpointing": True},
        {"size": 2, "tp_size": 2},
    ],
)
def test_adapters_that_take_turns_equal_each_alone_bit_for_bit(
    engines: list[Any], models: dict[str, Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    adapters = ADAPTERS
    together = build(engines, models, **options)
    base = together.state_dict()
    for name, adapter in adapters.items():
        together.add_adapter(name, adapter)
    stats = [{name: learn(together, name, 10 * seed + len(name)) for name in adapters} for seed in range(3)]
    assert all(step["grad_norm"] > 0 for each in stats for step in each.values())
    assert_equal(together.state_dict(), base)
    for name, adapter in adapters.items():
        alone = build(engines, models, **options)
        alone.add_adapter(name, adapter)
        assert [learn(alone, name, 10 * seed + len(name)) for seed in range(3)] == [each[name] for each in stats]
        assert_equal(values(alone, name, tmp_path / "alone"), values(together, name, tmp_path / "together"))


def test_gradients_of_adapters_accumulate_apart(engines: list[Any], models: dict[str, Path], tmp_path: Path) -> None:
    engine, batches = build(engines, models, deterministic=True), [make_batch(LENGTHS, seed) for seed in range(4)]
    for name in ("a", "b", "c", "d"):
        engine.add_adapter(name, NARROW)
    for first, second in ((0, 1), (2, 3)):
        engine.forward_backward(batches[first], token_loss, num_counted, adapter="a")
        engine.forward_backward(batches[second], token_loss, num_counted, adapter="b")
    for name in ("a", "b"):
        engine.optimizer_step(name)
    for name, (first, second) in {"c": (0, 2), "d": (1, 3)}.items():
        for index in (first, second):
            engine.forward_backward(batches[index], token_loss, num_counted, adapter=name)
        engine.optimizer_step(name)
    found = {name: values(engine, name, tmp_path) for name in ("a", "b", "c", "d")}
    assert_equal(found["a"], found["c"])
    assert_equal(found["b"], found["d"])
    assert not torch.equal(*(torch.cat([t.flatten() for t in found[name].values()]) for name in ("a", "b")))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float64", 1e-10)])
@pytest.mark.parametrize("is_sum", [True, False])
def test_two_verbs_equal_train_batch_in_any_number_of_chunks(
    engines: list[Any], models: dict[str, Path], tmp_path: Path, dtype: str, tolerance: float, is_sum: bool
) -> None:
    engine, batch = build(engines, models, param_dtype=dtype, deterministic=dtype == "float32"), make_batch(LENGTHS)
    loss: tuple[Any, ...] = (sum_loss, None) if is_sum else (token_loss, num_counted)
    for name in ("whole", "one", "eight"):
        engine.add_adapter(name, WIDE)
    for _ in range(2):
        expected = engine.train_batch(batch, *loss, adapter="whole")
        found = engine.forward_backward(batch, *loss, adapter="one")
        found |= engine.optimizer_step("one")
        parts = [engine.forward_backward(rows_of(batch, [row]), *loss, adapter="eight") for row in range(8)]
        step = engine.optimizer_step("eight")
        assert found.keys() == expected.keys()
        assert all(torch.equal(torch.as_tensor(found[key]), torch.as_tensor(expected[key])) for key in found)
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        if is_sum:
            assert sum(part["loss"] for part in parts) == pytest.approx(expected["loss"], rel=1e-5)
            assert expected["logprobs"].shape == batch["input_ids"].shape
    whole = values(engine, "whole", tmp_path)
    assert_equal(values(engine, "one", tmp_path), whole)
    assert_equal(values(engine, "eight", tmp_path), whole, tolerance)


def test_a_sum_has_the_gradient_of_the_mean_times_its_weight_on_any_ranks(
    engines: list[Any], models: dict[str, Path]
) -> None:
    norms, layouts = [], ({}, {"size": 2}, {"copies": 2}, {"size": 2, "tp_size": 2}, {"size": 2, "sp_size": 2})
    for options in layouts:
        engine, batch = build([], models, param_dtype="float64", **options), make_batch(LENGTHS)
        for name in ("sum", "mean"):
            engine.add_adapter(name, WIDE)
            engine.train_batch(batch, token_loss, num_counted, adapter=name)  # both factors have gradients afterwards
        added = engine.forward_backward(batch, sum_loss, adapter="sum")
        mean = engine.forward_backward(batch, token_loss, num_counted, adapter="mean")
        weight = float(batch["loss_mask"].sum())
        assert added["loss"] == pytest.approx(mean["loss"] * weight, rel=1e-12)
        norm, of_mean = (engine.optimizer_step(name, max_grad_norm=1e9)["grad_norm"] for name in ("sum", "mean"))
        assert norm == pytest.approx(of_mean * weight, rel=1e-9)
        norms.append(norm)
        engine.release()
    assert norms == pytest.approx([norms[0]] * len(layouts), rel=1e-9)


def test_the_whole_model_trains_by_sums_too(engines: list[Any], models: dict[str, Path]) -> None:
    one, other = (build(engines, models, param_dtype="float64") for _ in range(2))
    batch = make_batch(LENGTHS)
    one.train_batch(batch, sum_loss)
    for row in range(8):
        other.forward_backward(rows_of(batch, [row]), sum_loss)
    with pytest.raises(ConfigError, match="a mean and of a sum cannot add up"):
        other.forward_backward(batch, token_loss, num_counted)
    other.optimizer_step()
    assert_equal(other.state_dict(), one.state_dict(), 1e-10)
    assert other.optimizer_step(lr=0.25)["lr"] == 0.25
    with pytest.raises(ConfigError, match="AdamW has no warmup"):
        other.optimizer_step(warmup=3)


def test_an_adapter_computes_what_peft_computes(engines: list[Any], models: dict[str, Path], tmp_path: Path) -> None:
    engine, batch = build(engines, models, size=2), make_batch([9, 9])
    for name, options in {name: ADAPTERS[name] for name in ("narrow", "mlp")}.items():
        engine.add_adapter(name, options, seed=7)
        learn(engine, name, seed=3)
        engine.save_adapter(name, tmp_path / name)
        base = AutoModelForCausalLM.from_pretrained(models["qwen2"], dtype=torch.float32)
        opened = peft.PeftModel.from_pretrained(base, tmp_path / name)
        logits = opened(input_ids=batch["input_ids"]).logits.log_softmax(-1)
        expected = logits[:, :-1].gather(2, batch["input_ids"][:, 1:, None])[..., 0]
        found = engine.forward(batch, next_token_logprobs, adapter=name)[:, :-1]
        assert (found - engine.forward(batch, next_token_logprobs)[:, :-1]).abs().max() > 1e-3
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_the_documented_program_trains_and_serves_adapters(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text()
    program: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], program)
    tokenizer = byte_tokenizer()
    rows = {name: sft_rows([{"prompt": "2 + 2 =", "response": name}] * 2, tokenizer, 32) for name in ("four", "five")}
    batches = {name: data.batch([0, 1]) for name, data in rows.items()}
    train = program["teach"](models["qwen2"], batches, tmp_path)
    assert {name: options.rank for name, options in train.adapters.items()} == {"four": 4, "five": 8}
    assert capsys.readouterr().out.count("version 1: ") == 2
    assert (tmp_path / "five" / "adapter_config.json").exists()
    train.release()


def test_a_loaded_adapter_goes_on_as_if_it_had_never_stopped(
    engines: list[Any], models: dict[str, Path], tmp_path: Path
) -> None:
    engine = build(engines, models)
    engine.add_adapter("a", WIDE, seed=3)
    learn(engine, "a", 0)
    engine.save_adapter("a", tmp_path / "saved")
    stats = learn(engine, "a", 1)
    expected = values(engine, "a", tmp_path)
    fresh = build(engines, models)
    fresh.load_adapter("b", tmp_path / "saved")
    assert learn(fresh, "b", 1) == stats
    assert_equal(values(fresh, "b", tmp_path), expected)
    engine.load_adapter("a", tmp_path / "saved")
    assert learn(engine, "a", 1) == stats
    engine.load_adapter("a", tmp_path / "saved", with_optimizer=False)
    learn(engine, "a", 1)
    assert not torch.equal(
        *(torch.cat([t.flatten() for t in v.values()]) for v in (values(engine, "a", tmp_path), expected))
    )
    engine.remove_adapter("a")
    assert engine.adapters == {}


@pytest.mark.parametrize("options", [{"size": 2}, {"deterministic": True}])
def test_adapters_resume_exactly_with_the_state_of_their_engine(
    engines: list[Any], models: dict[str, Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    engine, adapters = build(engines, models, **options), ADAPTERS
    assert not engine.adapters

    def go_on(each: Any, seeds: range) -> list[dict[str, float]]:
        return [learn(each, name, 10 * seed + len(name)) for seed in seeds for name in adapters]

    for number, (name, adapter) in enumerate(adapters.items()):
        engine.add_adapter(name, adapter, seed=number)
    go_on(engine, range(2))
    engine.forward_backward(make_batch(LENGTHS, 5), token_loss, num_counted, adapter="mlp")
    known, base = engine.adapters, engine.base_id
    engine.save_state(tmp_path / "state", asynchronous=True)
    stats = go_on(engine, range(2, 4))
    expected = {name: values(engine, name, tmp_path) for name in adapters}
    fresh = build(engines, models, **options)
    fresh.add_adapter("other", NARROW)
    engine.save_state(tmp_path / "later").result()
    fresh.load_state(tmp_path / "state")
    assert (fresh.adapters, fresh.base_id) == (known, base), "it serves the same base"
    engine.remove_adapter("narrow")
    engine.recover(tmp_path / "state")
    for each in (fresh, engine):
        assert each.adapters == known
        assert go_on(each, range(2, 4)) == stats
        for name in adapters:
            assert_equal(values(each, name, tmp_path), expected[name])


def test_adapters_resume_in_another_layout(engines: list[Any], models: dict[str, Path], tmp_path: Path) -> None:
    engine, alone = build(engines, models, size=2), build(engines, models)
    engine.add_adapter("a", WIDE)
    learn(engine, "a", 0)
    engine.save_state(tmp_path / "state")
    engine.forward_backward(make_batch(LENGTHS, 5), token_loss, num_counted, adapter="a")
    engine.save_state(tmp_path / "amid")
    with pytest.raises(CheckpointError, match="accumulated gradients of the adapter 'a'; resume in that layout"):
        alone.load_state(tmp_path / "amid")
    alone.load_state(tmp_path / "state")
    engine.load_state(tmp_path / "state")
    for each in (alone, engine):
        learn(each, "a", 1)
    assert_equal(values(alone, "a", tmp_path / "alone"), values(engine, "a", tmp_path), 1e-5)
    exact = build(engines, models, size=2, tp_size=2, deterministic=True)
    with pytest.raises(ConfigError, match="with tp_size=2 training adds products in another order"):
        exact.load_state(tmp_path / "state")


def test_what_cannot_be_is_refused_and_changes_nothing(
    engines: list[Any], models: dict[str, Path], tmp_path: Path
) -> None:
    engine, batch = build(engines, models), make_batch(LENGTHS)
    engine.add_adapter("a", NARROW)
    learn(engine, "a", 0)
    engine.save_adapter("a", tmp_path / "saved")
    before = values(engine, "a", tmp_path)
    for call, reason in {
        lambda: engine.add_adapter("a", NARROW): "is there already",
        lambda: engine.add_adapter("b", {"dropout": 0.1}): "dropout=0.1",
        lambda: engine.add_adapter("b", {"target_modules": ["q_prj"]}): "q_prj",
        lambda: engine.train_batch(batch, token_loss, num_counted): "would change the weights",
        lambda: engine.optimizer_step(): "would change the weights",
        lambda: engine.load(): "would change the weights",
        lambda: engine.forward(batch, next_token_logprobs, adapter="c"): "no adapter 'c'",
        lambda: engine.optimizer_step("a", momentum=0.1): "AdamW has no momentum",
    }.items():
        with pytest.raises(ConfigError, match=reason):
            call()
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 4, "use_dora": True}))
    save_file({}, strange / "adapter_model.safetensors")
    foreign = AdapterWeights(2, 2.0, {"model.layers.0.self_attn.q_proj": (torch.ones(2, 7), torch.ones(9, 2))})
    (tmp_path / "foreign").mkdir()
    foreign.write(tmp_path / "foreign")
    with pytest.raises(ConfigError, match="use_dora=True"):
        engine.load_adapter("b", strange, with_optimizer=False)
    with pytest.raises(ConfigError, match="belongs to another base model"):
        engine.load_adapter("b", tmp_path / "foreign", with_optimizer=False)
    with pytest.raises(CheckpointError, match="with_optimizer=False"):
        engine.load_adapter("b", tmp_path / "foreign")
    engine.add_adapter("wide", WIDE)
    with pytest.raises(ConfigError, match="rank 8"):
        engine.load_adapter("wide", tmp_path / "saved")
    (tmp_path / "saved" / "optimizer.pt").write_bytes(b"torn")
    with pytest.raises(DamagedCheckpointError, match=r"optimizer\.pt"):
        engine.load_adapter("a", tmp_path / "saved")
    assert_equal(values(engine, "a", tmp_path), before)
    assert set(engine.adapters) == {"a", "wide"}
    lora = RliteTrainEngine(policy_module(models["qwen2"], lora=WIDE))
    lora.build(colocate_with=engines[:1])
    engines.append(lora)
    with pytest.raises(ConfigError, match="adapters of its own"):
        lora.add_adapter("a", NARROW)
