"""The commands that use a model: `rlite generate` and `rlite merge`."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import rlite
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.cli import main
from tests.tiny import build_model_dir

IDS = torch.tensor([[11, 12, 13, 200, 7, 91, 4, 77, 8]])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_dir(tmp_path_factory.mktemp("models") / "qwen2", hidden=64)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["rlite", *map(str, arguments)])
    try:
        main()
    finally:
        rlite.shutdown()


# -- generate ----------------------------------------------------------------------------------------------------------


def greedy(model: Path, text: str, num_tokens: int) -> str:
    """Return the greedy answer of transformers."""
    tokenizer, made = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    ids = made.generate(**prompt, max_new_tokens=num_tokens, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    return tokenizer.decode(ids, skip_special_tokens=True)


def chat(text: str, system: str | None = None) -> str:
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    return byte_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


GREEDY = ("temperature=0", "max_new_tokens=12")


def test_an_answer_is_that_of_transformers_streamed_or_not(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = greedy(model, chat("2+3="), 12)
    for more in ([], ["stop=[never]"]):
        run(monkeypatch, "generate", model, "2+3=", *GREEDY, *more)
        assert capsys.readouterr().out.rstrip("\n") == expected.rstrip("\n")
    run(monkeypatch, "generate", model, "2+3=", *GREEDY, "system_prompt=Add.")
    assert capsys.readouterr().out.rstrip("\n") == greedy(model, chat("2+3=", "Add."), 12).rstrip("\n")
    run(monkeypatch, "generate", model, "2+3=", *GREEDY, "chat=false")
    assert capsys.readouterr().out.rstrip("\n") == greedy(model, "2+3=", 12).rstrip("\n")


def test_an_answer_ends_at_its_end_token_or_a_stop_token_which_are_not_printed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    letters = [letter for letter in dict.fromkeys(greedy(model, "2+3=", 12)) if letter.isascii() and letter != "\n"]
    end = byte_tokenizer()(letters[-1])["input_ids"][0]
    expected = greedy(model, "2+3=", 12).partition(letters[-1])[0]
    shutil.copytree(model, tmp_path / "ending")
    path = tmp_path / "ending" / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": end}))  # no special token
    for folder, more in (
        (model, [f"stop_token_ids=[{end}]"]),
        (tmp_path / "ending", []),
        (model, [f"stop_token_ids=[{end}]", "n=2"]),
    ):
        run(monkeypatch, "generate", folder, "2+3=", *GREEDY, "chat=false", *more)
        assert expected in (said := capsys.readouterr().out)
        assert letters[-1] not in said.replace(expected, "").replace("answer", "")


def test_a_run_stands_for_its_newest_model_and_each_line_is_a_prompt(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(model, tmp_path / "run" / "latest")
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\n"))
    run(monkeypatch, "generate", tmp_path / "run", "prompt_file=-", "n=2", "seed=1", "max_new_tokens=3")
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("---")] == [
        f"--- prompt {prompt}, answer {answer} of 2" for prompt in (1, 2) for answer in (1, 2)
    ]
    (tmp_path / "prompts.txt").write_text("one\n\ntwo\n")
    run(
        monkeypatch,
        "generate",
        tmp_path / "run" / "latest",
        f"prompt_file={tmp_path}/prompts.txt",
        "n=2",
        "seed=1",
        "max_new_tokens=3",
    )
    assert capsys.readouterr().out == out, "the seed decides"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{model}"], "expected a prompt, as in `rlite generate MODEL"),
        (["{model}", "hi", "prompt_file=-"], "and not both"),
        (["{model}", "hi", "temprature=0"], "unknown key 'temprature'; did you mean 'temperature'?"),
        (["{model}", "hi", "top_p=0"], "top_p=0.0: expected"),
        (["{model}", "prompt_file=nowhere.txt"], "prompt_file=nowhere.txt: "),
        (["{tmp}/new", "hi"], "new: a run that has not saved a model yet"),
        (["{tmp}/adapter", "hi"], "adapter: an adapter alone; make a model of it with `rlite merge"),
        (["{tmp}/empty", "hi"], "expected a config.json in it, found none"),
        (["{tmp}/scorer", "hi"], "Qwen2ForSequenceClassification scores text and writes none"),
    ],
)
def test_generate_refuses_invalid_arguments(
    arguments: list[str], message: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, file in (("new", "config.yaml"), ("adapter", "adapter_config.json"), ("empty", "note.txt")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=1).save_pretrained(tmp_path / "scorer")
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, "generate", *(each.format(model=model, tmp=tmp_path) for each in arguments))
    assert message in str(stopped.value)


# -- merge -------------------------------------------------------------------------------------------------------------


def adapter(model: Path, out: Path, **config: object) -> Path:
    """A PEFT adapter with random factors."""
    task = config.setdefault("task_type", "CAUSAL_LM")
    kind = AutoModelForCausalLM if task == "CAUSAL_LM" else AutoModelForSequenceClassification
    torch.manual_seed(3)
    made = peft.get_peft_model(kind.from_pretrained(model), peft.LoraConfig(target_modules="all-linear", r=4, **config))  # type: ignore[arg-type]
    for name, parameter in made.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    made.save_pretrained(out)
    return out


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.mark.parametrize("changes", [{}, {"use_rslora": True}, {"use_dora": True}], ids=str)
def test_a_merged_model_is_its_base_with_the_adapter(
    changes: dict[str, bool],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = adapter(model, tmp_path / "adapter", **changes)
    capsys.readouterr()
    run(monkeypatch, "merge", folder, tmp_path / "out")
    told = capsys.readouterr()
    assert told.out == f"rlite merge: {folder} merged into {model}; the model is in {tmp_path / 'out'}\n"
    assert told.err == ""
    merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    base = AutoModelForCausalLM.from_pretrained(model)
    expected = logits(peft.PeftModel.from_pretrained(base, folder))
    torch.testing.assert_close(logits(merged), expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(expected, logits(AutoModelForCausalLM.from_pretrained(model)), atol=0.1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == byte_tokenizer().chat_template
    assert tokenizer("aé<|im_end|>")["input_ids"] == byte_tokenizer()("aé<|im_end|>")["input_ids"]


def test_the_adapter_of_a_run_merges_into_the_runs_model(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.json").write_text(json.dumps([{"prompt": f"{n}", "response": "yes"} for n in range(16)]))
    options = ["data.path=rows.json", "data.batch_size=8", "actor.lora.rank=4", "actor.lr=1e-2"]
    run(monkeypatch, "sft", f"actor.model_name={model}", *options)
    run(monkeypatch, "merge", "runs/sft", "merged")
    merged, trained = (load_file(f"{folder}/model.safetensors") for folder in ("merged", "runs/sft/latest"))
    assert merged.keys() == trained.keys()
    for name, tensor in trained.items():
        torch.testing.assert_close(merged[name], tensor, atol=1e-6, rtol=1e-5)


def test_the_head_of_a_scorer_is_merged_and_the_dtype_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model_dir(tmp_path / "model", hidden=64, num_labels=1)
    AutoModelForCausalLM.from_pretrained(model).to(torch.bfloat16).save_pretrained(model)
    folder = adapter(model, tmp_path / "run" / "latest" / "adapter", task_type="SEQ_CLS", modules_to_save=["score"])
    run(monkeypatch, "merge", tmp_path / "run", tmp_path / "out", f"base_model={model}")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert merged.dtype == torch.bfloat16
    trained = load_file(folder / "adapter_model.safetensors")["base_model.model.score.weight"]
    assert torch.equal(merged.score.weight, trained.bfloat16())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}/nowhere", "{tmp}/out"], "nowhere: no such folder; expected a folder of PEFT with adapter_config.json"),
        (["{model}", "{tmp}/out"], ": a whole model, with nothing to merge"),
        (["{tmp}/empty", "{tmp}/out"], "empty: no adapter_config.json"),
        (["{tmp}/adapter", "{tmp}"], ": exists and is not an empty folder"),
        (["{tmp}/adapter"], "required and not set: out"),
        (["{tmp}/adapter", "{tmp}/out", "base_model={tmp}/nowhere"], "no such folder; check the path"),
        (["{tmp}/adapter", "{tmp}/out", "base_model={tmp}/wide"], "does not fit"),
        (["{tmp}/adapter", "{tmp}/out", "base_model={tmp}/flat"], "does not fit"),
        (["{tmp}/nameless", "{tmp}/out"], "does not name the model it belongs to; give base_model=MODEL"),
        (["{tmp}/broken", "{tmp}/out"], "adapter_config.json: not a config of PEFT"),
    ],
)
def test_merge_refuses_invalid_arguments_and_writes_nothing(
    arguments: list[str], message: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = adapter(model, tmp_path / "adapter")
    build_model_dir(tmp_path / "wide", hidden=128)
    build_model_dir(tmp_path / "flat", hidden=64, layers=1)
    for name in ("nameless", "broken"):
        shutil.copytree(folder, tmp_path / name)
    (tmp_path / "empty").mkdir()
    known = json.loads((folder / "adapter_config.json").read_text())
    (tmp_path / "nameless" / "adapter_config.json").write_text(json.dumps({**known, "base_model_name_or_path": None}))
    (tmp_path / "broken" / "adapter_config.json").write_text("{")
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, "merge", *(each.format(model=model, tmp=tmp_path) for each in arguments))
    assert message in str(stopped.value)
    assert not (tmp_path / "out").exists()
