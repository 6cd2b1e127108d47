from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

import pytest
from annotated_types import Ge, Le
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AllowInfNan

from rlite.config import Options, describe, inherit, load, quick_checks, save, set_keys, to_container
from rlite.errors import ConfigError, UnknownOptionError
from rlite.key_value import named

Kind = Literal["adamw", "sgd"]


class Data(Options):
    path: str
    """a file or a Hugging Face dataset"""
    batch_size: int = 128
    """sequences per optimizer step"""
    split: list[int] = [9, 1]
    weight: Annotated[float, Ge(0), Le(1)] = 1.0


class Optimizer(Options):
    kind: Kind = "adamw"
    lr: float = 5e-6
    """peak learning rate"""
    clip: float | None = None

    def problems(self) -> Iterator[str]:
        if self.lr <= 0:
            yield f"lr={self.lr}: expected a positive number"


class Actor(Options):
    model_name: str | None = None
    avg_level: Literal["token", "sequence", "constant"] = "token"
    tp_size: int | None = None
    use_liger_kernel: bool = False
    optimizer: Optimizer = Optimizer(lr=1e-3)


class Sampling(Options):
    max_new_tokens: int
    stop: list[str] = []
    temperature: float = 1.0


class Run(Options):
    data: Data
    actor: Actor = Actor()
    critic: Actor = Actor()
    sampling: Sampling | None = None
    name: str = "run"
    save_dir: str | None = None
    extra: dict[str, Any] = {}


def write(folder: Path, text: str, name: str = "recipe.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_arguments_win_over_files_which_win_over_defaults(tmp_path: Path) -> None:
    first = write(tmp_path, "data: {path: a.json, batch_size: 4}\nactor: {optimizer: {lr: 1e-4}}\n")
    second = write(tmp_path, "data: {batch_size: 8}\n", "second.yaml")
    config = load(Run, ["--config", first, f"--config={second}", "data.path=b.json"])
    assert config.data == Data(path="b.json", batch_size=8)
    assert config.actor.optimizer == Optimizer(lr=1e-4)
    assert config.critic.optimizer == Optimizer(lr=1e-3), "a group's own default instance is the base of its fields"


def test_text_is_read_as_the_type_of_its_field_says() -> None:
    config = load(
        Run,
        [
            *["data.path=001", "data.split=[3, 2]", "name={% for m in messages %}", "save_dir=out/a=b"],
            *["actor.use_liger_kernel=True", "actor.optimizer.kind=sgd", "actor.optimizer.clip=1e-6"],
            *["sampling.max_new_tokens=1_000", "sampling.stop=[</s>, '1']", "extra.kwargs.lr=1e-6", "extra.n=3"],
        ],
    )
    assert (config.data.path, config.name) == ("001", "{% for m in messages %}")
    assert config.data.split == [3, 2]
    assert config.save_dir == "out/a=b"
    assert config.actor.use_liger_kernel is True
    assert config.actor.optimizer == Optimizer(kind="sgd", lr=1e-3, clip=1e-6)
    assert config.sampling == Sampling(max_new_tokens=1000, stop=["</s>", "1"])
    assert config.extra == {"kwargs": {"lr": 1e-6}, "n": 3}


def test_a_group_can_be_left_out_and_switched_off(tmp_path: Path) -> None:
    assert load(Run, ["data.path=x"]).sampling is None
    recipe = write(tmp_path, "data: {path: x}\nsampling: {max_new_tokens: 4}\n")
    assert load(Run, ["--config", recipe]).sampling == Sampling(max_new_tokens=4)
    assert load(Run, ["--config", recipe, "sampling=null"]).sampling is None
    assert load(Run, ["data.path=x", "sampling={max_new_tokens: 7}"]).sampling == Sampling(max_new_tokens=7)


def test_environment_variables_are_saved_unresolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "hunter2")
    recipe = """
data: {path: "https://me:${oc.env:KEY}@host/rows"}
name: ${data.path}
actor: {model_name: "${oc.env:KEY}"}
critic: ${actor}
sampling: {max_new_tokens: 1, stop: ["${oc.env:KEY}", '\\${plain}']}
extra: {key: "${oc.env:KEY}", deep: {list: ["a ${extra.key}"]}, again: "${.deep}", stop: "${sampling.stop}"}
"""
    config = load(Run, ["--config", write(tmp_path, recipe)])
    assert (config.data.path, config.critic.model_name) == ("https://me:hunter2@host/rows", "hunter2")
    assert config.extra["again"] == {"list": ["a hunter2"]}
    copied = pickle.loads(pickle.dumps(config.replace(name=config.data.path)))
    for each in (config, copied):
        save(each, tmp_path / "config.yaml")
        assert "hunter2" not in (tmp_path / "config.yaml").read_text()
        assert "hunter2" not in str(to_container(each))
        assert load(Run, ["--config", str(tmp_path / "config.yaml")]) == config
    with pytest.raises(ConfigError, match=r"sampling\.max_new_tokens=\$\{oc\.env:KEY\}: expected an int"):
        load(Run, ["--config", write(tmp_path, recipe), "sampling.max_new_tokens=${oc.env:KEY}"])


