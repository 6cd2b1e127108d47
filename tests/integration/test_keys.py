"""Three planted keys are nowhere in what a run with a judge, remote servers and weight syncs leaves and says."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.backends.remote.server import ADMIN_VARIABLE, KEY_VARIABLE
from rlite.cli import main
from tests.integration.test_remote_servers import KEY, Server
from tests.tiny import build_model_dir
from tests.unit.rollout.rewards.test_llm_judge import Server as Judge

ADMIN, JUDGE = "planted-token-of-the-administrator", "sk-planted-key-of-the-judge"
SECRETS = (KEY, ADMIN, JUDGE)
pytestmark = pytest.mark.slow


def told(folder: Path) -> dict[str, str]:
    """Text of every file, tables as their columns."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    tables = {str(file): json.dumps(pq.read_table(file).to_pydict(), default=repr) for file in files if is_table(file)}
    assert tables, "no rollout is recorded"
    return tables | {str(file): file.read_bytes().decode(errors="replace") for file in files if not is_table(file)}


def is_table(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(4) == b"PAR1"


def test_keys_of_servers_and_of_a_judge_are_in_no_file_and_no_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model = build_model_dir(tmp_path / "model", "qwen3", hidden=64)
    byte_tokenizer().save_pretrained(model)
    rows = [{"messages": [{"role": "user", "content": f"{n}+1="}], "answer": str(n + 1)} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name, value in ((KEY_VARIABLE, KEY), (ADMIN_VARIABLE, ADMIN), ("JUDGE_KEY", JUDGE)):
        monkeypatch.setenv(name, value)
    server = Server(model)
    with Judge() as judge:
        threading.Thread(target=judge.serve_forever, daemon=True).start()
        options = [
            f"actor.model_name={model}",
            f"train_data.path={tmp_path / 'rows.jsonl'}",
            "train_data.prompts_per_rollout=4",
            "train_data.responses_per_prompt=2",
            "rollout.executor=remote",
            f"rollout.executor_options.addresses=[{server.url}]",
            f"rollout.executor_options.weights_folder={tmp_path / 'weights'}",
            "rollout.max_model_len=64",
            "rollout.train_sampling_params.max_new_tokens=8",
            f"reward.quality.judge.url={judge.url}",
            "reward.quality.judge.model=m",
            "reward.quality.judge.rubric=Is it {answer}?",
            "reward.quality.judge.key_env=JUDGE_KEY",
            "trainer.total_steps=2",
            "trainer.record=all",
            f"trainer.save_dir={tmp_path / 'run'}",
        ]
        run(monkeypatch, options)
        judge.reply = (401, json.dumps({"error": f"Incorrect API key provided: {JUDGE}"}))
        with pytest.raises(SystemExit, match="reward quality") as ended:
            run(monkeypatch, [*options, "trainer.total_steps=3"])
        judge.shutdown()
        assert {headers["Authorization"] for headers in judge.headers} == {f"Bearer {JUDGE}"}
    server.kill()
    assert server.process.stdout is not None
    said = "".join(capfd.readouterr()) + server.process.stdout.read() + str(ended.value)
    assert "401" in said
    texts = {**told(tmp_path / "run"), **told_plain(tmp_path / "weights"), "messages": said}
    assert [(where, secret) for where, text in texts.items() for secret in SECRETS if secret in text] == []


def run(monkeypatch: pytest.MonkeyPatch, options: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["rlite", "grpo", *options])
    main()


def told_plain(folder: Path) -> dict[str, str]:
    return {str(file): file.read_bytes().decode(errors="replace") for file in folder.rglob("*") if file.is_file()}
