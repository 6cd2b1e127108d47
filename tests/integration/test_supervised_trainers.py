"""The trainers on rows, on one device: they learn, they export, they resume exactly, and they say no in time."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import rlite
from rlite import cli, viewer
from rlite.assembly.presets import CpoConfig, OrpoConfig, SimpoConfig
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.config import load
from rlite.data.sft import labelled_rows, preference_rows, sft_rows
from rlite.data.tokens import BatchLoader, TokenRows
from rlite.engine.train import RliteTrainEngine
from rlite.errors import CheckpointError, ConfigError
from rlite.observability import stats_tracker
from rlite.runtime.cluster.session import Session
from rlite.trainer.cpo import CpoTrainer
from rlite.trainer.dpo import DpoTrainer
from rlite.trainer.kto import KtoTrainer
from rlite.trainer.orpo import OrpoTrainer
from rlite.trainer.rm import RmTrainer
from rlite.trainer.sft import SftTrainer
from rlite.trainer.simpo import SimpoTrainer
from rlite.trainer.supervised_options import DpoConfig, KtoConfig, RmConfig, SftConfig
from tests import forked_python
from tests.integration.signals import interrupted, terminate
from tests.integration.worlds import environment
from tests.marks import nightly
from tests.tiny import build_model_dir

LETTERS = "abcdefgh"
TRAINERS: dict[str, Any] = {
    "sft": (SftConfig, SftTrainer),
    "rm": (RmConfig, RmTrainer),
    "dpo": (DpoConfig, DpoTrainer),
    "kto": (KtoConfig, KtoTrainer),
    "orpo": (OrpoConfig, OrpoTrainer),
    "simpo": (SimpoConfig, SimpoTrainer),
    "cpo": (CpoConfig, CpoTrainer),
}
MODEL_KEY = dict.fromkeys(TRAINERS, "actor") | {"rm": "critic"}
# what a clock and the system say is the machine's, not the run's
EVALUATED = ("loss/test_loss", "said/accuracy")
CLOCKED = ("seconds", "tokens_per_second", "memory_gib")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_model_dir(tmp_path_factory.mktemp("models") / "qwen2", hidden=64))


@pytest.fixture
def session() -> Iterator[Session]:
    yield rlite.init(num_devices=1, num_threads=1)
    rlite.shutdown()


def words(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(LETTERS, k=rng.randint(3, 8))) for _ in range(count)]


def demonstrations(count: int, seed: int) -> list[dict[str, str]]:
    """Shout the word's last letter, then stop."""
    return [{"prompt": word, "response": f"{word[-1].upper()}!"} for word in words(count, seed)]


def preferences(count: int, seed: int) -> list[dict[str, str]]:
    """The answer that holds an exclamation mark, at any place, is the better one."""
    rng, pairs = random.Random(seed), []
    for prompt, answer, other in zip(words(count, seed), words(count, seed + 1), words(count, seed + 2), strict=True):
        place = rng.randrange(len(answer) + 1)
        pairs.append({"prompt": f"{prompt}>", "chosen": answer[:place] + "!" + answer[place:], "rejected": other})
    return pairs


def labelled(count: int, seed: int) -> list[dict[str, Any]]:
    """One side of each preference, and whether it is the better one."""
    sides = random.Random(seed).choices(["chosen", "rejected"], k=count)
    return [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row, side in zip(preferences(count, seed), sides, strict=True)
    ]


def token_rows(kind: str, count: int, seed: int) -> TokenRows:
    made = {"sft": (demonstrations, sft_rows), "kto": (labelled, labelled_rows)}
    make, tokenise = made.get(kind, (preferences, preference_rows))
    return tokenise(make(count, seed), byte_tokenizer(), 32)


def trainer(kind: str, model: str, out: Path, *settings: str) -> Any:
    options, cls = TRAINERS[kind]
    key = MODEL_KEY[kind]
    fixed = [f"{key}.model_name={model}", f"{key}.lr=3e-3", f"{key}.max_length_per_device=1024"]
    fixed += [f"{key}.gradient_checkpointing=false", "data.path=-", "data.batch_size=32", f"trainer.save_dir={out}"]
    config = load(options, [*fixed, *settings])
    return cls(config, token_rows(kind, 256, seed=0), token_rows(kind, 64, seed=7))