def test_interpolations_see_arguments_and_defaults(tmp_path: Path) -> None:
    recipe = write(tmp_path, "data: {path: '${name}.json', batch_size: '${data.split.0}'}\nname: a\n")
    config = load(Run, ["--config", recipe, "name=b"])
    assert config.data == Data(path="b.json", batch_size=9)
    for key in ("no_such", "oc.env:NO_SUCH"):
        with pytest.raises(ConfigError, match=r"\Adata\.path: [^\n]*(no_such|NO_SUCH)' not found\"?\Z"):
            load(Run, ["--config", write(tmp_path, f"data: {{path: '${{{key}}}'}}")])


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("data.batch_size=abc", "data.batch_size=abc: expected an int"),
        ("data.batch_size=1.5", "data.batch_size=1.5: expected an int"),
        ("data.batch_size=null", "data.batch_size=null: expected an int"),
        ("actor.tp_size=two", "actor.tp_size=two: expected an int"),
        ("actor.avg_level=tokens", "actor.avg_level=tokens: expected one of token, sequence, constant"),
        ("actor.use_liger_kernel=maybe", "actor.use_liger_kernel=maybe: expected true or false"),
        ("actor.optimizer.lr=fast", "actor.optimizer.lr=fast: expected a float"),
        ("actor.optimizer.kind=lion", "actor.optimizer.kind=lion: expected one of adamw, sgd"),
        ("data.split=[1, x]", "data.split=[1, 'x']: expected a list of int"),
        ("sampling.stop=word", "sampling.stop=word: expected a list of str, written [a, b]"),
        ("sampling.stop=[1]", "sampling.stop=[1]: expected a string (in yaml, quote it)"),
        ("sampling.stop=[a", "sampling.stop=[a: not valid yaml"),
        ("actor=3", "actor=3: expected keys of the group, such as actor.model_name=..."),
        ("actor.optimizer.lr=-1", "actor.optimizer.lr=-1.0: expected a positive number"),
        ("actor.optimizer=[1]", "actor.optimizer=[1]: expected keys of the group, such as actor.optimizer.kind=..."),
        ("extra=[1]", "extra=[1]: expected a mapping such as {key: value}"),
        ("extra={1: 2}", "extra={1: 2}: expected a string (in yaml, quote it)"),
        ("name=${data.path", "name: "),
        ("data", "argument 'data': expected key=value"),
        ("--verbose", "argument '--verbose': expected key=value"),
    ],
)
def test_a_wrong_value_names_its_key_and_what_was_expected(argument: str, message: str) -> None:
    required = ["data.path=x", "sampling.max_new_tokens=1"]
    with pytest.raises(ConfigError) as caught:
        load(Run, [*required, argument])
    assert str(caught.value).startswith(message), caught.value


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("actor.modle_name", "'actor.model_name'"),
        ("dta.path", "'data.path'"),
        ("actor.optimizer.learning_rate", "'actor.optimizer.lr'?"),
        ("learning_rate", "'actor.optimizer.lr' or 'critic.optimizer.lr'?"),
        ("lr", "'actor.optimizer.lr' or 'critic.optimizer.lr'"),
        ("actor.optimizer.momentum", "actor.optimizer.kind"),
        ("data.path.x", "'data.path'"),
        ("zzz", "known: actor, critic, data"),
    ],
)
def test_an_unknown_key_is_named_whole_with_the_nearest_real_one(key: str, nearest: str, tmp_path: Path) -> None:
    nested = "".join(f"{'  ' * depth}{part}:\n" for depth, part in enumerate(key.split(".")))
    from_file = ["--config", write(tmp_path, f"{nested.rstrip()} 1\n"), "data.batch_size=4"]
    sources = [[f"{key}=1"]] if key == "data.path.x" else [[f"{key}=1"], from_file]
    for argv in sources:
        with pytest.raises(UnknownOptionError) as caught:
            load(Run, argv)
        assert f"unknown key {key!r}" in str(caught.value)
        assert nearest in str(caught.value)


