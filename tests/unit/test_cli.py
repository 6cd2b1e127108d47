import json
import re
import subprocess
import sys

import pytest

from rlite.cli import COMMANDS, main
from rlite.config import describe, load
from rlite.trainer.options import AnnouncedOptions


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["rlite", *arguments])
    main()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_describes_its_options(monkeypatch, capsys, command):
    run(monkeypatch, "schema", command)
    made = json.loads(capsys.readouterr().out)
    assert made["$schema"].startswith("https://json-schema.org/")
    run(monkeypatch, command, "--help")
    listed = capsys.readouterr().out
    assert all(f"\n{name}" in listed for name in made["properties"])


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_without_a_command_all_commands_are_listed(monkeypatch, capsys, arguments):
    run(monkeypatch, *arguments)
    listed = set(re.findall(r"[a-z]+", capsys.readouterr().out))
    assert COMMANDS.keys() <= listed


@pytest.mark.parametrize(
    ("command", "preset"),
    [
        ("grpo", "rlite ppo actor.avg_level=sequence kl.type=loss kl.loss_estimator=k3 adv.norm_var=true"),
        ("simpo", "rlite dpo actor.beta=2.0 actor.preference_loss.name=simpo trainer.save_dir=runs/simpo"),
    ],
)
def test_a_preset_says_which_defaults_it_changes(monkeypatch, capsys, command, preset):
    run(monkeypatch, command, "--help")
    told = capsys.readouterr().out.partition("preset: ")[2].partition("\n\n")[0]
    assert set(preset.split()) <= set(told.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example_and_its_usual_keys_exist(command):
    options = COMMANDS[command].find_options()
    assert options.help_example
    assert describe(options).count("example: ") == 1
    assert all(describe(options, key) for key in options.help_first)


def test_the_example_of_a_trainer_is_a_whole_config():
    trainers = [options for each in COMMANDS.values() if issubclass(options := each.find_options(), AnnouncedOptions)]
    assert len(trainers) >= 5
    for options in trainers:
        assert ", into runs/" in load(options, options.arguments(options.help_example.split())).headline()


def test_help_on_one_group_of_a_command(monkeypatch, capsys):
    run(monkeypatch, "ppo", "--help", "rollout.train_sampling_params")
    assert capsys.readouterr().out.startswith("[rollout.train_sampling_params: The sampling of responses]\n")
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, "ppo", "--help", "adw")
    assert stopped.value.code == "rlite ppo: UnknownOptionError: --help adw: no such group or key; did you mean 'adv'?"
    with pytest.raises(SystemExit, match=r"--help lora: no such group or key; did you mean 'actor\.lora'"):
        run(monkeypatch, "sft", "--help", "lora")


def test_help_may_be_read_by_head():
    command = f"{sys.executable} -m rlite.cli ppo --help | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: rlite ppo")


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        *[("view", "RUN [RUN2 ...] [--export FILE.html]"), ("generate", 'MODEL "PROMPT"'), ("merge", "ADAPTER OUT")],
        *[("eval", "MODEL [MODEL2] [--data ROWS]"), ("launch", "JOB.yaml"), ("status", "[NAME]"), ("logs", "NAME")],
    ],
)
def test_the_usage_shows_arguments_without_a_key(monkeypatch, capsys, command, arguments):
    run(monkeypatch, command, "--help")
    assert capsys.readouterr().out.startswith(f"usage: rlite {command} {arguments} ")


def test_help_on_the_schema_lists_the_commands(monkeypatch, capsys):
    run(monkeypatch, "schema", "--help")
    told = capsys.readouterr().out
    assert told.startswith("usage: rlite schema COMMAND\n")
    assert all(command in told for command in COMMANDS)


def test_help_and_schema_offer_the_same_estimators_of_a_kl_loss(monkeypatch, capsys):
    run(monkeypatch, "ppo", "--help", "kl.loss_estimator")
    assert "(one of abs, k2, k3)" in capsys.readouterr().out
    run(monkeypatch, "schema", "ppo")
    found = re.search(r'"loss_estimator": \{.*?"enum": \[(.*?)\]', capsys.readouterr().out, re.DOTALL)
    assert found[1].split() == ['"abs",', '"k2",', '"k3"']


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pop"], "unknown command 'pop'; did you mean 'ppo'?"),
        (["chat"], "did you mean 'generate'?"),
        (["shcema", "ppo"], "did you mean 'schema'?"),
        (["schema", "pop"], "expected one command; did you mean 'ppo'?"),
        (
            ["schema"],
            "schema: expected one command; known: cpo, doctor, dpo, eval, generate, grpo, kto, launch, logs, merge",
        ),
        (["schema", "sft", "ppo"], "expected one command"),
    ],
)
def test_a_command_that_does_not_exist_is_refused_with_the_nearest(monkeypatch, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, *arguments)
    assert message in str(stopped.value)


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (
            [],
            "train_data.path, a source of rewards (reward.path=file.py:function, rollout.env_path or ",
        ),
        (["train_data.path=rows.jsonl"], "a source of rewards"),
        (["reward.path=my.py:f"], "train_data.path;"),
    ],
)
def test_missing_data_and_rewards_are_reported_before_torch_is_loaded(monkeypatch, capsys, arguments, missing):
    with pytest.raises(SystemExit, match=re.escape(f"rlite ppo: ConfigError: missing: {missing}")):
        run(monkeypatch, "ppo", "actor.model_name=nowhere", *arguments)
    assert "loading torch" not in capsys.readouterr().out