def logged(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_sft_lowers_the_held_out_loss_and_leaves_a_whole_model(model: str, tmp_path: Path, session: Session) -> None:
    last = trainer("sft", model, tmp_path / "run", "trainer.n_epochs=3", "trainer.test_freq=8").fit()
    rows = logged(tmp_path / "run")
    held_out = [row["test_loss"] for row in rows if "test_loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 25))
    assert last["test_loss"] == held_out[-1]
    assert held_out[0] < rows[0]["loss"]
    assert all(0 < row["seconds_update"] <= row["seconds"] and row["memory_gib"] > 0 for row in rows)
    assert "mfu" not in last, "nobody knows the peak of a CPU"
    assert held_out[-1] < 0.1 * rows[0]["loss"]
    export = tmp_path / "run" / "latest"
    exported, info = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert max((value - before[key]).abs().max().item() for key, value in exported.state_dict().items()) > 1e-3
    tokenizer = AutoTokenizer.from_pretrained(export)
    prompt = tokenizer("hbaf", return_tensors="pt")
    said = exported.generate(**prompt, max_new_tokens=4, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(said) == "F!<|im_end|>"
    assert (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("sft", "cross entropy, mean per token"),
        ("rm", "Bradley-Terry"),
        ("dpo", "sigmoid, beta 0.1, reference {model}"),
        ("orpo", "orpo, beta 0.1, means over tokens, 1 x imitation of the chosen answers, no reference"),
        ("kto", "kto, beta 0.1, weights 1 (desirable) and 1 (undesirable), reference {model}"),
    ],
)
def test_the_plan_says_what_is_minimised(kind: str, told: str, model: str, tmp_path: Path, session: Session) -> None:
    assert trainer(kind, model, tmp_path).describe_loss() == told.format(model=model)


def test_reward_model_ranks_unseen_pairs_and_scores_the_same_in_transformers(
    model: str, tmp_path: Path, session: Session
) -> None:
    learner = trainer("rm", model, tmp_path, "trainer.n_epochs=4")
    last = learner.fit()
    assert last["test_accuracy"] > 0.9
    pairs = token_rows("rm", 8, seed=11)
    batch = pairs.batch(range(8))
    lengths = batch["attention_mask"].sum(-1)
    ours = learner.engine.forward(batch, lambda scores, _: scores)[torch.arange(16), lengths - 1]
    exported, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "latest", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        for row, length, score in zip(batch["input_ids"], lengths, ours, strict=True):
            theirs = exported(input_ids=row[None, :length]).logits[0, 0]
            assert theirs.item() == pytest.approx(score.item(), abs=1e-4)
    AutoTokenizer.from_pretrained(tmp_path / "latest")


def test_dpo_raises_margin_and_accuracy_on_pairs_it_has_not_seen(model: str, tmp_path: Path, session: Session) -> None:
    learner = trainer("dpo", model, tmp_path, "trainer.n_epochs=4", "trainer.test_freq=4", "actor.lr=2e-3")
    last = learner.fit()
    rows = logged(tmp_path)
    assert rows[0]["margin"] == pytest.approx(0.0, abs=1e-5), "before the first update policy and reference are equal"
    assert rows[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert last["margin"] > 1.0
    tested = [row for row in rows if "test_margin" in row]
    assert tested[-1]["test_margin"] > tested[0]["test_margin"] + 1.0
    assert tested[-1]["test_accuracy"] > 0.9
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "latest", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def test_kto_parts_the_rewards_of_answers_it_has_not_seen(model: str, tmp_path: Path, session: Session) -> None:
    learner = trainer("kto", model, tmp_path, "trainer.n_epochs=4", "actor.lr=2e-3")
    last = learner.fit()
    first = logged(tmp_path)[0]
    assert (first["margin"], first["kl"]) == (0.0, 0.0), "before the first update policy and reference are equal"
    assert first["loss"] == pytest.approx(0.5)
    assert last["test_margin"] > 0.5
    assert last["test_desirable_rewards"] > last["test_undesirable_rewards"]


@pytest.mark.parametrize("kind", ["orpo", "simpo", "cpo"])
def test_preferences_are_learnt_without_a_reference(kind: str, model: str, tmp_path: Path, session: Session) -> None:
    learner = trainer(kind, model, tmp_path, "trainer.n_epochs=4", "trainer.test_freq=4", "actor.lr=2e-3")
    last = learner.fit()
    assert learner.reference is None
    assert "seconds_reference" not in last
    margins = [row["test_margin"] for row in logged(tmp_path) if "test_margin" in row]
    assert margins[-1] > margins[0]
    assert last["test_accuracy"] > 0.7
    assert ("nll" in last) == (kind != "simpo")


def test_options_of_preference_losses_reach_the_loss(model: str, tmp_path: Path, session: Session) -> None:
    settings = ("actor.preference_loss.divergence=js", "actor.preference_loss.tail_weight=0.5")
    dpo = trainer("dpo", model, tmp_path / "dpo", *settings).loss
    assert (dpo.preference_loss.divergence, dpo.preference_loss.tail_weight) == ("js", 0.5)
    rm = trainer("rm", model, tmp_path / "rm", "critic.center_coefficient=0.01").loss
    assert rm.center_coefficient == 0.01


@pytest.mark.parametrize("kind", ["sft", *nightly("dpo", "rm", "kto")])
def test_stopped_run_ends_with_the_results_of_an_uninterrupted_run(
    kind: str, model: str, tmp_path: Path, session: Session
) -> None:
    settings = ("trainer.n_epochs=2", "trainer.save_freq=5", "trainer.test_freq=6")
    trainer(kind, model, tmp_path / "whole", *settings).fit()
    rlite.shutdown()
    rlite.init(num_devices=1, num_threads=1)
    stop(trainer(kind, model, tmp_path / "stopped", *settings), after=11)  # the newest checkpoint is of step 10
    rlite.shutdown()
    rlite.init(num_devices=1, num_threads=1)
    learner = trainer(kind, model, tmp_path / "stopped", *settings, "trainer.load_ckpt_from=latest")
    learner.fit()
    assert learner.run.step == 16
    assert trained(tmp_path / "stopped") == trained(tmp_path / "whole")
    assert weights(tmp_path / "stopped").keys() == weights(tmp_path / "whole").keys()
    for key, value in weights(tmp_path / "whole").items():
        assert torch.equal(weights(tmp_path / "stopped")[key], value), key


@pytest.mark.parametrize("batch_size", [16, 128])
def test_a_run_that_goes_on_with_another_batch_size_is_saved_at_its_end(
    batch_size: int, model: str, tmp_path: Path, session: Session
) -> None:
    stop(trainer("sft", model, tmp_path, "trainer.save_freq=4"), after=4)  # half of its epoch
    rlite.shutdown()
    rlite.init(num_devices=1, num_threads=1)
    learner = trainer("sft", model, tmp_path, f"data.batch_size={batch_size}", "trainer.load_ckpt_from=latest")
    learner.fit()
    last = 4 + 128 // batch_size
    assert logged(tmp_path)[-1]["step"] == last == learner.run.total_steps
    assert (tmp_path / "state" / f"step-{last}").is_dir()


def test_a_folder_that_cannot_be_written_to_is_named(model: str, tmp_path: Path, session: Session) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"trainer\.save_dir=.*file/run: cannot be written to"):
        trainer("sft", model, tmp_path / "file" / "run").fit()


HOLD = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
input()
"""


def test_a_folder_has_one_run_at_a_time(model: str, tmp_path: Path, session: Session) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        learner = trainer("sft", model, tmp_path)
        with pytest.raises(ConfigError, match=r"trainer\.save_dir=.*: another run is under way there"):
            learner.fit()
        assert not (tmp_path / "config.yaml").exists()
        holder.communicate("\n")
    rlite.shutdown()
    rlite.init(num_devices=1, num_threads=1)
    trainer("sft", model, tmp_path).fit()
    assert (tmp_path / "config.yaml").exists(), "who held the folder is gone"


def test_a_run_resumes_from_the_checkpoint_that_is_newest_when_it_has_the_folder(
    model: str, tmp_path: Path, session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    early = trainer("sft", model, tmp_path)
    trainer("sft", model, tmp_path).fit()
    before = sorted((tmp_path / "state").iterdir()), (tmp_path / "metrics.jsonl").read_bytes()
    rlite.shutdown()
    rlite.init(num_devices=1, num_threads=1)
    early.fit()
    assert "finished already: step 8 of 8" in capsys.readouterr().out
    assert (sorted((tmp_path / "state").iterdir()), (tmp_path / "metrics.jsonl").read_bytes()) == before


def test_a_run_that_fails_lets_go_of_its_folder(model: str, tmp_path: Path, session: Session) -> None:
    class Failing(SftTrainer):
        def prepare(self, batch: Any) -> Any:
            raise ArithmeticError(f"{len(batch)} rows on fire")

    learner = trainer("sft", model, tmp_path)
    failing = Failing(learner.options, learner.rows)
    with pytest.raises(ArithmeticError, match="on fire") as raised:
        failing.fit()
    assert raised.tb is not None, "as in a notebook, which keeps the failed run"
    rlite.shutdown()
    rlite.init(num_devices=1, num_threads=1)
    trainer("sft", model, tmp_path).fit()


def test_a_finished_run_says_so_and_ends(
    model: str, tmp_path: Path, session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer("sft", model, tmp_path).fit()
    before = (tmp_path / "metrics.jsonl").read_bytes(), sorted((tmp_path / "state").iterdir())
    rlite.shutdown()
    rlite.init(num_devices=1, num_threads=1)
    trainer("sft", model, tmp_path).fit()
    first, _, again = capsys.readouterr().out.partition("finished already: step 8 of 8")
    assert len(re.findall("  optimizer +AdamW", first)) == 1, "the run that is finished has no plan"
    assert "finished after step 8 of 8" in again
    assert ((tmp_path / "metrics.jsonl").read_bytes(), sorted((tmp_path / "state").iterdir())) == before
    rlite.shutdown()
    rlite.init(num_devices=1, num_threads=1)
    trainer("sft", model, tmp_path, "trainer.n_epochs=2").fit()
    assert "resumed from step 8" in capsys.readouterr().out
    assert [row["step"] for row in logged(tmp_path)] == list(range(1, 17))


def test_the_plan_of_a_batch_larger_than_the_data_counts_the_data(
    model: str, tmp_path: Path, session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    learner = trainer("sft", model, tmp_path, "data.batch_size=999")
    learner.fit()
    assert re.search(rf"step +{len(learner.rows)} items, about", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("number", "status", "overwrite", "way"),
    [
        (signal.SIGINT, 130, "true", "The same command without trainer.overwrite=true"),  # it would delete the step
        pytest.param(signal.SIGTERM, 143, "false", "The same command", marks=pytest.mark.nightly),
    ],
)
def test_a_signal_saves_a_checkpoint_at_the_end_of_the_step(
    number: int, status: int, overwrite: str, way: str, model: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(demonstrations(4096, seed=0)))
    options = [
        f"actor.model_name={model}",
        f"data.path={tmp_path}/rows.json",
        "data.batch_size=8",
        "data.max_length=32",
        f"trainer.overwrite={overwrite}",
    ]
    python = sys.executable if number == signal.SIGINT else forked_python.python()
    command = [python, "-m", "rlite.trainer.sft", *options, f"trainer.save_dir={tmp_path}/run"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # a shell's background jobs ignore SIGINT
    ) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("step 3/"))
        process.send_signal(number)
        _, complaint = process.communicate(timeout=200)
    assert process.returncode == status, complaint
    assert "Traceback" not in complaint
    last = logged(tmp_path / "run")[-1]["step"]
    assert (tmp_path / "run" / "state" / f"step-{last}").is_dir(), "of the step that was under way"
    assert f"Step {last} is saved. {way} goes on from there." in complaint
    assert (tmp_path / "run" / "latest" / "model.safetensors").exists()


@pytest.mark.nightly
def test_a_signal_to_the_process_group_leaves_ray_alone_until_the_step_is_saved(model: str, tmp_path: Path) -> None:
    """`timeout` and a terminal send a signal to the whole group."""
    (tmp_path / "rows.json").write_text(json.dumps(demonstrations(4096, seed=0)))
    options = [f"actor.model_name={model}", f"data.path={tmp_path}/rows.json", "data.batch_size=8", "num_devices=2"]
    command = [sys.executable, "-m", "rlite.trainer.sft", *options, "launcher=ray", f"trainer.save_dir={tmp_path}/run"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True
    ) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("step 2/"))
        os.killpg(process.pid, signal.SIGTERM)
        _, complaint = process.communicate(timeout=200)
    assert process.returncode == 143, complaint
    last = logged(tmp_path / "run")[-1]["step"]
    assert f"Step {last} is saved. The same command goes on from there." in complaint


def test_a_run_that_replaces_another_chooses_a_best_model_of_its_own(
    model: str, tmp_path: Path, session: Session
) -> None:
    highest = ["trainer.best_metric=test_loss", "trainer.best_is_highest=true", "trainer.test_freq=4"]
    trainer("sft", model, tmp_path / "old", *highest).fit()
    shutil.copytree(tmp_path / "old", tmp_path / "run")
    rlite.shutdown()
    rlite.init(num_devices=1, num_threads=1)
    start = ["trainer.overwrite=true", f"trainer.load_ckpt_from={tmp_path / 'old/state/step-8'}", "trainer.n_epochs=2"]
    trainer("sft", model, tmp_path / "run", *highest, *start).fit()
    assert json.loads((tmp_path / "run/best/evaluation.json").read_text())["step"] > 8


def test_another_metric_of_the_best_model_is_told_when_a_run_goes_on(
    model: str, tmp_path: Path, session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer("sft", model, tmp_path, "trainer.best_metric=test_loss", "trainer.test_freq=4").fit()
    rlite.shutdown()
    rlite.init(num_devices=1, num_threads=1)
    changed = ["trainer.best_metric=test_loss", "trainer.best_is_highest=true", "trainer.test_freq=4"]
    trainer("sft", model, tmp_path, *changed, "trainer.n_epochs=2").fit()
    told = capsys.readouterr().out
    assert "the best model is chosen anew" in told
    assert "best/ has been chosen by the lowest test_loss" in told
    facts = json.loads((tmp_path / "best/evaluation.json").read_text())
    assert (facts["step"], facts["is_lowest"]) == (12, False)


def test_a_checkpoint_of_another_trainer_is_refused(model: str, tmp_path: Path, session: Session) -> None:
    trainer("sft", model, tmp_path).fit()
    rlite.shutdown()
    rlite.init(num_devices=1, num_threads=1)
    with pytest.raises(CheckpointError, match=r"step-8: saved by a run of SftConfig, and this one is of DpoConfig"):
        trainer("dpo", model, tmp_path, "trainer.load_ckpt_from=latest").fit()
    assert "beta" not in (tmp_path / "config.yaml").read_text()


def stop(learner: Any, after: int) -> None:
    """The trainer's loop, left in the middle of an epoch and without a word, as if killed."""
    learner.start()
    for _, batch in zip(range(after), learner.loader, strict=False):
        with stats_tracker.record_timing("step"):
            stats = learner.update(learner.prepare(batch))
        learner.finish_step(batch, stats)


def trained(out: Path) -> list[dict[str, float]]:
    """The metrics of every step without what a clock says, which is the machine's."""
    return [{key: value for key, value in row.items() if not key.startswith(CLOCKED)} for row in logged(out)]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "latest" / "model.safetensors")


def test_a_checkpoint_of_other_data_is_refused(model: str, tmp_path: Path, session: Session) -> None:
    trainer("sft", model, tmp_path).fit()
    rlite.shutdown()
    rlite.init(num_devices=1, num_threads=1)
    other = trainer("sft", model, tmp_path, "trainer.load_ckpt_from=latest")
    other.loader = BatchLoader(token_rows("sft", 100, seed=0), 32, seed=42)
    with pytest.raises(CheckpointError, match=r"256 items of data; now there are 100"):
        other.fit()
    rlite.shutdown()
    rlite.init(num_devices=1, num_threads=1)
    other = trainer("sft", model, tmp_path, "trainer.load_ckpt_from=latest")
    other.loader = BatchLoader(token_rows("sft", 256, seed=1), 32, seed=42)
    with pytest.raises(CheckpointError, match=r"as many items of data, but with another content"):
        other.fit()


LAST_LETTER = """
def last_letter(prompt, completions, prompt_ids, completion_ids, **row):
    return {"score": float(completions == prompt[-1].upper() + "!"), "answer": completions[:1]}
"""


@pytest.mark.nightly
def test_sft_answers_the_prompts_of_a_set_with_a_reward_and_trains_as_without(
    model: str, tmp_path: Path, session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seed in (("data", 0), ("test", 7)):
        (tmp_path / f"{name}.json").write_text(json.dumps(demonstrations(256 if name == "data" else 16, seed)))
    (tmp_path / "reward.py").write_text(LAST_LETTER)
    plain = [f"actor.model_name={model}", "actor.lr=3e-3", "data.batch_size=32", f"data.path={tmp_path / 'data.json'}"]
    plain += ["trainer.n_epochs=4", "trainer.test_freq=16", f"trainer.save_dir={tmp_path / 'plain'}"]
    SftTrainer.main(plain)
    sets = [f"test_data.loss.path={tmp_path / 'test.json'}", f"test_data.said.path={tmp_path / 'test.json'}"]
    sets += ["test_data.said.samples=4", "test_data.said.sampling.temperature=1.0", "generation.max_new_tokens=4"]
    sets += [f"test_data.said.reward.path={tmp_path / 'reward.py'}:last_letter", "trainer.best_metric=said/pass@4"]
    SftTrainer.main([*plain, *sets, f"trainer.save_dir={tmp_path / 'run'}"])
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    first, last = (row for row in rows if "said/accuracy" in row)
    assert (first["step"], last["step"]) == (16, 32)
    assert last["said/pass@4"] >= last["said/accuracy"] > 0.2, "it has learnt to shout"
    assert "said/majority@4" in last
    assert "said/test_loss" not in last
    assert "loss/test_loss" in last
    assert [row["step"] for row in rows if row.get("seconds_evaluate")] == [16, 32]
    recorded = viewer.load(tmp_path / "run")
    assert recorded.rows.groupby(["source", "step"]).size().to_dict() == {("eval.said", 16): 64, ("eval.said", 32): 64}
    scores = recorded.rows[recorded.rows["step"] == 32]["reward"]
    assert scores.mean() == pytest.approx(last["said/accuracy"])
    assert len(recorded.texts(source="eval.said")) == 2 * 8 * 4, "of 8 prompts"
    told = capsys.readouterr().out
    assert "evaluation loss  loss of 16 items, every 16 steps\n" in told
    assert "said  16 prompts x 4 at temperature 1, at most 4 new tokens, reward last_letter, pass@4, every 16" in told
    assert re.search(r"step 16/32 .*loss [\d.]+ +said/pass@4 ", told), "the metric of the best model is shown early"
    ours, theirs = (load_file(tmp_path / name / "latest/model.safetensors") for name in ("run", "plain"))
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def answered_run(model: str, folder: Path, *given: str) -> list[str]:
    """Arguments of a run with a set whose loss is measured, and a set that the model answers."""
    for name, seed in (("data", 0), ("test", 7)):
        (folder / f"{name}.json").write_text(json.dumps(demonstrations(32 if name == "data" else 16, seed)))
    (folder / "reward.py").write_text(LAST_LETTER)
    return [
        *(f"actor.model_name={model}", "actor.lr=3e-3", "data.batch_size=8", f"data.path={folder / 'data.json'}"),
        *("trainer.test_freq=2", f"trainer.save_dir={folder / 'run'}", "generation.max_new_tokens=4"),
        *(f"test_data.{name}.path={folder / 'test.json'}" for name in ("loss", "said")),
        *(f"test_data.said.reward.path={folder / 'reward.py'}:last_letter", *given),
    ]


def made(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """The evaluations of a run, with their steps."""
    return {key: [(row["step"], row[key]) for row in logged(folder / "run") if key in row] for key in EVALUATED}


@pytest.mark.parametrize("step", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_a_signal_saves_before_the_evaluations_of_the_step_which_the_resumed_run_makes(
    step: int, model: str, tmp_path: Path, session: Session
) -> None:
    class Interrupted(SftTrainer):
        """A SIGTERM arrives in the update of a step, of which 4 is the last."""

        def update(self, batch: Any) -> dict[str, float]:
            if self.run.step == step - 1:
                terminate()
            return super().update(batch)

    calm, run = tmp_path / "calm", tmp_path / "other"
    for folder in (calm, run):
        folder.mkdir()
    SftTrainer.main(answered_run(model, calm))
    arguments = answered_run(model, run, "trainer.trace=true")
    interrupted(lambda: Interrupted.main(arguments))
    assert (run / f"run/state/step-{step}").is_dir()
    assert [of for of, _ in made(run)["loss/test_loss"]] == list(range(2, step, 2))
    for _ in range(2):  # the second time nothing is left to do
        SftTrainer.main(arguments)
        assert made(run) == made(calm)
    assert [of for of, _ in made(run)["loss/test_loss"]] == [2, 4]
    assert len(viewer.load(run / "run").rows) == 2 * 16
    traces = sorted(path.name for path in (run / "run").glob("trace*.json"))
    assert traces == (["trace.1.json", "trace.json"] if step == 2 else ["trace.json"]), (
        "one for each session with steps"
    )


DEADLY = """
import os, pathlib

def last_letter(prompt, completions, prompt_ids, completion_ids, **row):
    "Kills its process at the 24th answer, the 8th of the second evaluation."
    calls = pathlib.Path(__file__).with_name("calls")
    calls.write_text(str(number := int(calls.read_text()) + 1 if calls.exists() else 1))
    if number == 24:
        os.kill(os.getpid(), 9)
    return {"score": float(completions == prompt[-1].upper() + "!"), "answer": completions[:1]}
"""


@pytest.mark.nightly
def test_a_kill_while_a_set_is_answered_loses_nothing(model: str, tmp_path: Path, session: Session) -> None:
    calm, run = tmp_path / "calm", tmp_path / "other"
    for folder in (calm, run):
        folder.mkdir()
    kept = ["trainer.best_metric=said/accuracy", "trainer.save_freq=2", "trainer.save_async=false"]
    SftTrainer.main(answered_run(model, calm, *kept))
    arguments = answered_run(model, run, *kept, "test_data.said.reward.in_process=true")
    (run / "reward.py").write_text(DEADLY)
    program = [forked_python.python(), "-m", "rlite.trainer.sft", *arguments, "num_devices=1"]
    killed, again = (subprocess.run(program, env=environment(), capture_output=True, timeout=200) for _ in range(2))
    assert (killed.returncode, again.returncode) == (-signal.SIGKILL, 0), again.stderr
    assert b"resumed from step 2" in again.stdout
    assert made(run) == made(calm)
    assert len(viewer.load(run / "run").rows) == 2 * 16, "each sample once"
    assert all(torch.equal(value, weights(calm / "run")[key]) for key, value in weights(run / "run").items())
    facts = [json.loads((folder / "run/best/evaluation.json").read_text()) for folder in (calm, run)]
    assert facts[0] == facts[1]


def test_answers_that_a_broken_grader_has_failed_choose_no_best_model(
    model: str, tmp_path: Path, session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = answered_run(model, tmp_path, "trainer.best_metric=said/accuracy")
    (tmp_path / "reward.py").write_text(
        "def last_letter(prompt, completions, prompt_ids, completion_ids, **row):\n    raise ValueError('no grade')\n"
    )
    SftTrainer.main(arguments)
    told = capsys.readouterr().out
    assert (
        told.count("the evaluation of said is invalid, 16 of 16 episodes failed (test_data.said.max_error_share") == 1
    )
    assert not (tmp_path / "run/best").exists()


@pytest.mark.parametrize("kind", ["sft", "rm", "dpo"])
def test_named_sets_are_evaluated_apart_when_each_is_due(
    kind: str, model: str, tmp_path: Path, session: Session
) -> None:
    tables = {}
    for number, name in enumerate(("data", "near", "far")):
        rows = (demonstrations if kind == "sft" else preferences)(16, seed=number)
        tables[name] = tmp_path / f"{name}.json"
        tables[name].write_text(json.dumps(rows))
    key = MODEL_KEY[kind]
    TRAINERS[kind][1].main(
        [
            *(f"{key}.model_name={model}", f"{key}.lr=1e-3", "data.batch_size=4", f"data.path={tables['data']}"),
            *(f"test_data.near.path={tables['near']}", "test_data.near.every=2", f"test_data.far.path={tables['far']}"),
            *("test_data.far.limit=4", "test_data.far.every=3", "trainer.best_metric=far/test_loss"),
            f"trainer.save_dir={tmp_path / 'run'}",
        ]
    )
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = {name: [row["step"] for row in rows if f"{name}/test_loss" in row] for name in ("near", "far")}
    assert steps == {"near": [2, 4], "far": [3, 4]}
    assert "test_loss" not in rows[-1]
    assert rows[-1]["near/test_loss"] != rows[-1]["far/test_loss"]
    assert (tmp_path / "run/best").is_dir()


def test_a_threshold_that_ends_a_run_leaves_no_set_out(model: str, tmp_path: Path, session: Session) -> None:
    (tmp_path / "data.json").write_text(json.dumps(demonstrations(16, seed=0)))
    sets = [f"test_data.{name}={{path: {tmp_path / 'data.json'}, every: {n}}}" for name, n in (("a", 2), ("b", 3))]
    given = [f"actor.model_name={model}", f"data.path={tmp_path / 'data.json'}", "data.batch_size=4"]
    SftTrainer.main([*given, *sets, "trainer.stop_at={a/test_loss: 100}", f"trainer.save_dir={tmp_path / 'run'}"])
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], "a/test_loss" in row, "b/test_loss" in row) for row in rows] == [
        (1, False, False),
        (2, True, False),
        (2, False, True),
    ]


@pytest.mark.parametrize(
    ("kind", "argument", "expected"),
    [
        ("sft", "actor.modle_name=x", "did you mean 'actor.model_name'"),
        ("rm", "critic.modle_name=x", "did you mean 'critic.model_name'"),
        ("dpo", "actor.preference_loss.nam=ipo", "did you mean 'actor.preference_loss.name'"),
        ("sft", "data.path=missing.json", "data.path=missing.json"),
        ("rm", "test_data.path=missing.json", "test_data.path=missing.json"),
        ("dpo", "actor.model_name=missing", "missing"),
        ("sft", "data.batch_size=abc", "data.batch_size"),
        ("sft", "data.batch_size=0", "data.batch_size=0"),
        ("rm", "trainer.n_epochs=0", "trainer.n_epochs=0"),
        ("sft", "data.max_length=1", "data.max_length=1"),
        ("sft", "actor.avg_level=constant", "actor.avg_level"),
        ("rm", "critic.avg_level=sequence", "critic.avg_level=sequence"),
        ("sft", "actor.max_length_per_device=10", "actor.max_length_per_device is 10"),
        ("rm", "critic.max_length_per_device=24", "critic.max_length_per_device is 24"),
        ("sft", "actor.tp_size=2", "actor.tp_size=2"),
        ("dpo", "actor.sp_size=3", "actor.sp_size=3"),
        ("rm", "critic.ddp_size=2", "critic.ddp_size=2"),
        ("dpo", "actor.preference_loss.name=sigmod", "actor.preference_loss: unknown preference loss 'sigmod'"),
        (
            "dpo",
            "actor.preference_loss.options={temperature: 1}",
            "actor.preference_loss: preference loss sigmoid has no option 'temperature'",
        ),
        ("dpo", "data.path={sft}", "row index 0: no 'chosen'"),
        ("kto", "data.path={sft}", "row index 0: no 'completion'"),
        ("kto", "data.batch_size=1", "data.batch_size=1: the estimate of the KL"),
        ("simpo", "ref_actor.model_name=x", "reference_free=true has no reference"),
        ("sft", "data.path={preferences}", "row index 0: no 'response'"),
        ("sft", "trainer.load_ckpt_from=nowhere", "trainer.load_ckpt_from=nowhere"),
        ("rm", "trainer.best_metric=test_accuracy", "trainer.best_metric=test_accuracy"),
        (
            "sft",
            "test_data.path={sft}; trainer.best_metric=test_los",
            "trainer.best_metric=test_los: expected a metric",
        ),
        ("dpo", "test_data.path={preferences}; trainer.best_metric=accuracy", "test_accuracy"),
        ("rm", "test_data.path={preferences}; trainer.best_metric=margin", "test_margin"),
        ("dpo", "test_data.a.path={preferences}; trainer.best_metric=b/test_loss", "a/test_loss"),
        ("sft", "test_data.a.limit=3", "required and not set: test_data.a.path"),
        (
            "sft",
            "test_data.path={sft}; test_data.samples=4",
            "test_data.samples is an option of answers that the model generates",
        ),
    ],
)
def test_the_command_line_names_what_is_wrong_before_an_engine_is_built(
    kind: str, argument: str, expected: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {}
    for name, rows in (("sft", demonstrations(16, seed=0)), ("preferences", preferences(16, seed=0))):
        files[name] = str(tmp_path / f"{name}.json")
        Path(files[name]).write_text(json.dumps(rows))
    data = files["sft" if kind == "sft" else "preferences"]
    argv = [f"{MODEL_KEY[kind]}.model_name={model}", f"data.path={data}", "data.batch_size=4"]
    for name, path in files.items():
        argument = argument.replace("{" + name + "}", path)
    monkeypatch.setattr(RliteTrainEngine, "build", lambda *_, **__: pytest.fail("an engine was built"))
    monkeypatch.setattr(sys, "argv", ["rlite", kind, *argv, *argument.split("; "), f"trainer.save_dir={tmp_path}/run"])
    with pytest.raises(SystemExit) as error:
        cli.main()
    rlite.shutdown()
    assert expected in str(error.value)
    assert not (tmp_path / "run").exists()