def test_required_keys_that_are_missing_are_listed_together(tmp_path: Path) -> None:
    recipe = write(tmp_path, "data:\n  path: ???\nsampling: {temperature: 0.5}\n")
    with pytest.raises(ConfigError, match=r"not set: data\.path, sampling\.max_new_tokens \("):
        load(Run, ["--config", recipe])


def test_question_marks_make_a_key_with_a_default_required(tmp_path: Path) -> None:
    recipe = write(tmp_path, "data:\n  path: a\n  batch_size: ???\nsampling: {max_new_tokens: 3}\n")
    with pytest.raises(ConfigError, match=r"not set: data\.batch_size \("):
        load(Run, ["--config", recipe])
    assert load(Run, ["--config", recipe, "data.batch_size=5"]).data.batch_size == 5


def test_all_wrong_values_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Run(data={"path": 3, "batch_size": "x"}, name=None)
    assert str(caught.value).splitlines() == [
        "data.path=3: expected a string (in yaml, quote it)",
        "data.batch_size=x: expected an int",
        "name=null: expected a string (in yaml, quote it)",
    ]


def test_problems_of_every_kind_are_reported_together_with_their_sources(tmp_path: Path) -> None:
    recipe = write(tmp_path, "data: {batch_size: 1.5, split: [1, no]}\nactor: {avg_level: '${name}', modle_name: a}\n")
    with pytest.raises(UnknownOptionError) as caught:
        load(Run, ["--config", recipe, "actor.optimizer.lr=-1", "critic.tp=2", "sampling.temperature=hot"])
    assert str(caught.value).splitlines() == [
        "unknown key 'critic.tp'; did you mean 'critic.tp_size'? (command line)",
        f"unknown key 'actor.modle_name'; did you mean 'actor.model_name'? ({recipe})",
        f"data.batch_size=1.5: expected an int ({recipe})",
        f"data.split=[1, False]: expected a list of int ({recipe})",
        f"actor.avg_level=${{name}}: expected one of token, sequence, constant ({recipe})",
        "actor.optimizer.lr=-1.0: expected a positive number",
        "sampling.temperature=hot: expected a float (command line)",
        "required and not set: data.path, sampling.max_new_tokens (give KEY=VALUE, or --help for all keys)",
    ]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("batch_size", True),
        ("batch_size", 2.0),
        ("batch_size", "2.0"),
        ("batch_size", None),
        ("path", 1),
        ("path", None),
        ("split", (1, 2)),
        ("split", [1, "2"]),
        ("split", [1, 2.0]),
        ("split", {"0": 1}),
    ],
)
def test_no_value_is_silently_turned_into_another(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}=.*: expected "):
        Data(**{"path": "a", key: value})


