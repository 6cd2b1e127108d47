import re
import sys
from importlib.util import find_spec
from typing import Any, get_args, get_origin

import pytest
from annotated_types import Ge, Gt, Le, Lt
from pydantic import AllowInfNan

from rlite import algorithms
from rlite.assembly.commands.options import GenerateConfig, PlanConfig
from rlite.assembly.evaluate.options import EvalConfig
from rlite.assembly.presets import CpoConfig, GrpoConfig, OrpoConfig, SimpoConfig
from rlite.cli import COMMANDS
from rlite.config import Options, describe, load, to_container
from rlite.errors import ConfigError, UnknownOptionError
from rlite.rollout import CollectorOptions
from rlite.trainer.rl.options import PpoConfig
from rlite.trainer.supervised_options import DpoConfig, KtoConfig, SftConfig
from rlite.types import GenerationHyperparameters

SFT = ["actor.model_name=a", "data.path=-"]


def test_adapters_are_asked_for_by_naming_one_of_their_options():
    assert load(SftConfig, SFT).actor.lora is None
    lora = load(SftConfig, [*SFT, "actor.lora.rank=8", "actor.lora.target_modules=[q_proj, v_proj]"]).actor.lora
    expected = {"rank": 8, "alpha": 32.0, "dropout": 0.0, "target_modules": ["q_proj", "v_proj"]}
    assert to_container(lora) == {**expected, "target_parameters": []}
    assert load(SftConfig, [*SFT, "actor.lora={}"]).actor.lora.rank == 16


@pytest.mark.parametrize("written", ["null", None])
def test_a_column_is_hidden_by_null_on_the_command_line_and_by_none_in_a_program(written):
    words = [*SFT, *(["data.columns.messages=null"] if written else [])]
    given = {} if written else {"data": {"columns": {"messages": None}}}
    assert load(SftConfig, words, given=given).data.columns == {"messages": None}


@pytest.mark.parametrize(
    ("argument", "named"),
    [
        ("actor.lora.rank=0", r"actor\.lora\.rank=0"),
        ("actor.lora.dropout=1", r"actor\.lora\.dropout=1"),
        ("actor.lora.rnak=8", r"actor\.lora\.rank"),
    ],
)
def test_options_of_adapters_that_mean_nothing_are_refused_by_their_whole_name(argument, named):
    with pytest.raises((ConfigError, UnknownOptionError), match=named):
        load(SftConfig, [*SFT, argument])


def test_a_critic_has_adapters_as_the_actor_has_and_a_reference_has_none():
    config = load(PpoConfig, ["actor.model_name=a", "actor.lora.rank=8", "critic.lora.rank=4", "ref_actor.tp_size=2"])
    assert config.critic.as_model(config.actor).lora.rank == 4
    assert config.ref_actor.as_model(config.actor).lora is None
    config = load(PpoConfig, ["actor.model_name=a", "actor.lora.rank=8"])
    assert config.critic.as_model(config.actor).lora == config.actor.lora


def test_the_critic_falls_by_the_schedule_of_the_actor_to_a_rate_of_its_own():
    schedule = ["actor.scheduler=polynomial", "actor.power=2", "actor.lr=1e-4", "actor.lr_end=1e-5"]
    config = load(PpoConfig, [*PPO, *schedule, "critic.lr_end=1e-7"])
    critic = config.critic.as_model(config.actor).optimizer_options(10)
    assert (critic.scheduler, critic.power, critic.lr, critic.lr_end) == ("polynomial", 2.0, 5e-6, 1e-7)


def test_the_reference_of_adapters_is_their_base_unless_another_model_is_asked_for():
    adapted = [*PPO, "actor.lora.rank=8", "kl.type=loss"]
    for same in ([], ["ref_actor.model_name=a"], ["ref_actor.max_inference_length_per_device=32768"]):
        assert load(PpoConfig, [*adapted, *same]).is_base_reference
    for other in (["ref_actor.model_name=b"], ["ref_actor.tp_size=2"], ["actor.lora=null"], ["kl.type=null"]):
        assert not load(PpoConfig, [*adapted, *other]).is_base_reference


def test_a_policy_that_answers_without_dropout_is_not_trained_with_it():
    with pytest.raises(ConfigError, match=r"actor\.lora\.dropout=0\.1"):
        load(PpoConfig, ["actor.model_name=a", "actor.lora.dropout=0.1"])


