import json
import re
import subprocess
import sys

import pytest

from rlite.cli import COMMANDS, main
from rlite.config import describe, load
from rlite.trainer.options import LaunchOptions


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
    trainers = [options for each in COMMANDS.values() if issubclass(options := each.find_options(), LaunchOptions)]
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
    assert done.stderr == ""
    assert done.returncode in (0, 141), "the text may be written before head ends"
    assert done.stdout.startswith("usage: rlite ppo")


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        *[("view", "RUN [RUN2 ...] [--export FILE.html]"), ("generate", 'MODEL "PROMPT"'), ("merge", "ADAPTER OUT")],
        ("serve", "MODEL"),
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
            "schema: expected one command; known: audit, cpo, distill, doctor, dpo, env, eval, generate, grpo, kto",
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


ROWS, PAIRS = ["actor.model_name=m", "data.path=rows.jsonl"], ["actor.model_name=m", "data.path=pairs.jsonl"]
ROLLOUTS = ["actor.model_name=m", "train_data.path=prompts.jsonl", "reward.path=my.py:f"]
TAUGHT = "actor.model_name=m", "train_data.path=rows.jsonl", "distill.teacher.model_name=m"
WRONG = [
    ("simulate", "runs/grpo", "lengths=two"),
    ("replay", "runs/grpo", "--step", "0"),
    ("audit", "runs/grpo", "replay=some"),
    *(("sft", *ROWS, wrong) for wrong in ("actor.lr=fast", "actor.optimizer=adamx", "trainer.sinks=[jsnol]")),
    ("sft", *ROWS, "trainer.best_metric=test_loss"),
    ("rm", "critic.model_name=m", "data.path=pairs.jsonl", "critic.center_coefficient=-1"),
    ("dpo", *PAIRS, "actor.preference_loss.name=sigmiod"),
    ("dpo", *PAIRS, "actor.preference_loss.name=robust", "actor.preference_loss.options.label_smoothng=0.1"),
    ("dpo", *PAIRS, "actor.preference_loss.reference_free=true", "actor.preference_loss.divergence=js"),
    ("orpo", *PAIRS, "actor.preference_loss.name=orop"),
    ("simpo", *PAIRS, "actor.preference_loss.options.gama=1"),
    ("cpo", *PAIRS, "actor.preference_loss.divergence=js"),
    ("kto", *ROWS, "data.batch_size=1"),
    ("ppo", *ROLLOUTS, "adv.estimator=rlo"),
    ("ppo", *ROLLOUTS, "adv.estimator=grpo", "adv.norm_var=true"),
    ("ppo", *ROLLOUTS, "adv.estimator=dr_grpo", "adv.options.norm_st=true"),
    ("ppo", *ROLLOUTS, "adv.estimator=remax"),
    ("ppo", *ROLLOUTS, "rollout.train_sampling_params.temperature=0"),
    ("ppo", *ROLLOUTS, "trainer.stop_at={accuracy: 1}"),
    ("grpo", *ROLLOUTS, "actor.policy_loss.name=gspoo"),
    ("grpo", *ROLLOUTS, "actor.policy_loss.name=cispo", "actor.policy_loss.options.clip_hihg=1"),
    ("grpo", *ROLLOUTS, "actor.policy_loss.name=dppo", "actor.policy_loss.options.metric=tvv"),
    ("distill", "actor.model_name=m", "train_data.path=rows.jsonl"),
    ("distill", *TAUGHT, "distill.use_as=advantage"),
    ("distill", *TAUGHT, "distill.teacher.url=http://127.0.0.1:9"),
    ("eval", "m", "data=rows.jsonl", "reward=my.py:f", "temperature=hot"),
    ("generate", "m", "hello", "temperature=-1"),
    ("serve", "m", "port=70000"),
    ("tinker", "--model", "m", "port=70000"),
    ("merge", "adapter", "out", "dtpye=bfloat16"),
    ("plan", "model_name=m", "num_devices=0"),
    ("quickstart", "steps=few"),
    ("doctor", "self_test=perhaps"),
    ("env", "chek", "game.py"),
    ("ppo", "actor.model_name=m", "train_data.sampler.name=curiculum"),
    ("ppo", "actor.model_name=m", "adv.credit=token"),
    ("why", "run", "step=0"),
    ("view", "run", "port=many"),
    *((name, "name=x", "wait=perhaps") for name in ("launch", "status", "logs", "stop")),
]
FILES = {
    "rows.jsonl": '{"prompt": "1+1=", "response": "2"}\n',
    "my.py": "def f(prompt, completions, **row):\n    return [1.0]\n",
    "m/config.json": "{}",
    "empty/README": "",
}
HERE = ["actor.model_name=m", "train_data.path=rows.jsonl"]
MISSING = {
    (
        "sft",
        "actor.model_name=/nowhere/m",
        "data.path=rows.jsonl",
    ): "model '/nowhere/m': no such folder; check the path",
    ("sft", "actor.model_name=empty", "data.path=rows.jsonl"): "model folder 'empty': expected a config.json in it",
    (
        "sft",
        "actor.model_name=m",
        "data.path=row.jsonl",
    ): "data.path=row.jsonl: no such file; did you mean 'rows.jsonl'?",
    ("dpo", "actor.model_name=m", "data.path=train[:9]@pairs.csv"): "data.path=train[:9]@pairs.csv: no such file",
    ("kto", *ROWS, "test_data.path=rows.jsnol"): "test_data.path=rows.jsnol: no such file; did you mean 'rows.jsonl'?",
    (
        "rm",
        "critic.model_name=m",
        "data.mixture={a: {path: rows.jsonl}, b: {path: b.jsonl}}",
    ): "data.mixture.b.path=b.js",
    ("sft", *ROWS, "test_data.held.path=held.parquet"): "test_data.held.path=held.parquet: no such file",
    ("ppo", *HERE, "reward.path=mine.py:f"): "reward.path=mine.py:f: no such file in",
    ("ppo", *HERE, "reward.path=my.py:g"): "reward.path=my.py:g: my.py has no 'g'; known: f",
    (
        "ppo",
        *HERE,
        "reward.path=my.py:f",
        "train_data.map=my.py:g",
    ): "train_data.map=my.py:g: my.py has no 'g'; known: f",
    ("sft", *ROWS, "data.chat_template_path=no.jinja"): "data.chat_template_path=no.jinja: no such file",
    ("ppo", *HERE, "reward.path=my.py"): "reward.path=my.py: expected the function's name behind it",
    (
        "grpo",
        *HERE,
        "reward={a: {path: my.py:f}, b: {path: nothing}}",
    ): "reward.path=nothing: expected file.py:function",
    ("grpo", *HERE, "rollout.env_path=env.py"): "rollout.env_path=env.py: no such file",
    ("eval", "m", "/nowhere/m", "data=rows.jsonl", "reward=my.py:f"): "model '/nowhere/m': no such folder",
    ("eval", "m", "data=row.jsonl", "reward=my.py:f"): "data.path=row.jsonl: no such file",
    ("eval", "m", "data=rows.jsonl", "reward=my.py:g"): "my.py has no 'g'",
    ("eval", "m", "reward=my.py:f"): "missing: data.path=FILE, the prompts",
    ("generate", "/nowhere/m", "hello"): "model '/nowhere/m': no such folder",
    ("serve", "/nowhere/m"): "model '/nowhere/m': no such folder",
    ("plan", "model_name=/nowhere/m", "num_devices=1"): "model '/nowhere/m': no such folder",
}
PROGRAM = """
import re
import sys
from rlite.cli import main
for line in sys.stdin.read().splitlines():
    sys.argv = ["rlite", *line.split("|")]
    try:
        main()
        print("accepted", line)
    except SystemExit as error:
        print(error.code if re.search("Error|ImportFailed", str(error.code)) else f"not refused: {line}: {error.code}")
    assert not {"torch", "transformers"} & sys.modules.keys(), line
"""


def test_what_is_wrong_with_the_options_of_a_command_is_said_before_torch_is_loaded(tmp_path):
    assert {command for command, *_ in WRONG} == COMMANDS.keys()
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    given = "\n".join("|".join(arguments) for arguments in (*WRONG, *MISSING))
    done = subprocess.run([sys.executable, "-c", PROGRAM], input=given, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "accepted" not in done.stdout
    assert "not refused" not in done.stdout
    for arguments, message in MISSING.items():
        assert message in done.stdout, arguments


def test_the_algorithms_that_are_known_without_torch_are_those_of_the_tables():
    program = (
        "from rlite.registry import algorithms, options_of\n"
        "kinds = ('policy loss', 'advantage', 'preference loss')\n"
        "declared = {kind: dict(algorithms(kind)) for kind in kinds}\n"
        "import rlite.algorithms\n"
        "for kind, known in declared.items():\n"
        "    real = algorithms(kind)\n"
        "    assert known.keys() == real.keys(), kind\n"
        "    for name in known.keys() - {'grpo'}:\n"
        "        assert options_of(known[name]).keys() == options_of(real[name]).keys(), name\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
