"""Replay and audit of runs: steps are made again bit for bit, and what contradicts the record is found."""

from __future__ import annotations

import io
import json
import re
import shutil
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from omegaconf import OmegaConf

from rlite import cli, config
from rlite.assembly.proof import audit as auditing
from rlite.assembly.proof import bundle as bundles
from rlite.assembly.proof import replay as replaying
from rlite.assembly.proof.bundle import unpack
from rlite.assembly.proof.options import AuditConfig, ReplayConfig
from rlite.assembly.proof.privacy import is_shown, public, public_command
from rlite.assembly.proof.report import REPLAYED, Report
from rlite.assembly.proof.trainers import literal
from rlite.assembly.trainers import TRAINERS
from rlite.errors import CheckpointError, ConfigError, DataError
from rlite.services.console.sinks import read_metrics
from rlite.services.record.batches import RecordedBatch, read_batch
from rlite.services.record.chain import ChainWriter, hash_file, read_chain
from rlite.services.record.reader import RecordReader
from rlite.trainer.callbacks import CALLBACKS, Callback
from tests.mixtures import build_mixture_dir
from tests.tiny import build_model_dir

REWARD = """
def score(prompt, completions, answer, **row):
    return sum(character in answer for character in completions) + 0.1 * len(completions)
"""
SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
ROWS: dict[str, list[dict[str, Any]]] = {
    "sft": [{"prompt": row["prompt"], "response": row["answer"]} for row in SUMS],
    "dpo": [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "no"} for row in SUMS],
    "rl": SUMS,
}
ROLLOUTS: dict[str, Any] = {
    "train_data.prompts_per_rollout": 3,
    "train_data.responses_per_prompt": 3,
    "rollout.train_sampling_params.max_new_tokens": 8,
    "trainer.record": "all",
}
EXACT = {"actor.deterministic": True, "rollout.deterministic": True, "rollout.dtype": "float32"}
KINDS: dict[str, dict[str, Any]] = {
    "sft": {"data.batch_size": 4},
    "dpo": {"data.batch_size": 4, "actor.lora": {"rank": 4}},
    "grpo": ROLLOUTS | {"actor.update_per_rollout": 2},
    "ppo": ROLLOUTS | {"adv.estimator": "gae", "kl.type": "reward"},
    "lora": ROLLOUTS | {"actor.lora": {"rank": 4}},
    "exact_lora": ROLLOUTS | EXACT | {"actor.lora": {"rank": 4}},
    "mixture": ROLLOUTS,
}


def train(folder: Path, kind: str, steps: int, **options: Any) -> Path:
    """Return the folder of a run whose rows, reward and model are files."""
    name = kind if kind in TRAINERS else "grpo"
    is_rl = name in ("grpo", "ppo")
    model, data, code = folder / "model", folder / f"{kind}.jsonl", folder / "score.py"
    if not model.exists():
        if kind == "mixture":
            build_mixture_dir(model, "qwen3_moe")
        else:
            build_model_dir(model, "qwen3", hidden=64)
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS["rl" if is_rl else name]))
    code.write_text(REWARD)
    given: dict[str, Any] = {"actor.model_name": str(model), "actor.lr": 1e-3, "trainer.save_dir": str(folder / kind)}
    given |= {"train_data.path" if is_rl else "data.path": str(data), "trainer.save_freq": 100}
    given |= {"reward.path": f"{code}:score", "trainer.total_steps": steps} if is_rl else {"trainer.n_epochs": 1}
    entry: Any = TRAINERS[name].find_trainer()
    entry.train(config.load(entry.config_class, [], given=given | KINDS[kind] | options))
    return folder / kind


def replayed(run: Path, step: int, **options: Any) -> Report:
    """Return the result of a replay."""
    given, report = ReplayConfig(run=str(run), **options), Report()
    with replaying.open_source(given) as source, replaying.replaying(source, step, given, report) as trainer:
        replaying.replay(source, trainer, step, given, report)
    return report


def verdicts(report: Report) -> list[str]:
    return [report.verdict(step) for step in report.steps]


