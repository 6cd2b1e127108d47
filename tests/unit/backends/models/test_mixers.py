"""Layers that carry a state compute documents of a pack, and steps, as transformers computes whole sequences."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    Lfm2ForCausalLM,
    Qwen3_5ForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)
from transformers.models.qwen3_5 import modeling_qwen3_5

from rlite.backends.models import mixers as module
from rlite.backends.models.architecture import refusal
from rlite.backends.models.attention import PACKED, PackedLayout, attention
from rlite.backends.models.mixers import (
    MOST_PADDING,
    Documents,
    Mixer,
    find_mixers,
    groups,
    install_mixers,
    keeps_apart,
    layers_read_raw,
    mixing,
    recompute_alike,
)
from rlite.errors import ConfigError
from rlite.nn import LoraOptions
from rlite.nn.options import ALL_LINEAR
from rlite.runtime.parallel.fsdp import replace_parameters
from rlite.trainer.model.modules import policy_module
from rlite.trainer.model.options import OptimizerOptions
from tests.hybrids import HYBRIDS, hybrid, hybrid_config, save_hybrid

LENGTHS = [70, 5, 1, 33]
"""one document is longer than a chunk of 64 tokens, in which gated delta nets are computed"""


def documents(lengths: Sequence[int] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(16, 256, (length,), generator=generator) for length in lengths]


def packed_logits(model: Any, rows: list[Tensor]) -> Tensor:
    lengths = [len(row) for row in rows]
    cu_seqlens = F.pad(torch.tensor(lengths).cumsum(0), (1, 0))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    inputs = {"input_ids": torch.cat(rows)[None], "position_ids": positions, "use_cache": False}
    with attention(model.config, PACKED), mixing(Documents(lengths)):
        return model(**inputs, packed_layout=PackedLayout(cu_seqlens, max(lengths))).logits[0]


def gradients(model: Any, outputs: Tensor, weights: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (outputs * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_pack_gives_the_logits_and_gradients_of_its_documents(kind: str) -> None:
    model = hybrid(kind)
    expected = torch.cat([model(input_ids=row[None], use_cache=False).logits[0] for row in documents()])
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    expected_gradients = gradients(model, expected, weights)
    assert install_mixers(model)
    found = packed_logits(model, documents())
    assert float((found - expected).detach().abs().max() / expected.detach().std()) < 1e-4
    for name, gradient in gradients(model, found, weights).items():
        reference = expected_gradients[name]
        assert float((gradient - reference).abs().max()) < 1e-4 * float(reference.abs().max() + 1e-3), name


@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_document_of_nan_reaches_none_of_its_neighbours(kind: str) -> None:
    model = hybrid(kind)
    install_mixers(model)
    poisoned = torch.zeros(sum(LENGTHS), dtype=torch.bool)
    poisoned[LENGTHS[0] : LENGTHS[0] + LENGTHS[1]] = True

    def poison(table: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.masked_fill(poisoned[:, None], torch.nan)

    with torch.no_grad():
        handle = model.get_input_embeddings().register_forward_hook(poison)
        reached = packed_logits(model, documents()).isnan().any(-1)
        handle.remove()
    assert torch.equal(reached, poisoned)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_tokens_in_chunks_and_one_by_one_give_what_the_whole_sequence_gives(kind: str) -> None:
    model = hybrid(kind)
    x = torch.randn(2, 75, 64, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        for mixer in install_mixers(model):
            whole, state = mixer.run(x)
            assert torch.equal(whole, mixer.run_without_state(x))
            assert all(len(tensor) == 2 for tensor in state.values())
            parts, after = [], None
            for chunk in x.split([66, 7, 1, 1], dim=1):
                output, after = mixer.run(chunk, after)
                parts.append(output)
            torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-4)
            assert after is not None
            torch.testing.assert_close(after, state, atol=1e-5, rtol=1e-4)


def test_the_chunked_delta_rule_has_other_bits_than_the_step_by_step_one_that_serves() -> None:
    generator = torch.Generator().manual_seed(5)
    query, key, value = (torch.randn(1, 20, 4, 16, generator=generator) for _ in range(3))
    decay, beta = -torch.rand(1, 20, 4, generator=generator), torch.rand(1, 20, 4, generator=generator)
    facts = {"initial_state": None, "output_final_state": False, "use_qk_l2norm_in_kernel": True}
    trained, served = (
        rule(query, key, value, g=decay, beta=beta, **facts)[0]
        for rule in (modeling_qwen3_5.torch_chunk_gated_delta_rule, modeling_qwen3_5.torch_recurrent_gated_delta_rule)
    )
    torch.testing.assert_close(trained, served, atol=1e-5, rtol=1e-4)
    assert not torch.equal(trained, served), "deterministic=true could train what it serves"


@pytest.mark.parametrize("kind", ["qwen3_5_text", "bamba"])
def test_recomputed_activations_see_the_documents_of_their_own_forward(kind: str) -> None:
    model = hybrid(kind)
    mixer, *_ = install_mixers(model)
    x = torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(3))
    outputs = []
    for context in (None, lambda: recompute_alike(model.config)):
        leaf = x.clone().requires_grad_()
        with mixing(Documents([30, 10])):
            output = mixer.module(leaf) if context is None else None
            if output is None:
                output = checkpoint(mixer.module, leaf, use_reentrant=False, context_fn=context)
        output.square().sum().backward()  # outside of the block, as a train engine does
        outputs.append(leaf.grad)
    torch.testing.assert_close(outputs[1], outputs[0])


def test_outside_of_a_block_an_installed_mixer_computes_as_its_module_does() -> None:
    model = hybrid("lfm2")
    ids = documents([9])[0][None]
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert install_mixers(model) == install_mixers(model)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        (first, _), own = find_mixers(copied), {id(part) for part in copied.modules()}
        assert id(first.module) in own
        assert torch.equal(packed_logits(copied, documents()), packed_logits(model, documents()))


def test_a_layer_s_kind_is_decided_by_its_module_whatever_the_config_calls_it() -> None:
    """Both configs name their layers linear_attention."""
    assert refusal(Qwen3_5ForCausalLM, hybrid_config("qwen3_5_text")) is None
    griffin = RecurrentGemmaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=3, intermediate_size=96)
    told = str(refusal(RecurrentGemmaForCausalLM, griffin))
    assert "layers of kind linear_attention" in told or "keeps a recurrent state" in told  # by its release's names


class Averaging(Lfm2ForCausalLM):
    """Besides its known mixers, a layer that mixes tokens below every tolerance."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers[1].register_forward_hook(lambda layer, args, out: out + 1e-13 * out.cumsum(1))


