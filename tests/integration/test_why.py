"""`rlite why`: faults that are planted in tiny runs are named, with the layer; what rounds is called rounding."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import rlite
from rlite.assembly.launch import session_of
from rlite.assembly.quickstart.run import build_tiny_qwen3, byte_tokenizer
from rlite.assembly.why import evidence
from rlite.assembly.why.command import Explanation, Verdict, explain_mismatch, main, report
from rlite.backends.embedded.cache import EmbeddedOptions
from rlite.backends.embedded.model import LeanDecoder, ShardedModel
from rlite.backends.embedded.worker import EmbeddedWorker
from rlite.errors import ConfigError, DataError
from rlite.nn import LoraOptions
from rlite.rollout import SingleTurnWorkflow
from rlite.services.record.files import VERSION_KEY
from rlite.trainer.model.modules import PolicyModule
from rlite.trainer.options import LaunchOptions, SamplingOptions, TrainerOptions
from rlite.trainer.ppo import PpoTrainer
from rlite.trainer.rl.options import ActorOptions, PpoConfig, PromptOptions, RolloutOptions
from tests.integration.rewards import digits
from tests.marks import nightly
from tests.mixtures import build_mixture_dir
from tests.planted import Fault, at_tokens, logits_of, mixed, plant, rewrite, saved_weights
from tests.tiny import build_model_dir

PAGE = Path(__file__).parents[2] / "docs" / "why.md"
ROWS = [{"messages": [{"role": "user", "content": f"{a}+{b}="}]} for a in range(3) for b in range(3)]


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    rlite.init(num_devices=1, num_threads=1)
    yield
    rlite.shutdown()


def train(folder: Path, model: Path, steps: int = 3, tokenizer: Any = None, rows: Any = ROWS, **options: Any) -> Path:
    """Train a model by PPO, and record every token."""
    sampling = SamplingOptions(**{"max_new_tokens": 8, **options.pop("sampling", {})})
    limits: Any = {"max_model_len": 64, "dynamic_filtering": False, **options.pop("rollout", {})}
    given = PpoConfig(
        actor=ActorOptions(model_name=str(model), lr=1e-2, **options.pop("actor", {})),
        train_data=PromptOptions(prompts_per_rollout=4, responses_per_prompt=2),
        rollout=RolloutOptions(train_sampling_params=sampling, **limits),
        trainer=TrainerOptions(save_dir=str(folder), total_steps=steps, save_freq=1, keep=9, record="all", **options),
    )
    with session_of(LaunchOptions()):
        PpoTrainer(given, SingleTurnWorkflow(digits, sampling.gconfig(), tokenizer or byte_tokenizer()), rows).fit()
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    return build_tiny_qwen3(folder, seed=0, hidden_size=64, intermediate_size=128)


@pytest.fixture(scope="module")
def runs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """runs(kind): the folder of a run, and the weights before its last step and one step earlier."""
    made: dict[str, tuple[Path, Path, Path]] = {}
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "lora": {"actor": {"lora": LoraOptions(rank=4, alpha=8.0)}},
        "truncated": {"sampling": {"top_p": 0.9, "temperature": 0.8}},
        "half": {"rollout": {"dtype": "bfloat16"}},
        "mixture": {},
    }

    def run(kind: str) -> tuple[Path, Path, Path]:
        if kind not in made:
            root = tmp_path_factory.mktemp(kind)
            own = build_mixture_dir(root / "model", "qwen3_moe") if kind == "mixture" else model
            folder = train(root / "run", own, **kinds[kind])
            made[kind] = folder, saved_weights(folder, 2, root / "w2"), saved_weights(folder, 1, root / "w1")
        return made[kind]

    return run


# -- faults --------------------------------------------------------------------------------------------------------


def cooler(model: Any, ids: list[int], start: int) -> torch.Tensor:
    return at_tokens(logits_of(model, ids), ids, 0.83)


def unchanged(model: Any, ids: list[int], start: int) -> torch.Tensor:
    return at_tokens(logits_of(model, ids), ids)


def cut(model: Any, ids: list[int], start: int) -> torch.Tensor:
    """Keep the 20 most likely ids."""
    logits = logits_of(model, ids)
    lowest = logits.topk(20).values[:, -1:]
    kept = logits.masked_fill(logits < lowest, float("-inf"))
    places = torch.tensor(ids[1:])[:, None]
    outside = logits[:-1].gather(1, places)[:, 0] - kept[:-1].logsumexp(-1)
    return torch.cat([torch.zeros(1), outside])


def sharper(model: Any, ids: list[int], start: int) -> torch.Tensor:
    """Weigh the scores of layer 1 more."""
    model.model.layers[1].self_attn.scaling = 1.3 * model.model.layers[0].self_attn.scaling
    return at_tokens(logits_of(model, ids), ids)


def moved(model: Any, ids: list[int], start: int) -> torch.Tensor:
    """Count positions as if the prompt were padded by 3 tokens."""
    places = torch.arange(len(ids))
    return at_tokens(logits_of(model, ids, places + 3 * (places >= start)), ids)


def other_base(model: Any, ids: list[int], start: int) -> torch.Tensor:
    """Rotate by frequencies of another base."""
    rotary = model.model.rotary_emb
    size = len(rotary.inv_freq)
    rotary.inv_freq = 300.0 ** -(torch.arange(size) / size)
    return at_tokens(logits_of(model, ids), ids)


def without_opening(model: Any, ids: list[int], start: int) -> torch.Tensor:
    """Render the prompt without the generation prompt."""
    opening = byte_tokenizer().encode("<|im_start|>assistant\n")
    assert ids[start - len(opening) : start] == opening
    rest = [*ids[: start - len(opening)], *ids[start:]]
    return torch.cat([torch.zeros(len(opening)), unchanged(model, rest, start)])


def special_as_text(model: Any, ids: list[int], start: int) -> torch.Tensor:
    """Encode the special tokens of the prompt as text."""
    tokenizer = byte_tokenizer()
    prompt = tokenizer(tokenizer.decode(ids[:start]), split_special_tokens=True)["input_ids"]
    return unchanged(model, [*prompt, *ids[start:]], start)[len(prompt) - start :]


def narrow(model: Any, ids: list[int], start: int) -> torch.Tensor:
    """Let a query of layer 1 see 11 positions."""
    places = torch.arange(len(ids))
    distance = places[:, None] - places
    mask = torch.zeros(distance.shape).masked_fill((distance < 0) | (distance >= 11), float("-inf"))[None, None]

    def see(module: Any, args: Any, given: Any) -> Any:
        return args, {**given, "attention_mask": mask}

    hook = model.model.layers[1].self_attn.register_forward_pre_hook(see, with_kwargs=True)
    values = unchanged(model, ids, start)
    hook.remove()
    return values


def narrow_in_two(model: Any, ids: list[int], start: int) -> torch.Tensor:
    """Let queries of layers 0 and 2 see 5 positions."""
    places = torch.arange(len(ids))
    distance = places[:, None] - places
    masks = [torch.zeros(distance.shape).masked_fill((distance < 0) | (distance >= n), -torch.inf) for n in (5, 999, 5)]

    def see(module: Any, args: Any, given: Any) -> Any:
        return args, {**given, "attention_mask": masks[module.layer_idx][None, None]}

    attention = [layer.self_attn for layer in model.model.layers]
    hooks = [each.register_forward_pre_hook(see, with_kwargs=True) for each in attention]
    values = unchanged(model, ids, start)
    for hook in hooks:
        hook.remove()
    return values


def scaled_as_yarn(model: Any, ids: list[int], start: int) -> torch.Tensor:
    """Scale the rotary frequencies by 3, as YaRN does."""
    own = copy.deepcopy(model.config)
    scaled = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": own.max_position_embeddings}
    own.rope_parameters = {**own.rope_parameters, **scaled}
    model.model.rotary_emb = type(model.model.rotary_emb)(own)
    return unchanged(model, ids, start)


def repetitive(model: Any, ids: list[int], start: int) -> torch.Tensor:
    """Divide the logits of ids that are there already by 1.3, or multiply them if they are negative."""
    logits = logits_of(model, ids)
    for place, row in enumerate(logits):
        seen = torch.tensor(sorted({*ids[: place + 1]}))
        row[seen] = torch.where(row[seen] > 0, row[seen] / 1.3, row[seen] * 1.3)
    return at_tokens(logits, ids)


def likely(model: Any, ids: list[int], start: int) -> torch.Tensor:
    """Keep the 10 most likely ids, and of them those of a probability of 0.9."""
    logprobs = logits_of(model, ids)[:-1].log_softmax(-1)
    ranked = logprobs.sort(-1, descending=True).values[:, :10]
    probs = ranked.softmax(-1)
    kept = ranked.masked_fill(probs.cumsum(-1) - probs >= 0.9, -torch.inf).logsumexp(-1)
    return torch.cat([torch.zeros(1), logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0] - kept])


def next_heads(model: Any, ids: list[int], start: int) -> torch.Tensor:
    """Give the query heads of layer 0 the key heads of their neighbours."""
    attention = model.model.layers[0].self_attn
    for each in (attention.k_proj, attention.v_proj):
        each.weight.data = each.weight.data.roll(attention.head_dim, 0)
    values = unchanged(model, ids, start)
    for each in (attention.k_proj, attention.v_proj):
        each.weight.data = each.weight.data.roll(-attention.head_dim, 0)
    return values


def without_expert(model: Any, ids: list[int], start: int) -> torch.Tensor:
    """Never choose expert 3 in the second mixture."""

    def choose(gate: Any, args: Any, output: Any) -> Any:
        scores = output[0].index_fill(-1, torch.tensor([3]), float("-inf")).softmax(-1)
        best = scores.topk(gate.top_k, -1)
        weights = best.values / best.values.sum(-1, keepdim=True) if gate.norm_topk_prob else best.values
        return output[0], weights, best.indices

    hook = model.model.layers[2].mlp.gate.register_forward_hook(choose)
    values = unchanged(model, ids, start)
    hook.remove()
    return values


def one_expert(model: Any, ids: list[int], start: int) -> torch.Tensor:
    """Choose one expert in the second mixture."""
    model.model.layers[2].mlp.gate.top_k = 1
    return at_tokens(logits_of(model, ids), ids)


def cooler_and_sharper(model: Any, ids: list[int], start: int) -> torch.Tensor:
    sharper(model, ids, start)
    return cooler(model, ids, start)


def exchanged(model: Any, ids: list[int], start: int) -> torch.Tensor:
    """Exchange the places of two experts, as if they were loaded in another order."""
    weight = model.model.layers[1].mlp.gate.weight.data
    model.model.layers[1].mlp.gate.weight.data = weight[[1, 0, *range(2, len(weight))]]
    values = at_tokens(logits_of(model, ids), ids)
    model.model.layers[1].mlp.gate.weight.data = weight
    return values


def cooler_and_cut(model: Any, ids: list[int], start: int) -> torch.Tensor:
    """Keep the ids of a probability of 0.92 at temperature 0.8."""
    logprobs = (logits_of(model, ids)[:-1] / 0.8).log_softmax(-1)
    ranked = logprobs.sort(-1, descending=True).values.exp()
    mass = (ranked * (ranked.cumsum(-1) - ranked < 0.92)).sum(-1).log()
    return torch.cat([torch.zeros(1), logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0] - mass])


FAULTS: dict[str, tuple[str, int, Fault, str, int | None]] = {
    "temperature": ("plain", 2, cooler, "temperature", None),
    "kept sets": ("plain", 2, cut, "kept sets", None),
    "whole vocabulary": ("truncated", 2, lambda m, ids, n: at_tokens(logits_of(m, ids), ids, 0.8), "kept sets", None),
    "stale weights": ("plain", 1, unchanged, "stale weights", None),
    "attention": ("plain", 2, sharper, "attention", 1),
    "position": ("plain", 2, moved, "position", None),
    "rotary base": ("plain", 2, other_base, "position", None),
    "template": ("plain", 2, without_opening, "template", None),
    "special tokens as text": ("plain", 2, special_as_text, "template", None),
    "window": ("plain", 2, narrow, "attention", 1),
    "penalties": ("plain", 2, repetitive, "penalties", None),
    "kept twice": ("plain", 2, likely, "kept sets", None),
    "window in two layers": ("mixture", 2, narrow_in_two, "attention", None),
    "scaled as yarn": ("plain", 2, scaled_as_yarn, "position", None),
    "key heads": ("plain", 2, next_heads, "attention", 0),
    "routing": ("mixture", 2, one_expert, "routing", 2),
    "expert never chosen": ("mixture", 2, without_expert, "routing", 2),
    "experts exchanged": ("mixture", 2, exchanged, "routing", 1),
    "cooler and cut": ("plain", 2, cooler_and_cut, "temperature + kept sets", None),
    "stale and cooler": ("plain", 1, cooler, "stale weights + temperature", None),
    "cooler and sharper": ("plain", 2, cooler_and_sharper, "temperature + attention", 1),
}


LONGER = (
    "kept twice",
    "window in two layers",
    "scaled as yarn",
    "attention",
    "whole vocabulary",
    "rotary base",
    "special tokens as text",
    "key heads",
    "routing",
    "expert never chosen",
    "experts exchanged",
    "stale and cooler",
    "cooler and cut",
)


@pytest.mark.parametrize("name", [*(name for name in FAULTS if name not in LONGER), *nightly(*LONGER)])
def test_a_fault_of_the_engine_is_named(name: str, runs: Any, tmp_path: Path) -> None:
    kind, step, fault, cause, layer = FAULTS[name]
    run, *weights = runs(kind)
    found = explain_mismatch(plant(run, tmp_path / "run", weights[2 - step], fault))
    engine, trainer = found.verdicts
    assert set(engine.cause.split(" + ")) == set(cause.split(" + ")), engine
    assert engine.layer == layer
    assert engine.left < 1e-4 < engine.honest
    assert trainer.cause == "rounding"
    assert "code" in engine.excluded


MIXED = {
    "dropped adapter": ("lora", "", 1.0, "adapter", "with the base model, without its adapter"),
    "adapter of another scale": ("lora", "", -0.37, "adapter", "with the adapter's scale times 1.37"),
    "adapter dropped in a module": ("lora", "v_proj", 1.0, "adapter", ", in self_attn.v_proj alone"),
    "stale modules": ("plain", "mlp", 1.0, "stale weights", ", in mlp.down_proj, mlp.gate_proj, mlp.up_proj alone"),
    "one stale matrix": (
        "plain",
        r"layers\.1\.mlp\.up_proj",
        1.0,
        "stale weights",
        ", in mlp.up_proj, model.layers.1 alone",
    ),
    "weights of version 0": ("plain", "", 1.0, "stale weights", "with the weights after step 0, not 2"),
}


@pytest.mark.parametrize(
    "name",
    ["adapter dropped in a module", *nightly(*(each for each in MIXED if each != "adapter dropped in a module"))],
)
def test_weights_of_another_model_are_named(
    name: str, model: Path, runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "MAX_STATES", 1)
    kind, part, share, cause, text = MIXED[name]
    run, weights, _ = runs(kind)
    found = explain_mismatch(
        plant(run, tmp_path / "run", mixed(weights, model, tmp_path / "mixed", part, share), unchanged)
    )
    assert found.cause == cause
    assert found.verdicts[0].text.endswith(text), found.verdicts[0]


def test_a_fault_of_the_trainer_is_named(runs: Any, tmp_path: Path) -> None:
    run, weights, _ = runs("plain")
    found = explain_mismatch(plant(run, tmp_path / "run", weights, cooler, column="trainer_logprobs"))
    assert [(each.side, each.cause) for each in found.verdicts] == [("engine", "rounding"), ("trainer", "temperature")]


def test_an_engine_that_was_to_serve_in_bfloat16_is_rounding(runs: Any) -> None:
    found = explain_mismatch(runs("half")[0])
    assert found.cause == "rounding"
    assert found.mismatch > 1e-4


@pytest.mark.nightly
def test_an_engine_in_bfloat16_that_was_to_serve_in_float32_is_precision(runs: Any, tmp_path: Path) -> None:
    run, weights, _ = runs("plain")
    worker = EmbeddedWorker(str(weights), EmbeddedOptions(dtype="bfloat16", max_model_len=64), torch.device("cpu"))

    def served(model: Any, ids: list[int], start: int) -> list[float]:
        return [0.0, *worker.prompt_logprobs([ids], 0)[0].logprobs]

    assert explain_mismatch(plant(run, tmp_path / "run", weights, served)).cause == "precision"  # type: ignore[arg-type]


# -- faults in the code --------------------------------------------------------------------------------------------


class LoudValues:
    """A plan of attention with larger values in layer 1."""

    def __init__(self, plan: Any) -> None:
        self._plan = plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)

    def attend(self, layer: int, query: Any, key: Any, value: Any, weighting: Any) -> Any:
        return self._plan.attend(layer, query, key, value * (1.1 if layer == 1 else 1.0), weighting)


def test_the_module_of_an_engine_whose_attention_is_wrong_is_named(
    model: Path, runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs("plain")  # the class of the model is checked by the code without a fault
    layer: Any = LeanDecoder._layer

    def loud(self: Any, module: Any, x: Any, added: Any, places: Any, plan: Any, *rest: Any) -> Any:
        return layer(self, module, x, added, places, LoudValues(plan), *rest)

    monkeypatch.setattr(LeanDecoder, "_layer", loud)
    found = explain_mismatch(train(tmp_path / "run", model, 1)).verdicts[0]
    assert (found.cause, found.layer, found.module) == ("attention", 1, "model.layers.1.self_attn.attended")


@pytest.mark.nightly
def test_the_module_of_an_engine_whose_decode_positions_are_wrong_is_named(
    model: Path, runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs("plain")  # the class of the model is checked by the code without a fault
    logits: Any = LeanDecoder.logits
    monkeypatch.setattr(LeanDecoder, "logits", lambda self, ids, places, plan: logits(self, ids, places + 2, plan))
    found = explain_mismatch(train(tmp_path / "run", model, 1)).verdicts[0]
    assert (found.cause, found.layer, found.module) == ("position", 0, "model.layers.0.self_attn.rotated")


@pytest.mark.nightly
def test_the_module_of_a_trainer_that_computes_something_else_is_named(
    model: Path, runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs("plain")
    ready = PolicyModule.on_weights_materialized

    def with_other_gates(self: Any) -> None:
        ready(self)
        self.model.layers[0].mlp.act_fn = torch.nn.GELU()

    monkeypatch.setattr(PolicyModule, "on_weights_materialized", with_other_gates)
    found = explain_mismatch(train(tmp_path / "run", model, 1)).verdicts[1]
    assert (found.cause, found.layer, found.module) == ("computation", 0, "model.layers.0.mlp.act_fn")


@pytest.mark.nightly
def test_the_router_of_an_engine_that_weighs_experts_otherwise_is_named(
    runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, *_ = runs("mixture")
    begin: Any = ShardedModel.__init__

    def other(self: Any, *args: Any) -> None:
        begin(self, *args)
        gate = self.model.model.layers[2].mlp.gate
        gate.norm_topk_prob = not gate.norm_topk_prob

    monkeypatch.setattr(ShardedModel, "__init__", other)
    found = explain_mismatch(train(tmp_path / "run", run.parent / "model", 1)).verdicts[0]
    assert (found.cause, found.layer, found.module) == ("routing", 2, "model.layers.2.mlp.gate")


# -- re-tokenisation -----------------------------------------------------------------------------------------------


def pair_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of four letters and all pairs of them, so that sampled letters are often encoded otherwise."""
    letters = [*"abcd"]
    merges = [(a, b) for a in letters for b in letters]
    vocab = {piece: number for number, piece in enumerate([*letters, *map("".join, merges), "<end>"])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.decoder = decoders.Fuse()
    core.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<end>")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of a model whose texts are often encoded otherwise than they were sampled, and its weights."""
    root, tokenizer = tmp_path_factory.mktemp("pairs"), pair_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    own = build_model_dir(root / "model", "qwen3", hidden=64, vocab_size=len(tokenizer), **ends)
    tokenizer.save_pretrained(own)
    rows = [{"prompt": prompt} for prompt in ("abcd", "dcba", "abba", "cddc")]
    run = train(root / "run", own, 2, tokenizer, rows, sampling={"max_new_tokens": 24})
    return run, saved_weights(run, 1, root / "w1")


def test_a_record_whose_ids_were_encoded_again_is_named(pairs: tuple[Path, Path], tmp_path: Path) -> None:
    run, weights = pairs
    tokenizer = pair_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)

    def encoded_again(row: Any) -> Any:
        start = row["mask"].index(True)
        ids = [*row["ids"][:start], *tokenizer.encode(tokenizer.decode(row["ids"][start:]))]
        size = len(ids)
        others = {name: row[name][:size] for name in ("mask", "versions", "logprobs", "offsets")}
        return {**row, **others, "ids": ids, "trainer_logprobs": unchanged(model, ids, start).tolist()}

    found = explain_mismatch(rewrite(run, tmp_path / "run", encoded_again, 2))
    assert [each.cause for each in found.verdicts] == ["re-tokenisation", "rounding"]