def test_options_of_models_that_a_run_does_without_are_named_and_limit_nothing():
    unread = ["critic.lr=1e-5", "critic.max_length_per_device=8", "ref_actor.tp_size=2", "kl.coef=0.1"]
    config = load(PpoConfig, [*PPO, *unread])
    assert config.without_effect() == (
        "critic.max_length_per_device, critic.lr (adv.estimator=reinforce has no critic); "
        "ref_actor.tp_size, kl.coef (kl.type=null has no reference)"
    )
    assert config.max_length == config.actor.max_length_per_device
    config = load(PpoConfig, [*PPO, *unread, "adv.estimator=gae", "kl.type=loss"])
    assert config.without_effect() == ""
    assert config.max_length == 8
    assert load(PpoConfig, PPO).without_effect() == ""


def test_kernels_whose_package_is_absent_are_refused_with_the_remedy():
    if find_spec("liger_kernel") is not None:
        pytest.skip("the package is here")
    with pytest.raises(ConfigError, match=r"pip install 'rlite\[liger\]'"):
        load(SftConfig, [*SFT, "actor.use_liger_kernel=true"])
    with pytest.raises(ConfigError, match=r"pip install 'rlite\[liger\]'"):
        load(PpoConfig, ["actor.model_name=a", "ref_actor.use_liger_kernel=true"])


@pytest.mark.parametrize("sink", ["tensorboard", "wandb", "trackio"])
def test_sinks_whose_package_is_absent_are_refused_before_an_earlier_run_is_deleted(sink, monkeypatch):
    monkeypatch.setitem(sys.modules, sink, None)
    with pytest.raises(ConfigError, match=rf"metric sink '{sink}' needs the package {sink}: pip install 'rlite\["):
        load(SftConfig, [*SFT, f"trainer.sinks=[jsonl,{sink}]"])
    with pytest.raises(
        ConfigError, match=r"^trainer\.sinks: unknown metric sink 'tensorbord'; did you mean 'tensorboard'"
    ):
        load(SftConfig, [*SFT, "trainer.sinks=[tensorbord]"])


PPO = ["actor.model_name=a"]