@pytest.mark.parametrize("value", ["yes", "on", "1", 1, 0, 1.0, "t", "", None])
def test_only_true_and_false_are_truth_values(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^use_liger_kernel=.*: expected true or false"):
        Actor(use_liger_kernel=value)
    assert Actor(use_liger_kernel="TRUE") == Actor(use_liger_kernel=True)  # type: ignore[arg-type]


def test_options_made_in_code_raise_the_errors_of_files() -> None:
    with pytest.raises(ConfigError, match=r"required and not set: path"):
        Data()  # type: ignore[call-arg]
    with pytest.raises(UnknownOptionError, match=r"unknown key 'optimizer\.rl'; did you mean 'optimizer\.lr'"):
        Actor(optimizer={"rl": 1.0})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^optimizer\.lr=-1\.0: expected a positive number"):
        Actor(optimizer={"lr": -1})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^lr=-1\.0: expected a positive number"):
        Optimizer().replace(lr=-1)
    frozen = Optimizer()
    with pytest.raises(ValueError, match="frozen"):
        frozen.lr = 2.0  # type: ignore[misc]


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    bad = {"list.yaml": ("- 1\n", "found a list"), "broken.yaml": ("a: [1\n", "not valid yaml")}
    for name, (text, message) in bad.items():
        with pytest.raises(ConfigError, match=f"{name}: .*{message}"):
            load(Run, ["--config", write(tmp_path, text, name)])
    first = write(tmp_path, "data: {path: a}\n")
    with pytest.raises(ConfigError, match=r"second\.yaml: a key is a mapping here and a list in .*recipe\.yaml"):
        load(Run, ["--config", first, "--config", write(tmp_path, "data: [a]\n", "second.yaml")])
    with pytest.raises(UnknownOptionError, match=r"unknown key 'data\.1'"):
        load(Run, ["--config", write(tmp_path, "data: {path: a, 1: 2}\n")])
    with pytest.raises(ConfigError, match=r"data\.path: a list has no such key \(.*recipe\.yaml\)"):
        load(Run, ["--config", write(tmp_path, "data: [a, b]\n"), "data.path=a"])
    for tag in ("bool", "float", "int", "timestamp"):
        with pytest.raises(ConfigError, match=r"recipe\.yaml: not valid yaml: "):
            load(Run, ["--config", write(tmp_path, f"lr: !!{tag} foo\n")])
        with pytest.raises(ConfigError, match=f"sampling.stop=!!{tag} foo: not valid yaml: "):
            load(Run, [f"sampling.stop=!!{tag} foo"])
    deep = "{x: " * 300 + "1" + "}" * 300
    with pytest.raises(ConfigError, match=r"recipe\.yaml: the values are nested too deeply"):
        load(Run, ["--config", write(tmp_path, f"data: {deep}\n")])
    with pytest.raises(ConfigError, match=r"sampling.stop=\{x: .*: the values are nested too deeply"):
        load(Run, [f"sampling.stop={deep}"])
    (tmp_path / "bytes.yaml").write_bytes(b"lr: \xff\n")
    with pytest.raises(ConfigError, match=r"bytes\.yaml: not UTF-8: invalid start byte at byte 4"):
        load(Run, ["--config", str(tmp_path / "bytes.yaml")])
    with pytest.raises(ConfigError, match="null byte"):
        load(Run, ["--config", f"{tmp_path}/\0"])
    with pytest.raises(ConfigError, match=r"missing\.yaml: No such file"):
        load(Run, ["--config", str(tmp_path / "missing.yaml")])
    with pytest.raises(ConfigError, match="--config: expected a yaml file"):
        load(Run, ["--config"])


def test_other_spellings_reach_the_field_they_mean(tmp_path: Path) -> None:
    aliases = {"actor.data.path": "data.path"}
    assert load(Run, ["actor.data.path=env.py"], aliases=aliases).data.path == "env.py"
    recipe = write(tmp_path, "actor: {data: {path: env.py}}\n")
    assert load(Run, ["--config", recipe], aliases=aliases).data.path == "env.py"
    both = write(tmp_path, "actor: {data: {path: env.py}}\ndata: {path: x}\n")
    with pytest.raises(ConfigError, match="give only one of them"):
        load(Run, ["--config", both], aliases=aliases)


text_values = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]))


@given(
    path=text_values.filter(lambda s: s != "???"),
    lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    stop=st.lists(text_values),
    extra=st.dictionaries(st.text("abc", min_size=1), st.none() | st.booleans() | st.integers() | text_values),
    kind=st.sampled_from(get_args(Kind)),
)
def test_a_saved_config_loads_as_an_equal_one(tmp_path_factory, path, lr, stop, extra, kind) -> None:
    config = Run(
        data=Data(path=path),
        actor=Actor(optimizer=Optimizer(lr=lr, kind=kind)),
        sampling=Sampling(max_new_tokens=3, stop=stop),
        extra=extra,
        save_dir="a/b",
    )
    saved = tmp_path_factory.getbasetemp() / "config.yaml"
    save(config, saved)
    assert load(Run, ["--config", str(saved)]) == config


@pytest.mark.parametrize(
    "text", ["0E0", "1e5", "-1E+3", "1_000", "1.5e3", "nan", "inf", "0x1f", "012", "1:30", "yes", "~"]
)
def test_a_text_that_looks_like_another_value_is_saved_as_a_text(tmp_path: Path, text: str) -> None:
    sampling, data = Sampling(max_new_tokens=3, stop=[text]), Data(path=text)
    config = Run(data=data, actor=Actor(), sampling=sampling, extra={"a": text}, save_dir="a/b")
    save(config, tmp_path / "config.yaml")
    assert load(Run, ["--config", str(tmp_path / "config.yaml")]) == config


