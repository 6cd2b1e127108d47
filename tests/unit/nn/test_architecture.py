"""Models that packs would compute wrongly are refused; the others are computed as transformers does."""

from __future__ import annotations

import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

import rlite
from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.backends.embedded.worker import refusal as embedded_refusal
from rlite.backends.models.architecture import check_gpu_kernels, miniature, refusal, rope_limit
from rlite.backends.models.attention import PACKED
from rlite.backends.models.layout import attention_layers
from rlite.data.packs import lazy_pack as pack
from rlite.errors import ConfigError, StorageError
from rlite.nn import HuggingFaceFsdp2TrainModule
from rlite.nn.pretrained import causal_lm_class, meta_parameters
from rlite.runtime.parallel.tensor import check_split

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EQUAL: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "opt": {"ffn_dim": 80, "word_embed_proj_dim": 48, "dropout": 0.1},
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "gemma": {"num_key_value_heads": 1, "head_dim": 16},
    "phi": {"partial_rotary_factor": 0.5},
    "gpt_neox": {},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 12},  # its layers keep arguments from the attention
    "stablelm": {"hidden_size": 64, "num_key_value_heads": 2},
    "olmo2": {},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 16},
    "phi3": {"num_key_value_heads": 2, "sliding_window": 16},
    "starcoder2": {"num_key_value_heads": 2, "sliding_window": 16},
    "gemma3_text": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma2": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16, "attn_logit_softcapping": 2.0},
    "granite_swa": {"num_key_value_heads": 2, "sliding_window": 16},
    "minicpm3": {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 8},
    "windowed qwen2": {
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 1,
        "layer_types": None,
    },
}
ROWS = ("self_attn.o_proj", "mlp.down_proj")
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gptj": ({"rotary_dim": 8}, "attention in code of its own"),
    "bloom": ({}, "attention in code of its own"),
    "codegen": ({"rotary_dim": 8}, "attention in code of its own"),
    "xglm": ({"ffn_dim": 80}, "attention in code of its own"),
    "falcon": ({}, "attention in code of its own"),
    "mpt": ({}, "attention in code of its own"),
    "gpt_neo": ({"attention_types": [[["global", "local"], 1], [["global"], 1]]}, "attention in code of its own"),
    "bert": ({}, "not causal.*is_decoder=true"),
    "roberta": ({"is_decoder": True}, "positions itself"),
    "rwkv": ({"attention_hidden_size": 48}, "recurrent state"),
    "recurrent_gemma": ({}, "layers of kind linear_attention|recurrent state"),  # before 5.23 its config names no kinds
    "llama4_text": (
        {**EXPERTS, "num_experts_per_tok": 1, "num_key_value_heads": 2, "head_dim": 12, "intermediate_size_mlp": 80},
        "experts in a form that rlite does not know: .* is not called with tokens, chosen experts and their weights",
    ),
    "phimoe": ({**EXPERTS, "num_key_value_heads": 2}, "^draws random numbers in training"),
}
if "inkling_text" in transformers.CONFIG_MAPPING:  # its config does not say whether embeddings are tied
    REFUSED["inkling_text"] = ({**EXPERTS, "num_key_value_heads": 2, "head_dim": 12}, "positions itself")


def config_of(kind: str, **fields: Any) -> Any:
    config = AutoConfig.for_model(kind.removeprefix("windowed "))
    known = {key: value for key, value in {**SIZES, **fields}.items() if hasattr(config, key)}
    if kind != "windowed qwen2" and (layers := vars(config).get("layer_types")):
        known.setdefault("layer_types", layers[: SIZES["num_hidden_layers"]])
    return type(config)(**known)