@pytest.mark.parametrize(
    ("config", "arguments", "named"),
    [
        (SftConfig, [*SFT, "actor.lr=-1"], r"^actor\.lr=-1\.0: expected"),
        (SftConfig, [*SFT, "actor.lr=nan"], r"^actor\.lr=nan: expected"),
        (SftConfig, [*SFT, "actor.lr_end=1e-5"], r"^actor\.lr_end=1e-05: expected less than lr=5e-06"),
        (SftConfig, [*SFT, "actor.scheduler=constant", "actor.lr_end=1e-7"], r"scheduler=constant never falls"),
        (SftConfig, [*SFT, "actor.power=2"], r"^actor\.power=2\.0 is an option of scheduler=polynomial"),
        (SftConfig, [*SFT, "actor.scheduler=polynomial", "actor.power=0"], r"^actor\.power=0\.0: expected"),
        (PpoConfig, [*PPO, "critic.lr_end=1"], r"^critic\.lr_end=1\.0: expected less than lr=5e-06"),
        (SftConfig, [*SFT, "actor.weight_decay=-1"], r"^actor\.weight_decay=-1\.0: expected"),
        (SftConfig, [*SFT, "actor.warmup_ratio=2"], r"^actor\.warmup_ratio=2\.0: expected a number between 0 and 1"),
        (SftConfig, [*SFT, "trainer.tags=[a]"], r"^trainer\.tags=\['a'\]: no metric sink shows it; add wandb to sinks"),
        (SftConfig, [*SFT, "trainer.entity=us", "trainer.sinks=[trackio]"], r"^trainer\.entity=us: .* add wandb to"),
        (PpoConfig, [*PPO, "trainer.group=g"], r"^trainer\.group=g: .* add wandb or trackio to sinks, or leave it out"),
        (SftConfig, [*SFT, "actor.max_length_per_device=0"], r"^actor\.max_length_per_device=0: expected"),
        (SftConfig, [*SFT, "data.batch_size=0"], r"^data\.batch_size=0: expected"),
        (DpoConfig, [*SFT, "actor.beta=0"], r"^actor\.beta=0\.0: expected a finite number of more than 0"),
        (KtoConfig, [*SFT, "data.batch_size=1"], r"^data\.batch_size=1: .*actor\.loss_type=apo_zero_unpaired"),
        (KtoConfig, [*SFT, "actor.desirable_weight=-1"], r"^actor\.desirable_weight=-1\.0: expected"),
        (PpoConfig, [*PPO, "critic.lr=-1"], r"^critic\.lr=-1\.0: expected"),
        (PpoConfig, [*PPO, "critic.clip=0"], r"^critic\.clip=0\.0: expected"),
        (PpoConfig, [*PPO, "actor.entropy_coef=nan"], r"^actor\.entropy_coef=nan: expected a finite number \("),
        (PpoConfig, [*PPO, "actor.clip=-1"], r"^actor\.clip=-1\.0: expected"),
        (PpoConfig, [*PPO, "actor.tis_coef=-1"], r"^actor\.tis_coef=-1\.0: expected"),
        (PpoConfig, [*PPO, "actor.freeze_steps=1"], r"^actor\.freeze_steps=1: .* adv\.estimator=reinforce has none"),
        (PpoConfig, [*PPO, "kl.coef=-1"], r"^kl\.coef=-1\.0: expected"),
        (PpoConfig, [*PPO, "kl.coef=inf"], r"^kl\.coef=inf: expected a finite number of at least 0"),
        (DpoConfig, [*SFT, "actor.beta=inf"], r"^actor\.beta=inf: expected a finite number of more than 0"),
        (PpoConfig, [*PPO, "rollout.max_refills=-1"], r"^rollout\.max_refills=-1: expected"),
        (PpoConfig, [*PPO, "rollout.request_retries=-1"], r"^rollout\.request_retries=-1: expected"),
        (PpoConfig, [*PPO, "rollout.request_timeout=0"], r"^rollout\.request_timeout=0\.0: expected more than 0 s"),
        (PpoConfig, [*PPO, "rollout.stale_timeout=-1"], r"^rollout\.stale_timeout=-1\.0: expected more than 0 s"),
        (PpoConfig, [*PPO, "rollout.max_consecutive_failures=0"], r"^rollout\.max_consecutive_failures=0: expected"),
        (PpoConfig, [*PPO, "train_data.responses_per_prompt=0"], r"^train_data\.responses_per_prompt=0: expected"),
        (
            PpoConfig,
            [*PPO, "actor.update_per_rollout=257"],
            r"^actor\.update_per_rollout=257: a rollout of 256 sequences",
        ),
    ],
)
def test_numbers_that_no_run_can_mean_are_refused_by_their_whole_name_said_once(config, arguments, named):
    with pytest.raises(ConfigError, match=named):
        load(config, arguments)


@pytest.mark.parametrize(
    ("config", "arguments", "named"),
    [
        (DpoConfig, ["actor.preference_loss.name=orpo"], r"^actor\.preference_loss\.name=orpo: .*reference_free=true"),
        (SimpoConfig, ["actor.preference_loss.length_normalised=false"], r"name=simpo: .*length_normalised=true"),
        (CpoConfig, ["ref_actor.model_name=b"], r"^ref_actor: .*reference_free=true has no reference"),
        (CpoConfig, ["actor.preference_loss.divergence=js"], r"divergence=js: reference_free=true has no reference"),
    ],
)
def test_a_loss_without_a_reference_is_not_given_one(config, arguments, named):
    with pytest.raises(ConfigError, match=named):
        load(config, [*SFT, *arguments])


def test_a_preset_is_another_trainer_with_other_defaults_which_may_be_overridden():
    settings = ["adv.norm_var=true", "actor.avg_level=sequence", "kl.type=loss", "kl.loss_estimator=k3"]
    said = load(PpoConfig, [*PPO, *settings, "trainer.save_dir=runs/grpo"])
    assert to_container(load(GrpoConfig, PPO)) == to_container(said)
    assert load(GrpoConfig, [*PPO, "kl.type=null"]).kl.loss_estimator == "k3"
    simpo = load(SimpoConfig, [*SFT, "actor.beta=10", "actor.preference_loss.options.gamma=3"]).actor
    assert (simpo.beta, simpo.preference_loss.name, simpo.preference_loss.options) == (10.0, "simpo", {"gamma": 3})
    orpo = load(OrpoConfig, SFT).actor.preference_loss
    assert (orpo.name, orpo.nll_weight, orpo.reference_free, orpo.length_normalised) == ("orpo", 1.0, True, True)