@pytest.mark.nightly
def test_a_trainer_that_encoded_the_text_again_is_named(pairs: tuple[Path, Path], tmp_path: Path) -> None:
    run, weights = pairs
    tokenizer = pair_tokenizer()

    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)

    def encoded_again(row: Any) -> Any:
        ids, start = tokenizer.encode(tokenizer.decode(row["ids"])), row["mask"].index(True)
        rest = [None] * (len(row["ids"]) - len(ids))
        return {**row, "trainer_logprobs": [*unchanged(model, ids, start).tolist(), *rest]}

    found = explain_mismatch(rewrite(run, tmp_path / "run", encoded_again, 2))
    assert [each.cause for each in found.verdicts] == ["rounding", "re-tokenisation"]


# -- what cannot be explained --------------------------------------------------------------------------------------


def test_a_run_without_tokens_says_which_option_would_have_kept_them(runs: Any, tmp_path: Path) -> None:
    shutil.copytree(runs("plain")[0], tmp_path / "run")
    for file in (tmp_path / "run" / "record").glob("*.tokens.parquet"):
        file.unlink()
    with pytest.raises(DataError, match=r"no tokens .* trainer\.record=all; all would have kept"):
        explain_mismatch(tmp_path / "run")
    with pytest.raises(DataError, match=r"in step 7 of its record"):
        explain_mismatch(runs("plain")[0], step=7)
    with pytest.raises(ConfigError, match=r"no config\.yaml; expected the folder of a run"):
        explain_mismatch(tmp_path)