def wide_model(config: Any) -> Any:
    """A model in which a wrong mask or position shows: attention is far from uniform."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5 + (parameter.dim() == 1))
    return model


def save_checkpoint(kind: str, folder: Path, **fields: Any) -> Path:
    wide_model(config_of(kind, **fields)).save_pretrained(folder)
    return folder


def on_meta(folder: Path) -> Any:
    with meta_parameters():
        return causal_lm_class(folder, HuggingFaceFsdp2TrainModule).from_pretrained(folder)


def test_embedding_that_is_also_the_output_head_is_sharded_with_the_rest_of_the_model(tmp_path: Path) -> None:
    model = on_meta(save_checkpoint("bert", tmp_path, is_decoder=True, tie_word_embeddings=True))
    model.tie_weights()  # as a worker does
    units = model.fsdp_units()
    assert {type(unit).__name__ for unit in units} == {"BertLayer"}


def test_layers_that_share_weights_are_sharded_with_the_rest_of_the_model(tmp_path: Path) -> None:
    config = AutoConfig.for_model("zamba", num_hidden_layers=4, layers_block_type=["mamba", "hybrid"] * 2)
    miniature(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config).save_pretrained(tmp_path)
    units = on_meta(tmp_path).fsdp_units()
    assert {type(unit).__name__ for unit in units} == {"ZambaMambaDecoderLayer"}


@pytest.mark.parametrize(
    ("kind", "layers"), [("mamba", "num_hidden_layers"), ("mamba2", "num_hidden_layers"), ("whisper", "decoder_layers")]
)
def test_models_without_attention_or_with_another_limit_of_positions_are_served(kind: str, layers: str) -> None:
    config = AutoConfig.for_model(kind, **{layers: 2})
    assert embedded_refusal(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config) is None


@pytest.mark.parametrize("kind", EQUAL)
def test_packs_of_an_accepted_model_give_the_plain_model_s_logits_and_gradients(kind: str, tmp_path: Path) -> None:
    plain = wide_model(config_of(kind, **EQUAL[kind]))
    if "attn_logit_softcapping" in EQUAL[kind]:
        plain.set_attn_implementation("eager")  # the only one that caps scores in every release of transformers
    assert refusal(type(plain), plain.config) is None
    plain.save_pretrained(tmp_path)
    packed = causal_lm_class(tmp_path, HuggingFaceFsdp2TrainModule).from_pretrained(tmp_path).eval()
    rows = [torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(length)) for length in (21, 1, 30)]
    ids, mask = (
        torch.nn.utils.rnn.pad_sequence(part, batch_first=True) for part in (rows, [torch.ones_like(r) for r in rows])
    )
    found = packed.compute_logits(pack({"input_ids": ids, "attention_mask": mask}, [0, 1, 2], torch.device("cpu")))
    expected = torch.cat([plain(row[None]).logits[0] for row in rows])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    weights = torch.randn_like(expected)
    for logits in (found, expected):
        (logits * weights).sum().backward()
    for (name, parameter), reference in zip(packed.named_parameters(), plain.parameters(), strict=True):
        if reference.grad is not None:
            scale = reference.grad.abs().max().clamp(min=1.0)
            torch.testing.assert_close(parameter.grad / scale, reference.grad / scale, atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_packs_would_compute_wrongly_are_refused_with_the_reason(kind: str) -> None:
    fields, reason = REFUSED[kind]
    config = config_of(kind, **fields)
    found = refusal(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
    assert found is not None
    assert re.search(reason, found)


LATE: dict[str, tuple[dict[str, Any], str]] = {
    "recurrent_gemma": ({"block_types": ["attention"] * 5 + ["recurrent"]}, "linear_attention|recurrent state"),
    "minimax": (
        {"num_key_value_heads": 2, "head_dim": 12, "layer_types": ["full_attention"] * 5 + ["linear_attention"]},
        "mixture of experts|linear_attention",
    ),
}


@pytest.mark.parametrize("kind", LATE)
def test_a_layer_of_another_kind_is_found_wherever_it_stands(kind: str) -> None:
    fields, reason = LATE[kind]
    config = config_of(kind, **fields, num_hidden_layers=6)
    found = refusal(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
    assert found is not None
    assert re.search(reason, found)


def test_the_small_model_has_every_layer_of_the_large_one() -> None:
    """More than four kinds: each row of the config's lists is a kind of its own."""
    windows = ["full_attention", "sliding_attention"]
    fields = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97, "num_kv_shared_layers": 0}
    config = config_of(
        "gemma3n_text",
        **fields,
        num_key_value_heads=2,
        head_dim=16,
        num_hidden_layers=9,
        layer_types=(windows * 5)[:9],
        intermediate_size=[64, 64, 72, 72, 80, 80, 88, 88, 88],
        activation_sparsity_pattern=[0.0] * 9,
    )
    kinds = list(zip(config.layer_types, config.intermediate_size, strict=True))
    small = miniature(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config).config
    assert list(zip(small.layer_types, small.intermediate_size, strict=True)) == kinds
    assert len(set(kinds)) > 4