EQUAL_REWARDS_TEACH = [
    (["adv.estimator=gae"], "depend on the critic"),
    (["adv.global_norm=true"], "mean of the batch"),
    (["adv.gamma=0.9"], "depend on lengths"),
    (["kl.type=reward"], "depend on the KL"),
    (["kl.type=advantage"], "depend on the KL"),
    (["adv.estimator=gpg"], "more than the rewards of the group"),
    (["adv.estimator=normalized", "adv.options.std=batch"], "more than the rewards of the group"),
    (["adv.estimator=gdpo"], "more than the rewards of the group"),
    (["adv.estimator=reinforce_pp"], "more than the rewards of the group"),
    (["train_data.responses_per_prompt=1"], "mean of the batch"),
]


@pytest.mark.parametrize(("arguments", "reason"), EQUAL_REWARDS_TEACH)
def test_groups_of_equal_rewards_that_teach_are_kept_and_filtering_them_is_refused(arguments, reason):
    base = PPO if arguments == ["adv.estimator=gae"] else [*PPO, "train_data.responses_per_prompt=4"]
    assert not load(PpoConfig, [*base, *arguments]).has_dynamic_filtering
    with pytest.raises(ConfigError, match=rf"dynamic_filtering=true drops groups .*{reason}"):
        load(PpoConfig, [*base, *arguments, "rollout.dynamic_filtering=true"])


@pytest.mark.parametrize("arguments", [[], ["adv.norm_var=true"], ["adv.estimator=rloo"], ["kl.type=loss"]])
def test_groups_of_equal_rewards_that_teach_nothing_are_replaced_unless_that_is_not_wanted(arguments):
    base = [*PPO, "train_data.responses_per_prompt=4", *arguments]
    options = load(PpoConfig, base)
    assert options.has_dynamic_filtering
    told = f"with adv.estimator={options.adv.estimator} advantages compare rewards of a group alone"
    assert options.equal_rewards == (False, told)
    assert load(PpoConfig, [*base, "rollout.dynamic_filtering=true"]).has_dynamic_filtering
    assert not load(PpoConfig, [*base, "rollout.dynamic_filtering=false"]).has_dynamic_filtering


def test_groups_have_eight_responses_and_gae_needs_none():
    assert load(PpoConfig, PPO).responses_per_prompt == 8
    assert load(PpoConfig, [*PPO, "adv.estimator=rloo"]).responses_per_prompt == 8
    assert load(PpoConfig, [*PPO, "adv.estimator=gae"]).responses_per_prompt == 1
    assert load(PpoConfig, [*PPO, "adv.estimator=gae", "train_data.responses_per_prompt=4"]).responses_per_prompt == 4
    assert load(PpoConfig, [*PPO, "actor.update_per_rollout=256"]).actor.update_per_rollout == 256


def test_greedy_training_is_refused_where_responses_to_a_prompt_must_differ():
    greedy = [*PPO, "rollout.train_sampling_params.temperature=0"]
    for arguments in ([], ["adv.estimator=rloo"], ["adv.norm_var=true"]):
        with pytest.raises(ConfigError, match=r"temperature 0 in training .* all 8 responses to a prompt are the same"):
            load(PpoConfig, [*greedy, *arguments])
    assert load(PpoConfig, [*greedy, "adv.estimator=gae"]).rollout.train_sampling_params.temperature == 0
    with pytest.raises(ConfigError, match="temperature 0 in training"):
        load(PpoConfig, PPO).sampled_by(GenerationHyperparameters(greedy=True), None)


def test_the_options_of_the_collector_are_set_from_the_trainer():
    own = CollectorOptions(consumer_batch_size=32, keep_ended=True, is_filter_bounded=True)
    assert load(PpoConfig, PPO).collector_options() == own
    wanted = {"stale_timeout": 1.0, "request_timeout": 2.0, "request_retries": 0, "max_consecutive_failures": 5}
    settings = [f"rollout.{name}={value}" for name, value in wanted.items()]
    assert load(PpoConfig, [*PPO, *settings]).collector_options() == own.model_copy(update=wanted)