def test_a_record_of_another_version_is_named(runs: Any, tmp_path: Path) -> None:
    shutil.copytree(runs("plain")[0], tmp_path / "run")
    for file in (tmp_path / "run" / "record").glob("*.parquet"):
        table = pq.read_table(file)
        pq.write_table(table.replace_schema_metadata({VERSION_KEY: b"0"}), file)
    with pytest.raises(DataError, match="written in version 0 of the format"):
        explain_mismatch(tmp_path / "run")


def test_rows_far_from_a_checkpoint_are_checked_against_the_nearest_one(runs: Any, tmp_path: Path) -> None:
    run, *_ = runs("plain")
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "state" / "step-2")
    (tmp_path / "run" / "state" / "step-3" / "manifest.json").unlink()
    found = explain_mismatch(tmp_path / "run", step=3)
    assert any("no checkpoint has the weights of version 2; those after step 1" in note for note in found.notes)
    assert any("weights after step 3 are not used" in note for note in found.notes)
    assert found.cause == "rounding"
    assert found.tolerance > 0.01


def test_the_command_prints_the_cause_and_what_it_excluded(runs: Any, tmp_path: Path, capsys: Any) -> None:
    run, weights, _ = runs("plain")
    main([str(plant(run, tmp_path / "run", weights, cooler)), "sequences=2", "tokens=16"])
    told = capsys.readouterr().out
    assert "engine: temperature" in told
    assert "at temperature 0.83" in told
    assert "not attention: " in told
    assert "trainer: rounding" in told


def test_a_cause_that_explains_the_record_too_is_not_called_excluded() -> None:
    both = {"excluded": {"position": "moved: 0.4 left"}, "alike": {"temperature": "at temperature 0.3: 0 left"}}
    verdict = Verdict("engine", "kept sets", "over the most likely id", 0.5, 0.0, **both)  # type: ignore[arg-type]
    told = report(Explanation(3, 0.5, 1e-4, [verdict], [])).splitlines()
    assert told[-2:] == ["  or temperature: at temperature 0.3: 0 left", "  not position: moved: 0.4 left"]


def test_the_program_of_the_page_runs(
    runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").mkdir()
    plant(runs("plain")[0], tmp_path / "runs" / "grpo", runs("plain")[1], sharper)
    monkeypatch.chdir(tmp_path)
    [program] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(program, {})
    told = capsys.readouterr().out
    assert "engine attention 1 None scores times 1.3, in model.layers.1 alone" in told