@pytest.fixture(scope="module")
def grpo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with checkpoints after the third and the sixth, which was stopped between them and resumed."""
    folder = tmp_path_factory.mktemp("grpo")
    how: dict[str, Any] = {"trainer.save_freq": 3, "trainer.keep": 9, "actor.update_per_rollout": 1}
    train(folder, "grpo", 3, **how)
    return train(folder, "grpo", 6, **how)


@pytest.mark.parametrize("kind", ["sft", "dpo", "ppo", pytest.param("mixture", marks=pytest.mark.nightly)])
def test_every_step_is_made_again_bit_for_bit(kind: str, tmp_path: Path) -> None:
    steps = 7 if kind in ("sft", "dpo") else 3
    result = replayed(train(tmp_path, kind, steps), steps)
    assert [*result.steps] == list(range(1, steps + 1))
    assert {*verdicts(result)} == {"equal"}
    compared = {each.name for each in result.steps[steps]}
    assert {"loss", "grad_norm", "weights", "optimizer state"} <= compared


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [*KINDS])
def test_twenty_steps_are_made_again_bit_for_bit(kind: str, tmp_path: Path) -> None:
    own = {"data.batch_size": 5, "trainer.n_epochs": 4} if kind in ("sft", "dpo") else {}
    result = replayed(train(tmp_path, kind, 20, **own), 20)
    assert len(result.steps) == 20
    assert {*verdicts(result)} == {"equal"}
    if kind == "exact_lora":
        lines = (tmp_path / kind / "metrics.jsonl").read_text().splitlines()
        assert {json.loads(line)["logprob_drift"] for line in lines} == {0.0}, "served and trained have the same bits"


def test_a_step_begins_from_the_newest_checkpoint_before_it(grpo: Path) -> None:
    result = replayed(grpo, 6)
    assert [*result.steps] == [4, 5, 6]
    assert "step-3" in result.start
    assert {*verdicts(result)} == {"equal"}


def test_a_changed_value_is_named_with_its_place(grpo: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(grpo, run)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    line = json.loads(lines[4])
    lines[4] = json.dumps(line | {"grad_norm": line["grad_norm"] * 1.01})
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert verdicts(replayed(run, 6)) == ["equal", "differs", "equal"]


def test_a_bundle_is_opened_without_the_run(grpo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tmp_path / "step.zip"
    replaying.main([str(grpo), "--step", "5", "--bundle", str(bundle), "--with-data", "--with-weights"])
    hidden = grpo.rename(grpo.with_name("hidden"))
    try:
        replaying.main([str(bundle), "--result", str(tmp_path / "result.json")])
    finally:
        hidden.rename(grpo)
    with zipfile.ZipFile(bundle) as file:
        assert str(grpo.parent).encode() not in b"".join(map(file.read, file.namelist()))
    assert f"from  {bundle}/state/step-3, after step 3" in capsys.readouterr().out
    result = json.loads((tmp_path / "result.json").read_text())
    assert [(step["step"], step["verdict"]) for step in result["steps"]] == [(4, "equal"), (5, "equal")]


def test_a_bundle_without_data_has_no_tokens_and_no_prompts(grpo: Path, tmp_path: Path) -> None:
    bundle, run = tmp_path / "step.zip", tmp_path / "run"
    shutil.copytree(grpo, run)
    saved = yaml.safe_load((run / "config.yaml").read_text())
    saved["train_data"]["system_prompt"] = "the +3= prompt"
    (run / "config.yaml").write_text(yaml.safe_dump(saved))
    replaying.main([str(run), "--step", "5", "--bundle", str(bundle)])
    with zipfile.ZipFile(bundle) as file:
        content = b"".join(file.read(name) for name in file.namelist())
        assert not any(name.startswith(("batches/", "state/", "models/")) for name in file.namelist())
    assert b"+3=" not in content
    with pytest.raises(ConfigError, match="weights=RUN"):
        replaying.main([str(bundle)])
    with pytest.raises(DataError, match="no tokens of step 4"):
        replaying.main([str(bundle), f"weights={grpo}"])
    with pytest.raises(ConfigError, match="add --with-data"):
        replaying.main([str(grpo), "--bundle", str(bundle), "--with-weights"])


def hostile(name: str, mode: int = 0o644) -> bytes:
    stream, entry = io.BytesIO(), zipfile.ZipInfo(name)
    entry.external_attr = mode << 16
    with zipfile.ZipFile(stream, "w") as file:
        file.writestr(entry, "/etc/passwd")
    return stream.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        *(hostile(name) for name in ("../out", "/out", "a/../../out", "a\\..\\out", "a b", "folder/")),
        *(hostile("link", 0o120777), b"no zip", hostile("config.yaml")[:-30]),
    ],
)
def test_a_hostile_bundle_is_refused_before_anything_is_written_beside_it(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "bundle.zip").write_bytes(content)
    inside = tmp_path / "inside"
    inside.mkdir()
    with pytest.raises(DataError, match=r"bundle\.zip"):
        unpack(tmp_path / "bundle.zip", inside)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle.zip", "inside"]
    assert not any(inside.iterdir())


@pytest.mark.parametrize(
    "entries",
    [
        {"big": bytes(64 << 20)},
        {"bundle.json": b"[1]", "config.yaml": b"trainer: {}"},
        {"bundle.json": b"[" * 10**5, "config.yaml": b"trainer: {}"},
        {"bundle.json": b'{"format": 2}', "config.yaml": b"trainer: {}"},
        {"config.yaml": b"trainer: {}"},
        {"config.yaml": b"{}"},
    ],
)
def test_a_hostile_bundle_is_refused_with_one_message(
    entries: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "FREE", 1 << 20)
    with zipfile.ZipFile(tmp_path / "bundle.zip", "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in entries.items():
            file.writestr(name, content)
    with pytest.raises((DataError, ConfigError), match=r"bundle|no config of a run") as refused:
        replaying.main([str(tmp_path / "bundle.zip")])
    assert str(refused.value).startswith(f"{tmp_path}/bundle.zip: "), "and not the folder into which it is unpacked"


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_damaged_bundle_is_refused_wherever_the_damage_is(method: int, tmp_path: Path) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as file:
        file.writestr("config.yaml", bytes(range(256)))
    whole, bundle = stream.getvalue(), tmp_path / "bundle.zip"
    for place in range(0, len(whole), 3):
        bundle.write_bytes(whole[:place] + bytes([whole[place] ^ 0xA5]) + whole[place + 1 :])
        folder = tmp_path / str(place)
        folder.mkdir()
        with suppress(DataError):
            unpack(bundle, folder)


def test_a_bundle_has_no_file_that_a_hostile_run_points_to(grpo: Path, tmp_path: Path) -> None:
    run, private = tmp_path / "run", tmp_path / "private"
    shutil.copytree(grpo, run)
    private.mkdir()
    (private / "config.json").write_text('{"auths": "planted"}')
    arguments = [str(run), "--step", "5", "--bundle", str(tmp_path / "step.zip"), "--with-data", "--with-weights"]
    (run / "state" / "step-3-beside").symlink_to(private)
    with pytest.raises(DataError, match="a link that leads out"):
        replaying.main(arguments)
    (run / "state" / "step-3-beside").unlink()
    saved = yaml.safe_load((run / "config.yaml").read_text())
    saved["ref_actor"] = {"model_name": str(private)}
    (run / "config.yaml").write_text(yaml.safe_dump(saved))
    with pytest.raises(CheckpointError, match="private"):
        replaying.main(arguments)
    assert not list(tmp_path.glob("*.zip*"))
    assert not list(tmp_path.glob(".*.partial"))


def test_weights_of_another_run_are_refused(grpo: Path, tmp_path: Path) -> None:
    run, bundle = tmp_path / "run", tmp_path / "step.zip"
    replaying.main([str(grpo), "--step", "5", "--bundle", str(bundle), "--with-data"])
    shutil.copytree(grpo, run)
    manifest = run / "state" / "step-3" / "manifest.json"
    manifest.write_text(manifest.read_text() + " ")
    with pytest.raises(ConfigError, match=r"its state/step-3/manifest\.json is not that of the run"):
        replaying.main([str(bundle), f"weights={run}"])


def test_other_versions_are_named_before_the_replay_goes_on(grpo: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(grpo, run)
    lines = [json.loads(line) for line in (run / "chain.jsonl").read_text().splitlines()]
    for line in lines:
        line.get("versions", {}).update({"torch": "0.1"})
    (run / "chain.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ConfigError, match=r"torch 0\.1 there, .* here\)\. any_versions=true"):
        replaying.main([str(run), "--step", "4"])
    result = replayed(run, 4, any_versions=True)
    assert verdicts(result) == ["equal"]
    assert any("torch 0.1 there" in note for note in result.notes)


def test_a_bundle_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "planted-secret-1")
    tree = {
        "judge": {"url": "https://me:planted-2@host/v1", "api_key": "planted-3"},
        "texts": ["the key is planted-secret-1", "plain"],
        "data": {"end_token": "keep"},
    }
    tree |= {"headers": {"Authorization": ["planted-4"], "password": {"of": "planted-5"}, "hf_token": 7_654_321}}
    tree |= {"path": "s3://bucket/x?signature=planted-6", "note": "hf_plantedplantedplanted", "num_valid_tokens": 3}
    clean = public(tree, has_prompts=True)
    assert "7654321" not in json.dumps(clean)
    assert clean["num_valid_tokens"] == 3
    assert "planted" not in json.dumps(clean)
    assert clean["data"] == {"end_token": "keep"}
    assert clean["texts"][1] == "plain"


def found_in(run: Path, **options: Any) -> list[str]:
    return [f"{place}: {problem}" for place, problem in auditing.audit(AuditConfig(run=str(run), **options)).found]


def test_an_untouched_run_that_was_resumed_passes(grpo: Path) -> None:
    findings = auditing.audit(AuditConfig(run=str(grpo), code=str(grpo.parent / "score.py")))
    assert findings.found == []
    assert findings.notes == []
    checked = {auditing.ADVANTAGES, auditing.LOSSES, auditing.OF_ROLLOUTS, REPLAYED, auditing.HASHES, "rewards"}
    assert checked <= findings.checked.keys()
    kinds = [json.loads(line)["kind"] for line in (grpo / "chain.jsonl").read_text().splitlines()]
    assert kinds == ["start", "save", "end", "resume", "save", "end"]
    begin = read_chain(grpo).begins[-1]
    assert (begin["total_steps"], begin["trainer"]) == (6, "grpo")
    assert {"trainer.save_freq", "trainer.keep"} <= {*begin["set"]}
    assert not {"actor.clip", "adv.estimator"} & {*begin["set"]}
    assert begin["command"]


def edit(path: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    table = pq.read_table(path)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(type(table).from_pylist(rows, schema=table.schema), path)


def set_reward(rows: list[dict[str, Any]]) -> None:
    rows[4]["reward"] += 0.5


def remove(rows: list[dict[str, Any]]) -> None:
    del rows[4]


def double(rows: list[dict[str, Any]]) -> None:
    rows.append(dict(rows[4]))


def age(rows: list[dict[str, Any]]) -> None:
    rows[4]["versions"] = [version - 1 if version > 0 else version for version in rows[4]["versions"]]


def set_advantage(rows: list[dict[str, Any]]) -> None:
    rows[4]["advantages"][-1] += 0.25


@pytest.mark.parametrize(
    ("kind", "change", "told"),
    [
        ("rows", set_reward, "reward"),
        ("rows", remove, "a group has 3"),
        ("rows", double, "has 2 rows"),
        ("tokens", age, "version_min"),
        ("tokens", set_advantage, "advantage"),
    ],
)
def test_a_contradiction_is_found_although_all_hashes_fit(
    grpo: Path, tmp_path: Path, kind: str, change: Callable[[list[dict[str, Any]]], None], told: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(grpo, run)
    file = run / "record" / f"train-00000004.{kind}.parquet"
    edit(file, change)
    (run / "chain.jsonl").unlink()
    found = found_in(run, replay="none")
    assert any(told in each and "step 4" in each for each in found), found
    shutil.copy(grpo / "chain.jsonl", run / "chain.jsonl")
    assert any(each.startswith(f"record/{file.name}: its hash") for each in found_in(run, replay="none"))


def test_a_run_without_a_record_says_which_option_would_have_kept_it(tmp_path: Path) -> None:
    run = train(tmp_path, "grpo", 1, **{"trainer.record": "none"})
    with pytest.raises(DataError, match=r"trainer\.record=all"):
        replayed(run, 1)
    findings = auditing.audit(AuditConfig(run=str(run)))
    assert findings.found == []
    assert any("kept no record" in note for note in findings.notes)


def test_a_replay_shows_the_text_of_a_row_and_what_is_learnt_of_it(
    grpo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path, "sft", 1)
    share = "learnt  50 of 150 tokens (33.3%); rlite replay"
    assert f"{share} {run} --step 1 --group 0 shows rows of them" in re.sub(r"learnt +", "learnt  ", told(capsys))
    replaying.main([str(run), "--step", "1", "--group", "0"])
    lines = [line.strip() for line in told(capsys).partition("row 0: ")[2].splitlines()]
    row = next(row for row in ROWS["sft"] if f"read    {row['prompt']!r}" in lines)
    assert any(line.startswith(f"learnt  '{row['response']}") for line in lines)
    tokens = [line for line in lines if re.match(r"\d+ +\d+  '", line)]
    assert "row 0: token, text, log-probability" in lines
    assert "".join(re.findall(r"'(.*)'", line)[0] for line in tokens).startswith(row["response"])

    group = pq.read_table(grpo / "record" / "train-00000005.tokens.parquet")["group"][0].as_py()
    replaying.main([str(grpo), "--step", "5", "--group", str(group)])
    assert "token, text, log-probability, engine's, advantage" in told(capsys)


def test_a_replay_without_a_tokenizer_shows_rows_without_texts(
    grpo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(folder: str) -> None:
        raise CheckpointError(f"{folder}: it has no tokenizer")

    monkeypatch.setattr("rlite.assembly.proof.source.load_tokenizer", missing)
    group = pq.read_table(grpo / "record" / "train-00000005.tokens.parquet")["group"][0].as_py()
    replaying.main([str(grpo), "--step", "5", "--group", str(group)])
    shown = told(capsys)
    assert "it has no tokenizer" in shown
    assert "tokens are learnt" in shown


def told(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_the_commands_of_the_page_work(grpo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "proof.md").read_text()
    commands = [line.split("#")[0].split() for line in page.split("```bash")[1].split("```")[0].splitlines() if line]
    assert len(commands) == 5
    monkeypatch.chdir(tmp_path)
    shutil.copytree(grpo, "runs/grpo")
    group = pq.read_table("runs/grpo/record/train-00000005.tokens.parquet")["group"][0].as_py()
    for command in commands:
        given = [
            str(group) if before == "--group" else text for before, text in zip(["", *command], command, strict=False)
        ]
        monkeypatch.setattr("sys.argv", given)
        cli.main()
    assert json.loads(Path("runs/grpo/audit.json").read_text())["passed"]


def batch_of(run: Path, step: int) -> RecordedBatch:
    reader = RecordReader(run)
    reader.refresh()
    return read_batch(reader, step)


def damage(rows: list[dict[str, Any]], **change: Any) -> None:
    others = dict(rows[4]["others"])
    rows[4]["others"] = [*(others | {"rewards": others["rewards"] | change}).items()]


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [-1, -1]},
        {"shape": [2**40, 2**40, 0]},
        {"shape": [None]},
        {"dtype": "object"},
        {"dtype": "float64"},
        {"data": b""},
        {"data": None},
    ],
)
def test_a_damaged_value_is_named_by_replay_and_audit(change: dict[str, Any], grpo: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(grpo, run)
    edit(run / "record" / "train-00000004.tokens.parquet", lambda rows: damage(rows, **change))
    with pytest.raises(DataError, match=r"step 4.*damaged"):
        batch_of(run, 4)
    found = found_in(run, replay="none")
    assert any("step 4: it cannot be checked" in each for each in found), found


def test_an_audit_names_what_a_hostile_chain_holds(grpo: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(grpo, run)
    (run / "metrics.jsonl").unlink()
    odd = {
        "record": {"../../a": "x"},
        "models": {"/etc/passwd": "x"},
        "code": {"a\0b.py": 1},
        "metrics": {"bytes": "9"},
    }
    begins = {"kind": "resume", "previous": "", "options": {"trainer": 1}, "devices": 7, "code": 3}
    links: list[Any] = [odd, odd | {"previous": ""}, [], {"previous": 3, "record": [1]}, begins]
    links += [begins | {"step": float("inf")}, {"previous": "", "record": {"a\0b": "x"}}]
    with (run / "chain.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(link)}\n" for link in links)
    found = found_in(run, replay="none")
    assert any("metrics.jsonl: a line was changed, added or removed" in each for each in found)
    assert sum("leads out" in each for each in found) == 2
    assert sum("chain.jsonl line" in each for each in found) >= 6


def test_a_forged_chain_switches_no_check_off(grpo: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(grpo, run)
    edit(run / "record" / "train-00000004.tokens.parquet", set_advantage)
    chain = read_chain(grpo)
    facts = chain.begins[-1]["options"]
    other = json.loads(json.dumps(facts).replace("0.001", "0.002"))
    (run / "chain.jsonl").unlink()
    writer = ChainWriter(run, None)
    writer.begin(0, None, {"options": other})
    writer.begin(4, "state/step-4", {"options": {**facts, "actor": {"lr": "none"}}})
    writer.begin(5, "state/step-5", {"options": facts, "config": hash_file(run / "config.yaml")})
    found = found_in(run)
    assert any("record, step 4" in each and "advantage" in each for each in found), found
    assert any("state/step-6: weights" in each for each in found), found
    assert not any("config.yaml" in each for each in found)


def test_a_file_that_was_changed_while_the_run_was_stopped_stays_named(grpo: Path, tmp_path: Path) -> None:
    run, name = tmp_path / "run", "record/train-00000002.rows.parquet"
    shutil.copytree(grpo, run)
    chain = read_chain(run)
    edit(run / name, lambda rows: rows[0].update(item="another"))
    for changed in ([name], []):
        writer = ChainWriter(run, 6)
        assert [*writer.changed] == changed
        writer.begin(6, "state/step-6", {key: chain.begins[-1][key] for key in ("options", "config", "versions")})
        writer.append({"kind": "end", "step": 6})
    assert found_in(run, replay="none") == [
        f"{name}: it was changed or removed while the run was stopped, before it went on at step 6"
    ]


def test_a_token_beyond_the_vocabulary_is_named_with_its_place(grpo: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(grpo, run)
    edit(run / "record" / "train-00000004.tokens.parquet", lambda rows: rows[4]["ids"].__setitem__(2, 10**6))
    with pytest.raises(DataError, match=r"step 4, row \d+, token 2: input_ids has 1000000"):
        replayed(run, 4)
    found = found_in(run)
    assert any("step 4" in each and "tokens [2] have ids that are not in the vocabulary" in each for each in found)
    assert any(each.startswith("steps 4 to 6: ") for each in found), found


def test_values_of_the_environment_are_kept_unless_they_may_be_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED_RATE", "0.00125")
    monkeypatch.setenv("PLANTED_PROJECT", "planted-project-key")
    given = {"actor.lr": "${oc.decode:${oc.env:PLANTED_RATE}}", "trainer.project": "${oc.env:PLANTED_PROJECT}"}
    run = train(tmp_path, "sft", 7, **given)
    for path in run.rglob("*"):
        assert not path.is_file() or b"planted-project-key" not in path.read_bytes(), path
    assert "oc.env:PLANTED_RATE" in (run / "config.yaml").read_text()
    monkeypatch.delenv("PLANTED_RATE")
    assert verdicts(replayed(run, 7)) == ["equal"] * 7
    (run / "chain.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"set them, and add variables=\[PLANTED_PROJECT, PLANTED_RATE\]"):
        replayed(run, 7)
    monkeypatch.setenv("PLANTED_RATE", "0.00125")
    assert verdicts(replayed(run, 7, variables=["PLANTED_RATE"])) == ["equal"] * 7


@pytest.mark.parametrize(
    ("key", "source", "value", "is_kept"),
    [
        ("actor.lr", "${oc.decode:${oc.env:RATE}}", 1e-3, True),
        ("data.path", "${oc.env:DATA}/rows.jsonl", "/data/rows.jsonl", True),
        ("data.path", "${oc.env:DATA}", "https://me:planted@host/rows.jsonl", False),
        ("actor.model_name", "${oc.env:MODEL}", "hf_plantedplantedplanted", False),
        ("actor.model_name", "${oc.env:HF_TOKEN}", "model", False),
        ("reward.judge.api_key", "${oc.env:JUDGE}", 1234567, False),
        ("rollout.env_config.user", "${oc.env:NAME}", "anything", False),
    ],
)
def test_a_value_of_the_environment_is_kept_if_a_step_needs_it(
    key: str, source: str, value: object, is_kept: bool
) -> None:
    assert is_shown(key, source, value) is is_kept


@pytest.mark.nightly
def test_a_run_that_was_resumed_with_other_options_contradicts_nothing(tmp_path: Path) -> None:
    how: dict[str, Any] = {"trainer.save_freq": 1, "trainer.keep": 9, "actor.update_per_rollout": 1}
    train(tmp_path, "grpo", 2, **how)
    run = train(tmp_path, "grpo", 3, **how, **{"actor.lr": 2e-3, "trainer.load_ckpt_from": "latest"})
    assert [verdicts(replayed(run, step)) for step in (2, 3)] == [["equal"], ["equal"]]
    report = auditing.audit(AuditConfig(run=str(run)))
    assert report.found == []
    assert [report.verdict(step) for step in (1, 2, 3)] == ["equal"] * 3
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "state" / "step-2")
    assert verdicts(replayed(copy, 3)) == ["equal", "equal"], "each with the options of its time"
    with pytest.raises(ConfigError, match="other options after step 2, of which there is no checkpoint"):
        replaying.main([str(copy), "--step", "3", "--bundle", str(tmp_path / "step.zip")])
    began = train(
        tmp_path, "lora", 3, **how, **{"actor.lora": None, "trainer.load_ckpt_from": str(run / "state/step-2")}
    )
    result = replayed(began, 3)
    assert str(run / "state/step-2") in result.start
    assert verdicts(result) == ["equal"]


def test_a_step_that_the_run_never_made_is_named(grpo: Path) -> None:
    with pytest.raises(ConfigError, match="step 7: the run has 6 steps"):
        replaying.main([str(grpo), "--step", "7"])


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no config\.yaml"):
        replaying.main([str(tmp_path)])


@pytest.mark.nightly
def test_a_run_that_was_ahead_and_interrupted_is_made_again(tmp_path: Path) -> None:
    ahead = {"rollout.max_head_offpolicyness": 2, "num_devices": 2, "launcher": "ray", "trainer.save_freq": 5}
    train(tmp_path, "grpo", 10, **ahead, **{"actor.update_per_rollout": 1})
    run = train(tmp_path, "grpo", 20, **ahead, **{"actor.update_per_rollout": 1, "trainer.keep": 9})
    result = replayed(run, 20)
    assert {*verdicts(result)} == {"equal"}
    assert [*result.steps] == list(range(16, 21))
    assert found_in(run) == []


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_a_run_of_two_ranks_is_made_again_in_one_process(kind: str, tmp_path: Path) -> None:
    own = {"data.batch_size": 5, "trainer.n_epochs": 4} if kind == "sft" else {}
    run = train(tmp_path, kind, 20, **own, num_devices=2, launcher="ray")
    result = replayed(run, 20)
    assert "differs" not in verdicts(result)
    weights = [each for each in result.steps[20] if each.name == "weights"]
    assert weights[0].difference <= 1e-6
    own_layout = replayed(run, 20, layout="own")
    assert {*verdicts(own_layout)} == {"equal"}


@pytest.mark.parametrize(
    ("text", "is_kept"),
    [
        ("${oc.env:PLANTED}", True),
        (r"\\${oc.env:PLANTED}", False),
        (r"\${a} ${oc.env:PLANTED}", False),
        ("${b.${oc.env:PLANTED}}", True),
    ],
)
def test_options_of_a_run_read_nothing_from_the_environment(
    text: str, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED", "planted-value")
    found = OmegaConf.to_container(
        OmegaConf.create(literal({"text": text, "b": "other", "same": "${b}"})), resolve=True
    )
    assert isinstance(found, dict)
    assert "planted-value" not in found["text"]
    assert found["same"] == "other"
    assert not is_kept or found["text"] == text


@pytest.mark.parametrize(
    ("group", "own", "told"),
    [
        ("train_data", {"map": "EVIL:run"}, r"train_data\.map=.*evil\.py:run"),
        (
            "train_data",
            {"path": None, "mixture": {"a": {"path": "p", "map": "EVIL:run"}}},
            r"train_data\.mixture\.a\.map=.*evil",
        ),
        ("reward", {"path": "EVIL:run"}, r"reward\.path=.*evil\.py:run"),
        ("reward", {"path": "os:system"}, r"reward\.path=os:system"),
        (
            "reward",
            {"path": None, "judge": {"url": "http://127.0.0.1:9", "model": "m", "rubric": "r", "key_env": "HOME"}},
            "a judge gives it",
        ),
    ],
)
def test_an_audit_runs_the_named_file_and_nothing_else_of_the_run(
    group: str, own: dict[str, Any], told: str, grpo: Path, tmp_path: Path
) -> None:
    run, evil = tmp_path / "run", tmp_path / "evil.py"
    shutil.copytree(grpo, run)
    evil.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef run(row):\n    return row\n")
    saved = yaml.safe_load((run / "config.yaml").read_text())
    place = saved[group] if "path" in saved[group] or group != "reward" else saved[group].popitem()[1]
    saved[group] = place | json.loads(json.dumps(own).replace("EVIL", str(evil)))
    (run / "config.yaml").write_text(yaml.safe_dump(saved))
    findings = auditing.audit(AuditConfig(run=str(run), code=str(grpo.parent / "score.py"), replay="none"))
    assert any(re.search(f"rewards are not computed again: .*{told}", note) for note in findings.notes), findings.notes
    assert not (tmp_path / "ran").exists()


def test_the_command_of_a_chain_has_no_secrets() -> None:
    token = "hf_" + "a1" * 12
    given = ["/opt/bin/rlite", "grpo", "actor.lr=1e-6", "reward.judge.api_key=abc", f"train_data.path={token}", "a b"]
    expected = "rlite grpo actor.lr=1e-6 'reward.judge.api_key=(removed)' '(removed)' 'a b'"
    assert public_command(given) == expected
    assert public_command(["examples/train.py", "--steps=3"]) == "train.py --steps=3"


class SetsAfterTwo(Callback):
    """Sets two coefficients after the second step."""

    def on_step(self, run: Any, metrics: Any) -> None:
        if run.step == 2:
            run.set(clip=0.05, entropy_coef=-0.03)


CHANGING: dict[str, Any] = {
    "actor.update_per_rollout": 1,
    "kl.type": "loss",
    "rollout.deterministic": True,
    "schedule.entropy_coef": {1: 0.05, 6: 0.0},
    "schedule.kl_coef": {1: 0.2, 5: 0.0},
    "schedule.temperature": {1: 1.0, 4: 0.7},
    "trainer.callbacks": ["sets_after_two"],
    "trainer.save_freq": 3,
    "trainer.keep": 9,
}


def test_coefficients_that_change_are_those_of_resume_replay_and_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(CALLBACKS, "sets_after_two", SetsAfterTwo)
    train(tmp_path, "grpo", 3, **CHANGING)
    shown = [re.sub(r"  +", "  ", line).strip() for line in told(capsys).splitlines()]
    points = "entropy_coef {1: 0.05, 6: 0.0}, kl_coef {1: 0.2, 5: 0.0}, temperature {1: 1.0, 4: 0.7}"
    assert f"schedules  {points}: by step, straight lines between them, in place of the options of these names" in shown
    assert "callbacks  sets_after_two" in shown
    run = train(tmp_path, "grpo", 5, **CHANGING)
    train(tmp_path, "grpo", 5, **CHANGING, **{"trainer.save_dir": str(tmp_path / "straight")})
    made, straight = (
        [line for line in read_metrics(path / "metrics.jsonl") if "loss" in line]
        for path in (run, tmp_path / "straight")
    )
    names = ("loss", "reward", "temperature", "kl_coef", "entropy_coef", "clip", "set/clip")
    assert [[line.get(name) for name in names] for line in made] == [[line.get(n) for n in names] for line in straight]
    assert [line["entropy_coef"] for line in made] == [0.05, pytest.approx(0.04), -0.03, -0.03, -0.03]
    assert [line["temperature"] for line in made] == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.7])
    assert {*verdicts(replayed(run, 5))} == {"equal"}
    assert found_in(run) == []

    lines = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(lines.replace('"set/entropy_coef": -0.03', '"set/entropy_coef": 0.5'))
    assert "differs" in verdicts(replayed(run, 5)), "the loss contradicts a coefficient that was not in force"


def test_an_adapted_weight_of_the_kl_is_that_of_the_step_in_replay_and_audit(tmp_path: Path) -> None:
    adapted = {"kl.type": "reward", "kl.coef": 0.5, "kl.adaptive_target": 1e-4, "kl.adaptive_horizon": 20.0}
    run = train(tmp_path, "grpo", 3, **adapted, **{"actor.update_per_rollout": 1})
    coefs = [line["kl_coef"] for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
    assert len(set(coefs)) == 3
    assert {*verdicts(replayed(run, 3))} == {"equal"}
    assert found_in(run) == []