UNBOUNDED = {("GenerateConfig", "seed"): "a request takes every integer as its seed"}
"""class and name of a number -> the reason why it has no bound"""


def parts_of(hint: Any) -> list[Any]:
    """Return a type, its arguments and the limits in its annotations, at any depth."""
    return [hint, *(part for each in get_args(hint) for part in parts_of(each))]


def numbers_without_a_bound(options: type[Options]) -> set[tuple[str, str]]:
    """Return the class and the name of each number without a bound, in a class of options and in its groups."""
    found = set()
    for name, option in options.model_fields.items():
        parts = [*parts_of(option.annotation), *option.metadata]
        is_number = not {list, dict} & set(map(get_origin, parts)) and bool({int, float} & {*filter(is_type, parts)})
        if is_number and not any(isinstance(part, (Ge, Gt, Le, Lt, AllowInfNan)) for part in parts):
            found.add((options.__name__, name))
        for group in filter(is_type, parts):
            found |= numbers_without_a_bound(group) if issubclass(group, Options) else set()
    return found


def is_type(part: Any) -> bool:
    return isinstance(part, type) and get_origin(part) is None


@pytest.mark.parametrize("command", COMMANDS)
def test_every_number_among_the_options_has_a_bound(command: str):
    assert numbers_without_a_bound(COMMANDS[command].find_options()) <= UNBOUNDED.keys()


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        (PlanConfig, ["model_name=a", "num_devices=0", "ddp_size=-1", "tp_size=0", "sp_size=0"]),
        (PlanConfig, ["model_name=a", "num_devices=-2", "rollout.max_model_len=1", "device_memory_gib=0"]),
        (PpoConfig, ["actor.model_name=a", "num_devices=0", "rollout.num_devices=0", "rollout.max_model_len=0"]),
        (PpoConfig, ["actor.model_name=a", "actor.temperature=0", "actor.entropy_coef=nan", "trainer.seed=-1"]),
        (PpoConfig, ["actor.model_name=a", "actor.max_inference_length_per_device=0", "critic.sp_size=0"]),
        (PpoConfig, ["actor.model_name=a", "test_data.sampling.top_p=2", "test_data.sampling.temperature=-1"]),
        (GenerateConfig, ["model=a", "prompt=b", "top_k=-2", "max_new_tokens=0", "temperature=inf"]),
        (EvalConfig, ["model=a", "top_p=0", "seed=-1"]),
    ],
)
def test_all_numbers_out_of_bounds_are_reported_at_once(options, arguments):
    with pytest.raises(ConfigError) as caught:
        load(options, arguments)
    wrong = [argument.split("=")[0] for argument in arguments if "=a" not in argument and "=b" not in argument]
    assert sorted(line.split("=")[0] for line in str(caught.value).splitlines()) == sorted(wrong)


def test_every_rule_of_a_run_that_does_not_hold_is_reported_at_once():
    wrong = ["actor.power=2", "actor.lr_end=1", "adv.gamma=2", "trainer.trace_steps=[3]", "kl.loss_estimator=k1"]
    with pytest.raises(ConfigError) as caught:
        load(PpoConfig, [*PPO, *wrong, "rollout.train_sampling_params.top_p=0"])
    assert [line.split("=")[0] for line in str(caught.value).splitlines()] == [
        "actor.power",
        "actor.lr_end",
        "kl.loss_estimator",
        "adv.gamma",
        "rollout.train_sampling_params.top_p",
        "trainer.trace_steps",
    ]


def test_a_run_has_the_folder_of_its_trainer_when_other_options_of_the_run_are_given():
    assert load(SftConfig, [*SFT, "trainer.save_freq=3"]).trainer.save_dir == "runs/sft"
    assert load(DpoConfig, [*SFT, "trainer={keep: 3}"]).trainer.save_dir == "runs/dpo"
    assert load(PpoConfig, [*PPO, "trainer.save_freq=3"]).trainer.save_dir == "runs/ppo"