def test_a_model_that_mixes_tokens_beside_its_known_mixers_is_refused() -> None:
    assert refusal(Averaging, hybrid_config("lfm2")) is not None


class Carrying(nn.Module):
    """A mixer that remembers the last token of its last call."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.conv, self.layer_idx = inner, inner.conv, inner.layer_idx
        self.last = torch.zeros(())

    def forward(self, hidden_states: Tensor, cache: Any = None, past_key_values: Any = None, **kwargs: Any) -> Tensor:
        kwargs |= {"cache": cache} if "cache" in inspect.signature(self.inner.forward).parameters else {}
        output = self.inner(hidden_states, **kwargs) + 1e-13 * self.last
        self.last = hidden_states[:1, -1:].detach()
        return output


class CarryingModel(Lfm2ForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in (self.model.layers[0], self.model.layers[2]):
            layer.conv = Carrying(layer.conv)


def test_a_mixer_that_carries_something_from_document_to_document_is_refused_without_a_tolerance() -> None:
    assert "mixes" in str(refusal(CarryingModel, hybrid_config("lfm2")))


@pytest.mark.parametrize("lengths", [[1], [5, 5, 5], [70, 5, 1, 33], [8, 8, 7, 7, 6, 6, 1, 1, 1], list(range(1, 60))])
def test_documents_share_calls_with_little_padding(lengths: list[int]) -> None:
    shared = list(groups(lengths))
    assert sorted(row for rows in shared for row in rows) == list(range(len(lengths)))
    for rows in shared:
        tokens = sum(lengths[row] for row in rows)
        assert max(lengths[row] for row in rows) * len(rows) <= (1 + MOST_PADDING) * tokens
    assert len(shared) <= max(len(set(lengths)), 1)


class Sums(nn.Module):
    """Sums over the past of each document, or over the whole row."""

    def __init__(self, obeys: bool) -> None:
        super().__init__()
        self.conv, self.layer_idx, self.obeys, self.calls = nn.Conv1d(1, 1, 1), 0, obeys, []

    def forward(self, hidden_states: Tensor, cache: Any = None, **borders: Tensor) -> Tensor:
        self.calls.append((tuple(hidden_states.shape), sorted(borders)))
        if not (self.obeys and borders):
            return hidden_states.cumsum(1)
        cu_seqlens = borders["cu_seq_lens_q"]
        assert borders["seq_idx"].shape == hidden_states.shape[:2]
        return torch.cat([part.cumsum(1) for part in hidden_states.split(cu_seqlens.diff().tolist(), dim=1)], dim=1)


class Careless(Sums):
    """Takes borders and ignores them, as some layers of transformers do."""


class Raising(Sums):
    def forward(self, hidden_states: Tensor, cache: Any = None, **borders: Tensor) -> Tensor:
        if borders:
            raise ValueError("can't keep packed sequences apart")
        return super().forward(hidden_states, cache)


@pytest.mark.parametrize(("cls", "obeys"), [(Sums, True), (Careless, False), (Raising, True)])
def test_borders_are_handed_over_to_layers_that_obey_them_and_to_no_others(
    cls: type[Sums], obeys: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_KEEPS_APART", {})
    sums = cls(obeys)
    mixer = Mixer(sums, 0, None, "cache")  # type: ignore[arg-type]
    x = torch.randn(1, 9, 4)
    assert keeps_apart(mixer, x) is (cls is Sums)
    sums.calls.clear()
    found = Documents([5, 4], takes_borders=True).mix(mixer, x)
    torch.testing.assert_close(found, torch.cat([x[:, :5].cumsum(1), x[:, 5:].cumsum(1)], dim=1))
    expected = [((1, 9, 4), ["cu_seq_lens_q", "seq_idx"])] if cls is Sums else [((2, 5, 4), [])]
    assert sums.calls == expected


@pytest.mark.parametrize(
    "kind", sorted(HYBRIDS.keys() & {"qwen3_5_text", "lfm2", "bamba", "falcon_h1", "nemotron_h", "jamba"})
)
def test_every_adapter_has_a_gradient_and_layers_that_are_not_called_get_none(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_hybrid(hybrid(kind), tmp_path)
    options = OptimizerOptions(lr=1e-2, weight_decay=0.0, scheduler="constant", warmup_steps=0, total_steps=10)
    model = policy_module(folder, options, LoraOptions(rank=2, target_modules=[ALL_LINEAR]))
    expected = {"jamba": ["dt_proj"], "qwen3_5_text": [], "lfm2": []}.get(kind, ["out_proj"])
    assert sorted({name.rpartition(".")[2] for name in layers_read_raw(model)}) == expected
    assert ("no adapters on" in caplog.text) is bool(expected)
    generator = torch.Generator().manual_seed(0)

    def make(parameter: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(torch.randn(parameter.shape, generator=generator) / 10, parameter.requires_grad)

    replace_parameters(model, make)
    install_mixers(model)
    assert sorted({name.rpartition(".")[2] for name in layers_read_raw(model)}) == expected
    packed_logits(model, documents([9, 4])).square().sum().backward()
    adapters = {name: p for name, p in model.named_parameters() if "lora_" in name}
    assert adapters
    assert [name for name, p in adapters.items() if p.grad is None or not p.grad.any()] == []
    if expected:
        with pytest.raises(ConfigError, match=f"{expected[0]}' would be ignored: .* leave it out"):
            policy_module(folder, options, LoraOptions(rank=2, target_modules=expected))