def test_a_child_inherits_only_what_it_leaves_open() -> None:
    actor = Actor(model_name="m", tp_size=2, optimizer=Optimizer(lr=1.0, clip=0.5))
    critic = Actor(tp_size=4, optimizer=Optimizer(lr=2.0))
    inherited = inherit(critic, actor)
    assert inherited == Actor(model_name="m", tp_size=4, optimizer=Optimizer(lr=2.0, clip=0.5))
    assert critic.model_name is None


def test_help_prints_every_key_with_default_and_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        load(Run, ["data.path=x", "--help"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.rstrip() == describe(Run)
    lines = describe(Run).splitlines()
    assert "data.weight=1.0  (a float, between 0 and 1)" in lines
    at = lines.index("data.path=<required>  (a str)")
    assert lines[at + 1].strip() == "a file or a Hugging Face dataset"
    assert "actor.optimizer.lr=0.001  (a float)" in lines
    assert "sampling.max_new_tokens=<required>  (an int)" in lines


@pytest.mark.parametrize(
    ("given", "made"),
    [
        (["runs/a", "2+3=", "n=4"], ["model=runs/a", "prompt=2+3=", "n=4"]),
        (["n=4", "runs/a"], ["n=4", "model=runs/a"]),
        (["--config", "a.yaml", "runs/a"], ["--config", "a.yaml", "model=runs/a"]),
        (["--config=a.yaml", "runs/a", "${x}"], ["--config=a.yaml", "model=runs/a", r"prompt=\${x}"]),
        (["a", "b", "c"], ["model=a", "prompt=b", "c"]),
        (["a", "temprature=1"], ["model=a", "temprature=1"]),
    ],
)
def test_first_arguments_without_a_key_are_given_one(given: list[str], made: list[str]) -> None:
    assert named(given, ["model", "prompt"]) == made


def test_a_text_without_a_key_is_literal() -> None:
    class Said(Options):
        text: str

    assert load(Said, named(["costs ${5} or none"], ["text"])).text == "costs ${5} or none"


def test_the_module_is_light() -> None:
    program = "import sys, rlite.config; assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


class HelpedOptimizer(Options):
    """The optimizer."""

    lr: float = 0.1


class HelpedModel(Options):
    """The model."""

    name: str = "m"
    optimizer: HelpedOptimizer = HelpedOptimizer()


class HelpedData(Options):
    """Rows to learn
    from.

    And more.
    """

    path: str
    """a file"""


class Helped(Options):
    """A config."""

    help_example: ClassVar[str] = "data.path=rows.jsonl"
    help_first: ClassVar[tuple[str, ...]] = ("model.optimizer.lr",)

    seed: int = 1
    data: HelpedData
    model: HelpedModel = HelpedModel()


def test_help_begins_with_usage_example_and_usual_keys_and_goes_on_by_group() -> None:
    lines = describe(Helped, command="rlite demo").splitlines()
    assert lines[:3] == [
        "usage: rlite demo [--config FILE.yaml]... [key=value]...",
        "example: rlite demo data.path=rows.jsonl",
        "one group: rlite demo --help GROUP, of data, model, model.optimizer",
    ]
    assert [line for line in lines if line.startswith("[") or "=" in line.split(" ")[0]][1:] == [
        "data.path=<required>  (a str)",
        "model.optimizer.lr=0.1  (a float)",
        "[options]",
        "seed=1  (an int)",
        "[data: Rows to learn from]",
        "data.path=<required>  (a str)",
        "[model: The model]",
        "model.name=m  (a str)",
        "[model.optimizer: The optimizer]",
        "model.optimizer.lr=0.1  (a float)",
    ]


class HelpedCommand(Options):
    """A config without groups, whose usual keys are not declared first."""

    help_first: ClassVar[tuple[str, ...]] = ("prompt",)

    limit: int = 1
    model: str
    prompt: str = ""


def test_help_without_groups_begins_with_required_and_usual_keys() -> None:
    keys = [
        line.partition("=")[0] for line in describe(HelpedCommand).partition("[options]")[2].splitlines() if "(" in line
    ]
    assert keys == ["model", "prompt", "limit"]


@pytest.mark.parametrize(
    ("topic", "sections"),
    [
        ("data", ["[data: Rows to learn from]"]),
        ("model", ["[model: The model]", "[model.optimizer: The optimizer]"]),
        ("model.optimizer", ["[model.optimizer: The optimizer]"]),
        ("model.name", []),
    ],
)
def test_help_on_one_group_has_the_groups_below_it(
    capsys: pytest.CaptureFixture[str], topic: str, sections: list[str]
) -> None:
    with pytest.raises(SystemExit):
        load(Helped, ["--help", topic])
    shown = capsys.readouterr().out.splitlines()
    assert [line for line in shown if line.startswith("[")] == sections
    assert all(line.startswith(("    ", "[", topic)) for line in shown if line)
    assert any(line.startswith(f"{topic}") for line in shown)


class HelpedEntry(Options):
    """One of several."""

    path: str
    """a file"""
    weight: Annotated[float, AllowInfNan(False)] = 1.0


class HelpedMapping(Options):
    parts: dict[str, HelpedEntry] = {}
    """parts by name"""
    names: dict[str, str | None] | None = None


def test_help_on_a_mapping_shows_the_keys_of_its_entries() -> None:
    assert describe(HelpedMapping, "parts").splitlines() == [
        "parts={}  (a mapping {key: HelpedEntry})",
        "    parts by name",
        "",
        "[parts.NAME: One of several]",
        "parts.NAME.path=<required>  (a str)",
        "    a file",
        "parts.NAME.weight=1.0  (a float, finite)",
    ]
    assert describe(HelpedMapping, "parts.NAME.path").splitlines()[0] == "parts.NAME.path=<required>  (a str)"
    assert "names=null  (a mapping {key: a str or null} or null)" in describe(HelpedMapping)
    assert "common options" not in describe(HelpedMapping).partition("[options]")[2]


class HelpedSchedule(Options):
    points: dict[Annotated[int, Ge(1)], Annotated[float, AllowInfNan(False)]] = {}
    rates: dict[Annotated[int, Ge(1)], Annotated[float, Ge(0), AllowInfNan(False)]] = {}
    few: dict[Annotated[int, Ge(1)], Annotated[float, AllowInfNan(False)]] | None = None


def test_bounds_of_the_keys_and_of_the_values_of_a_mapping_are_told_apart() -> None:
    assert describe(HelpedSchedule, "points") == "points={}  (a mapping {key: a float}, keys at least 1; values finite)"
    assert describe(HelpedSchedule, "few").endswith("keys at least 1; values finite)")
    assert describe(HelpedSchedule, "rates").endswith("keys at least 1; values finite, at least 0)")
    with pytest.raises(ConfigError, match="expected keys at least 1; values a finite number of at least 0"):
        HelpedSchedule(rates={1: -0.5})
    assert HelpedSchedule(points={1: -0.05}).points == {1: -0.05}


def test_help_on_an_unknown_group_names_the_nearest() -> None:
    with pytest.raises(UnknownOptionError, match=r"--help modle: no such group or key; did you mean 'model'\?"):
        load(Helped, ["--help", "modle"])
    with pytest.raises(UnknownOptionError, match=r"did you mean 'model\.optimizer'\?"):
        load(Helped, ["-h", "model.optimiser"])


def test_rules_that_import_torch_wait_until_checks_are_not_quick() -> None:
    class Slow(Options):
        name: str = "x"

        def slow_problems(self) -> list[str]:
            return ["name: slow"]

    with quick_checks():
        assert load(Slow, []).name == "x"
    with pytest.raises(ConfigError, match="name: slow"):
        load(Slow, [])


class Limits(Options):
    depth: int = 1


class WithGroup(Options):
    limits: Limits


def test_a_required_group_whose_keys_have_values_is_named() -> None:
    with pytest.raises(ConfigError, match=r"required and not set: limits"):
        load(WithGroup, [])


def test_the_keys_that_are_not_at_their_defaults_are_told() -> None:
    class Inner(Options):
        rank: int = 8
        names: dict[str, int] = {}

    class Outer(Options):
        path: str
        inner: Inner | None = None
        entries: dict[str, Inner] = {}
        size: int = 3

    assert set_keys(Outer(path="a")) == ["path"]
    assert set_keys(Outer(path="a", entries={"b": Inner(rank=8), "c": Inner(rank=2)})) == ["path", "entries.c.rank"]
    assert set_keys(Outer(path="a", size=3, inner=Inner(rank=4, names={"a": 1}))) == [
        "path",
        "inner.rank",
        "inner.names.a",
    ]