def test_parameter_groups_are_named_on_the_command_line_and_are_not_the_critics():
    norms = ["actor.parameter_groups.norms.pattern=norm|bias", "actor.parameter_groups.norms.weight_decay=0"]
    config = load(PpoConfig, [*PPO, *norms, "actor.optimizer=muon"])
    options = config.actor.optimizer_options(10)
    assert options.name == "muon"
    assert to_container(options.parameter_groups) == {
        "norms": {"pattern": "norm|bias", "lr_factor": 1.0, "weight_decay": 0, "freeze": False}
    }
    critic = config.critic.as_model(config.actor).optimizer_options(10)
    assert (critic.name, critic.parameter_groups) == ("muon", {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pattern=("], r"actor\.parameter_groups\.own\.pattern=\(: no regular expression: missing \)"),
        (["freeze=true"], r"required and not set: actor\.parameter_groups\.own\.pattern"),
        (["pattern=a", "freeze=true", "lr_factor=2"], r"actor\.parameter_groups\.own\.freeze=true: lr_factor and"),
        (["pattern=a", "lr_fctor=2"], r"'actor\.parameter_groups\.own\.lr_fctor'; did you mean '.*own\.lr_factor'"),
        (["pattern=a", "weight_decay=-1"], r"actor\.parameter_groups\.own\.weight_decay=-1\.0: expected .* at least 0"),
    ],
)
def test_wrong_parameter_groups_are_refused_by_their_whole_key(arguments, message):
    with pytest.raises((ConfigError, UnknownOptionError), match=message):
        load(SftConfig, [*SFT, *(f"actor.parameter_groups.own.{argument}" for argument in arguments)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["adv.estimator=remax"], "adv.estimator=remax needs a greedy response to each prompt"),
        (["adv.estimator=reinforce_p"], "adv.estimator=reinforce_p: unknown estimator; did you mean 'reinforce_pp'"),
        (
            ["adv.estimator=reinforce_pp", "adv.norm_var=true"],
            "adv.estimator=reinforce_pp: it has no adv.norm_var=true; leave it out",
        ),
        (["adv.estimator=reinforce_pp_baseline", "adv.gamma=0.9"], "adv.estimator=reinforce_pp_baseline discounts"),
        (["adv.estimator=gdpo", "adv.gamma=0.9"], "adv.gamma=0.9: adv.estimator=gdpo discounts nothing"),
        (["adv.estimator=gdpo", "reward.path=a:f"], "give reward.NAME.path of each"),
        (["adv.estimator=gdpo", "kl.type=reward"], "kl.type=reward: adv.estimator=gdpo has no single reward"),
        (
            ["adv.estimator=gdpo", "adv.options.weights=[1, 2]", "reward.f.path=a:f", "reward.g.path=a:g"],
            "adv.options.weights: the weights of rewards are reward.NAME.weight",
        ),
    ],
)
def test_estimators_are_given_what_they_compute_with(arguments, message):
    with pytest.raises(ConfigError, match=message):
        load(PpoConfig, [*PPO, *arguments])


@pytest.mark.parametrize(
    ("options", "key", "known"),
    [
        (PpoConfig, "actor.policy_loss.name", algorithms.POLICY_LOSSES),
        (PpoConfig, "adv.estimator", algorithms.ADVANTAGES.keys() - {"remax"}),
        (DpoConfig, "actor.preference_loss.name", algorithms.PREFERENCE_LOSSES),
    ],
)
def test_help_names_every_choice(options, key, known):
    assert set(known) <= set(re.findall(r"\w+", describe(options, key)))


@pytest.mark.parametrize("limit", [".inf", ".nan", "1.0e+300", "0"])
def test_a_record_has_a_limit_that_can_be_counted_in_bytes(limit):
    with pytest.raises(ConfigError, match=r"trainer\.record_limit"):
        load(PpoConfig, [*PPO, f"trainer.record_limit={limit}"])


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("runs/ppo", "ppo"),
        ("runs/math/ppo", "math-ppo"),
        ("/data/runs/a", "a"),
        ("/a", "a"),
        ("x/y/z", "y-z"),
        ("/", "run"),
    ],
)
def test_a_run_is_named_in_sinks_by_its_folder(folder: str, name: str) -> None:
    assert load(SftConfig, [*SFT, f"trainer.save_dir={folder}"]).trainer.run_name == name
    assert (
        load(SftConfig, [*SFT, f"trainer.save_dir={folder}", "trainer.experiment_name=own"]).trainer.run_name == "own"
    )
