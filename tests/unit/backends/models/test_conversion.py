"""Tensors of checkpoints come under the names of a model's parameters, and go back as they were stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import conversion_mapping
from transformers import core_model_loading as rules

from rlite.backends.models.conversion import Rules, default_conversion, make_conversion
from rlite.backends.models.expressions import Held
from rlite.backends.models.stored import StoredCheckpoint, own_shapes
from rlite.errors import CheckpointError, ConfigError
from tests.unit.backends.models.small import TEXTS, held, tensors_in, text_model, written


class Recorder:
    """A reader that remembers the names that were read."""

    def __init__(self, reader: Any) -> None:
        self._reader, self.seen = reader, list[str]()

    def read(self, name: str, box: Any) -> Tensor:
        self.seen.append(name)
        return self._reader.read(name, box)


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kind", TEXTS)
def test_a_checkpoint_of_transformers_is_read_and_written_back_byte_for_byte(kind: str, tmp_path: Path) -> None:
    model = text_model(kind)
    files = written(model, tmp_path)
    reader = StoredCheckpoint(model, tmp_path)
    assert equal({name: reader.read(name) for name in held(model)}, held(model))
    assert equal(dict(reader.conversion.stored(held(model).items())), files)
    assert not reader.untrained
    assert set(reader.names()) >= held(model).keys()
    own = default_conversion(model, own_shapes(model))
    assert equal(dict(own.stored(held(model).items())), files)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "nemotron_h"])
def test_a_box_of_experts_reads_the_tensors_of_these_experts_alone(kind: str, tmp_path: Path) -> None:
    model = text_model(kind)
    written(model, tmp_path)
    reader = StoredCheckpoint(model, tmp_path)
    reader.raw = recorder = Recorder(reader.raw)  # type: ignore[assignment]
    name, block = next(
        (name, tensor) for name, tensor in held(model).items() if "experts" in name and tensor.dim() == 3
    )
    box = (slice(1, 3), slice(3, block.shape[1] - 2), slice(0, 5))
    assert torch.equal(reader.read(name, box), block[box])
    numbers = {part for name in recorder.seen for part in name.split("experts.")[1].split(".") if part.isdigit()}
    assert numbers == {"1", "2"}
    assert reader.read(name, (slice(2, 2), *box[1:])).shape == (0, block.shape[1] - 5, 5)


def changed(folder: Path, change: Any) -> None:
    tensors = tensors_in(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


GATE = "model.layers.0.mlp.experts.{}.gate_proj.weight"
DAMAGE = {
    "an expert is missing": (
        lambda held: held.pop(GATE.format(1)),
        r"gate_up_proj cannot be made of 7 tensors .* by MergeModulelist and Concatenate of mlp.experts.\*.gate_proj"
        r".*: no tensor matches mlp.experts.1.gate_proj",
    ),
    "the last expert's half is missing": (
        lambda held: held.pop(GATE.format(3)),
        r"3 tensors of .*gate.*, 4 tensors of .*up",
    ),
    "all gates are missing": (
        lambda held: [held.pop(GATE.format(number)) for number in range(4)],
        r"no tensor matches mlp.experts.0.gate_proj",
    ),
    "an expert has another width": (
        lambda held: held.update({GATE.format(2): torch.zeros(3, 64)}),
        r"gate_up_proj cannot be made of 8 tensors .*MergeModulelist",
    ),
    "a block is doubled": (
        lambda held: held.update({"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(4, 48, 64)}),
        r"holds model.layers.0.mlp.experts.gate_up_proj twice, as .*experts.0.gate_proj.weight and as .*gate_up_proj",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_experts_are_refused_with_the_conversion_that_looked_for_them(damage: str, tmp_path: Path) -> None:
    change, message = DAMAGE[damage]
    written(text_model("qwen3_moe"), tmp_path)
    changed(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        StoredCheckpoint(text_model("qwen3_moe"), tmp_path)


def test_a_block_without_any_expert_is_refused_with_the_conversion_that_looked_for_it(tmp_path: Path) -> None:
    written(text_model("qwen3_moe"), tmp_path)
    changed(tmp_path, lambda held: [held.pop(name) for name in list(held) if "layers.0.mlp.experts" in name])
    reader = StoredCheckpoint(text_model("qwen3_moe"), tmp_path)
    with pytest.raises(CheckpointError, match=r"no tensor named .*gate_up_proj.* makes it by MergeModulelist and Conc"):
        reader.shape("model.layers.0.mlp.experts.gate_up_proj")


Q, K = ["a.weight"], ["x.weight", "y.weight"]
OPERATIONS: dict[str, tuple[list[str], list[str], list[Any], dict[str, tuple[int, ...]]]] = {
    "chunk": (Q, K, [rules.Chunk(dim=0)], {"a.weight": (6, 4)}),
    "uneven chunk": (Q, K, [rules.Chunk(dim=1)], {"a.weight": (6, 5)}),
    "concatenate": (K, Q, [rules.Concatenate(dim=1)], {"x.weight": (3, 2), "y.weight": (3, 5)}),
    "transpose": (Q, ["x.weight"], [rules.Transpose(0, 1)], {"a.weight": (6, 4)}),
    "transpose and chunk": (Q, K, [rules.Transpose(0, 1), rules.Chunk(dim=0)], {"a.weight": (6, 4)}),
    "interleave": (Q, ["x.weight"], [rules.Interleave(dim=0)], {"a.weight": (6, 4)}),
    "interleave and chunk": (Q, K, [rules.Interleave(dim=1), rules.Chunk(dim=1)], {"a.weight": (3, 8)}),
    "the inverse of interleave": (Q, ["x.weight"], [rules.Interleave(dim=0, inverse=True)], {"a.weight": (6, 4)}),
    "merge": (
        ["a.*.weight"],
        ["x.weight"],
        [rules.MergeModulelist(dim=0)],
        {f"a.{i}.weight": (2, 3) for i in range(12)},
    ),
    "merge along another dimension": (
        ["a.*.weight"],
        ["x.weight"],
        [rules.MergeModulelist(dim=1)],
        {f"a.{i}.weight": (2, 3) for i in range(3)},
    ),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_gives_what_transformers_gives_and_is_undone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, targets, operations, shapes = OPERATIONS[name]
    stored = {name: torch.randn(shape) for name, shape in shapes.items()}
    converter = rules.WeightConverter(sources, targets, operations)
    for name, tensor in stored.items():
        renamed, pattern = converter.rename_source_key(name)
        assert pattern is not None
        converter.add_tensor(renamed, name, pattern, tensor)  # type: ignore[arg-type]
    expected = converter.convert(targets[0], config=text_model("qwen3").config)
    expected = {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in expected.items()}
    found = [rules.WeightConverter(sources, targets, operations)]
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model: found)
    own = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    made = make_conversion(Rules(text_model("qwen3"), own), stored, lambda name: tuple(stored[name].shape))
    (group,) = made.groups
    for name, expression in group.held.items():
        assert expression.shape == own[name]
        for box in ((slice(0, own[name][0]), *map(slice, own[name][1:])), tuple(slice(1, size) for size in own[name])):
            whole = tuple(slice(part.start or 0, part.stop) for part in box)
            assert torch.equal(expression.read(Held(stored), whole), expected[name][whole])
    assert equal(dict(made.stored(expected.items())), stored)


def test_unknown_kinds_of_conversion_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rotated(rules.ConversionOps):
        def convert(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    class Numbered(rules.WeightRenaming):
        pass

    found = [rules.WeightConverter("a", "b", [Rotated()]), Numbered("a", "b")]
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model: found)
    with pytest.raises(
        ConfigError, match=r"converts checkpoints of Qwen3ForCausalLM by Numbered, Rotated, which rlite"
    ):
        Rules(text_model("qwen3"), {})


def test_a_parameter_that_a_group_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [rules.WeightConverter(Q, K, [rules.Chunk(dim=0)])]
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model: found)
    made = make_conversion(Rules(text_model("qwen3"), dict.fromkeys(K, (3, 4))), Q, lambda name: (6, 4))
    with pytest.raises(CheckpointError, match=r"x.weight is stored together with y.weight, which is missing"):
        list(made.stored([("x.weight", torch.zeros(3, 4)), ("another", torch.zeros(1))]))