def test_layers_that_no_list_of_the_config_names_are_all_built() -> None:
    """A factor that depends on the layer's number shows in the modules alone."""
    config = config_of("diffllama", num_key_value_heads=2, num_hidden_layers=7)
    model = miniature(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
    assert len({layer.self_attn.lambda_init for layer in model.model.layers}) == 7
    deep = config_of("qwen3", num_key_value_heads=2, head_dim=16, num_hidden_layers=600, layer_types=None)
    assert "at most 512 layers, and this one has 600" in str(refusal(MODEL_FOR_CAUSAL_LM_MAPPING[type(deep)], deep))


def test_a_kind_of_layer_that_rlite_does_not_know_is_refused_even_if_small_models_agree() -> None:
    config = config_of("gpt2")
    config.layer_types = ["full_attention", "chunked_attention", "full_attention"]
    found = refusal(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
    assert found == "has layers of kind chunked_attention, which rlite does not know"


class Shifting(Qwen3ForCausalLM):
    """Each token also sees a share of the token before it, which is far below any tolerance."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.embed_tokens.register_forward_hook(lambda module, args, out: out + 1e-12 * out.roll(1, dims=1))


def test_tokens_that_mix_below_every_tolerance_are_found_without_one() -> None:
    config = config_of("qwen3", num_key_value_heads=2, head_dim=16)
    assert refusal(Shifting, config) == "mixes tokens by other means than attention"
    assert refusal(Qwen3ForCausalLM, config) is None


class HalfLearnt(Qwen3ForCausalLM):
    """Embeddings of a pack pass on half of their gradient: the logits are those of transformers."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.embed_tokens.register_forward_hook(self.detach)

    def detach(self, module: Any, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        return (out + out.detach()) / 2 if self.config._attn_implementation == PACKED else out


def test_a_pack_with_the_logits_of_transformers_and_other_gradients_is_refused() -> None:
    found = refusal(HalfLearnt, config_of("qwen3", num_key_value_heads=2, head_dim=16))
    assert found == "computes another gradient of model.embed_tokens.weight in a pack"


def shifted_by(number: int) -> Any:
    """Return a hook that adds the token before each token, in layer 4 alone."""
    return lambda module, args, out: out + 0.1 * out.roll(1, dims=1) if number == 4 else out


class ShiftingByNumber(Qwen3ForCausalLM):
    """Code that asks for the number of its layer: no size, type or attribute tells the layers apart."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for number, layer in enumerate(self.model.layers):
            layer.mlp.register_forward_hook(shifted_by(number))


class Shift(torch.nn.Module):
    """A shift whose width stands in a tuple."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.widths = widths

    def forward(self, x: Any) -> Any:
        return sum(x.roll(width, dims=1) for width in self.widths)


class ShiftingByTuple(Qwen3ForCausalLM):
    """Layers that differ in an attribute of a module that is no number and no text."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for number, layer in enumerate(self.model.layers):
            layer.mlp = torch.nn.Sequential(layer.mlp, Shift((0, 1) if number == 5 else (0,)))


@pytest.mark.parametrize("cls", [ShiftingByNumber, ShiftingByTuple])
def test_a_layer_that_differs_in_nothing_but_what_it_computes_is_found(cls: Any) -> None:
    config = config_of("qwen3", num_key_value_heads=2, head_dim=16, num_hidden_layers=6, layer_types=None)
    assert "not causal" in str(refusal(cls, config))


class Table(torch.nn.Module):
    """An embedding that is no nn.Embedding."""

    def __init__(self, like: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty_like(like.weight))

    def forward(self, ids: Any) -> Any:
        return self.weight[ids]


class OwnTable(Qwen3ForCausalLM):
    """A model with an embedding of its own kind."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.embed_tokens = Table(self.model.embed_tokens)


def test_a_model_with_an_embedding_of_its_own_kind_passes() -> None:
    assert refusal(OwnTable, config_of("qwen3", num_key_value_heads=2, head_dim=16)) is None


@pytest.mark.parametrize(
    ("kind", "fields", "widths"),
    [
        ("qwen3", {"num_key_value_heads": 2, "head_dim": 320}, "width 320 and values of width 320"),
        ("gemma4_text", {"hidden_size_per_layer_input": 0}, "width 512 and values of width 512"),
        ("gemma2", {"num_key_value_heads": 2, "head_dim": 16}, "caps its attention scores"),
    ],
)
def test_heads_that_gpu_kernels_do_not_take_are_refused_with_the_reason(
    kind: str, fields: dict[str, Any], widths: str
) -> None:
    config = config_of(kind, **fields)
    with pytest.raises(ConfigError, match=widths):
        check_gpu_kernels(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)


def widths_of(config: Any) -> set[tuple[int, int]]:
    """Widths of queries and values in the attention layers of a causal model."""
    layers = attention_layers(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config).values()
    return {(layer.key_width, layer.value_width) for layer in layers}


def test_widths_are_found_in_every_layer_not_in_the_config() -> None:
    assert widths_of(AutoConfig.for_model("gemma4_text")) == {(256, 256), (512, 512)}


@pytest.mark.parametrize(
    ("kind", "fields", "widths"),
    [
        ("gemma", {"num_key_value_heads": 1, "head_dim": 20}, (20, 20)),
        ("minicpm3", {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}, (24, 16)),
        ("granite_swa", {"num_key_value_heads": 2}, (12, 12)),
    ],
)
def test_heads_that_zeros_make_equal_for_gpu_kernels_pass(
    kind: str, fields: dict[str, Any], widths: tuple[int, int]
) -> None:
    config = config_of(kind, **fields)
    assert widths_of(config) == {widths}
    check_gpu_kernels(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)


def test_heads_that_gpu_kernels_take_pass() -> None:
    for kind in ("llama", "qwen3", "gemma"):
        config = config_of(kind, num_key_value_heads=2, head_dim=16)
        assert widths_of(config) == {(16, 16)}
        check_gpu_kernels(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)


def test_norms_with_a_row_for_each_head_are_refused_for_tensor_parallel_at_build(tmp_path: Path) -> None:
    rlite.shutdown()
    folder = save_checkpoint("cohere", tmp_path, num_key_value_heads=2, use_qk_norm=True)
    engine = RliteTrainEngine(on_meta(folder))
    with pytest.raises(ConfigError, match=r"'cohere' leaves model.layers.0.self_attn.q_norm.weight \[4, 12\] whole"):
        engine.build(tensor_parallel_size=2, tp_size=2)
    with pytest.raises(ConfigError, match="q_norm"):
        RliteInferenceEngine(folder).build(tensor_parallel_size=2)


@pytest.mark.parametrize("kind", [kind for kind in ("gptj", "rwkv", "inkling_text") if kind in REFUSED])
def test_both_engines_refuse_a_model_at_build_before_any_process_starts(kind: str, tmp_path: Path) -> None:
    rlite.shutdown()
    fields, reason = REFUSED[kind]
    folder = save_checkpoint(kind, tmp_path, **fields)
    for engine in (RliteTrainEngine(on_meta(folder)), RliteInferenceEngine(folder)):
        with pytest.raises(ConfigError, match=f"(?s){reason}.*docs/architectures.md"):
            engine.build()


def test_a_model_that_trains_on_one_device_is_refused_by_name_for_tensor_parallel(tmp_path: Path) -> None:
    rlite.shutdown()
    folder = save_checkpoint("gpt2", tmp_path)
    engine = RliteTrainEngine(on_meta(folder))
    with pytest.raises(ConfigError, match=r"'gpt2'.*one device for each copy"):
        engine.build(tensor_parallel_size=2, tp_size=2)
    with pytest.raises(ConfigError, match="'gpt2' has no tensor parallel plan"):
        RliteInferenceEngine(folder).build(tensor_parallel_size=2)


class WeighingLayer(Qwen3DecoderLayer):
    """A layer with a further input for each token."""

    def forward(self, hidden_states: Any, token_weights: Any = None, **kwargs: Any) -> Any:
        return super().forward(hidden_states, **kwargs) * token_weights[..., None]


def test_layers_with_further_inputs_for_each_token_are_refused_by_name_for_tensor_parallel() -> None:
    model = Qwen3ForCausalLM(config_of("qwen3", num_key_value_heads=2, head_dim=16))
    assert set(check_split(model, 2).rows) == {f"model.layers.{i}.{row}" for i in range(3) for row in ROWS}
    model.model.layers[0] = WeighingLayer(model.config, 0)
    with pytest.raises(ConfigError, match="'qwen3' gives its layers token_weights"):
        check_split(model, 2)


def test_the_check_leaves_random_numbers_alone_and_works_within_device_contexts(tmp_path: Path) -> None:
    config = config_of("qwen2", num_key_value_heads=4, rms_norm_eps=1.25e-6)  # one that no other test has checked
    state = torch.get_rng_state()
    with torch.device("meta"), meta_parameters(), torch.inference_mode():
        assert refusal(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config) is None
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("size", [12, 34, 99])
def test_models_of_a_vocabulary_of_characters_are_accepted(size: int) -> None:
    config = config_of("qwen2", vocab_size=size)
    assert refusal(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config) is None


def test_sequences_beyond_the_length_where_rotary_angles_change_are_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    folder = save_checkpoint("llama", tmp_path, max_position_embeddings=16, rope_parameters=rope)
    module = causal_lm_class(folder, HuggingFaceFsdp2TrainModule).from_pretrained(folder)
    assert rope_limit(module.config) == 16
    data = {"input_ids": torch.ones(20, dtype=torch.long), "position_ids": torch.arange(20), "max_seqlen": 20}
    with pytest.raises(ConfigError, match="a sequence of 20 tokens: beyond 16"):
        module.compute_logits({**data, "cu_seqlens": torch.tensor([0, 20])})


def test_the_page_of_models_lists_every_class_of_the_version_that_it_names() -> None:
    page = (Path(__file__).parents[3] / "docs" / "architectures.md").read_text()
    listed = re.findall(r"^\| ([\w-]+) \| (\w+) \| ", page, re.MULTILINE)[1:]
    assert "WRONG" not in page
    if f"made with transformers {transformers.__version__}:" in page:
        assert set(listed) == {(key.model_type, model.__name__) for key, model in MODEL_FOR_CAUSAL_LM_MAPPING.items()}
    assert re.search(r"made with transformers \d+\.\d+", page)


@pytest.mark.parametrize("find", [refusal, embedded_refusal])
def test_a_full_disk_during_the_check_is_no_fault_of_the_model(find: Any) -> None:
    config = config_of("qwen2", num_key_value_heads=4, rms_norm_eps=1.75e-6)  # one that no other test has checked
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))
    try:
        with pytest.raises(StorageError, match=r"could not be written: a file is larger .*\(ulimit -f\)"):
            find(cls, config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert find(cls, config) is None, "the failure is not remembered"
