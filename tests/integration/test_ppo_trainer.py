"""The PPO trainer on one device: it learns, it logs what it promises, it resumes, and it says no in time."""

import json
import re
import statistics
import sys
from dataclasses import replace

import pytest
from transformers import AutoModelForCausalLM

import rlite
from rlite import cli
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.config import load
from rlite.data.packs import with_keys
from rlite.errors import CheckpointError, ConfigError, DataError, RliteError
from rlite.observability import stats_tracker, trace
from rlite.rollout import RewardFunction, SingleTurnWorkflow
from rlite.trainer.options import EvaluationSamplingOptions, SamplingOptions, TrainerOptions
from rlite.trainer.ppo import PpoTrainer
from rlite.trainer.rl.options import ActorOptions, PpoConfig, PromptOptions, RolloutOptions
from tests.integration.rewards import digits
from tests.recorded import recorded
from tests.tiny import build_model_dir
from tests.trace_format import read_trace, rows_of

ROWS = [{"messages": [{"role": "user", "content": f"{a}+{b}="}]} for a in range(6) for b in range(6)]


@pytest.fixture
def model(tmp_path):
    return str(build_model_dir(tmp_path / "model", "qwen3", hidden=64))


@pytest.fixture
def session():
    yield rlite.init(num_devices=1)
    rlite.shutdown()


def trainer(model, save_dir, total_steps, rows=ROWS, test_rows=(), kind=PpoTrainer, **changes):
    sampling = SamplingOptions(max_new_tokens=8, temperature=changes.pop("temperature", 1.0))
    rollout = changes.pop("rollout", {})
    options = PpoConfig(
        actor=ActorOptions(model_name=model, lr=3e-3, **changes.pop("actor", {})),
        train_data=PromptOptions(prompts_per_rollout=8, responses_per_prompt=8),
        rollout=RolloutOptions(train_sampling_params=sampling, max_model_len=64, max_num_seqs=64, **rollout),
        trainer=TrainerOptions(
            save_dir=str(save_dir), total_steps=total_steps, save_freq=4, **{"test_freq": 4, **changes}
        ),
    )
    workflow = SingleTurnWorkflow(digits, sampling.gconfig(), byte_tokenizer())
    return kind(options, workflow, rows, test_rows)


def logged(save_dir):
    return [json.loads(line) for line in (save_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_learns_and_leaves_metrics_rollouts_config_and_a_model(model, tmp_path, session):
    out = tmp_path / "run"
    stats_tracker.scalar(reward=1e6)  # what a run has left that was stopped in a step
    trainer(model, out, total_steps=12, test_rows=ROWS[:8]).fit()
    rows = logged(out)
    assert [row["step"] for row in rows] == list(range(13))
    assert rows[-1]["reward"] > rows[1]["reward"] + 0.2
    assert "accuracy" in rows[0]
    assert "accuracy" in rows[-1]
    assert all(row["logprob_drift"] < 1e-4 for row in rows[1:])
    assert {"loss", "entropy", "grad_norm", "response_length", "truncated", "sync_bytes", "memory_gib"} <= set(rows[-1])
    rollouts = recorded(out)
    trained = [row["step"] for row in rollouts if row["status"] == "trained"]
    assert trained == [step for step in range(1, 13) for _ in range(64)]
    means = [statistics.mean(row["reward"] for row in rollouts if row["step"] == step) for step in range(1, 13)]
    assert means == pytest.approx([row["reward"] for row in rows[1:]])
    assert [row["status"] for row in recorded(out, "eval.test")] == ["evaluated"] * 4 * 8
    assert (out / "config.yaml").exists()
    served, info = AutoModelForCausalLM.from_pretrained(out / "latest", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert type(served).__name__ == "Qwen3ForCausalLM"


def test_log_probabilities_of_a_deterministic_run_never_drift(model, tmp_path, session):
    changes = {"actor": {"deterministic": True}, "rollout": {"deterministic": True, "dtype": "float32"}}
    trainer(model, tmp_path, total_steps=3, temperature=0.7, **changes).fit()
    assert [row["logprob_drift"] for row in logged(tmp_path)] == [0.0, 0.0, 0.0]


def test_a_deterministic_actor_needs_rollouts_with_its_bits(model, tmp_path):
    with pytest.raises(
        ConfigError, match=r"actor\.deterministic=true .* needs rollout\.deterministic=true rollout\.dtype"
    ):
        trainer(model, tmp_path, 1, actor={"deterministic": True}, rollout={"deterministic": True})


@pytest.mark.nightly
def test_a_new_run_over_an_old_one_keeps_no_line_and_no_checkpoint_of_it(model, tmp_path, session):
    for seed, total_steps in ((1, 2), (2, 1)):
        trainer(model, tmp_path, total_steps, test_rows=ROWS[:2], seed=seed, overwrite=True).fit()
        rlite.shutdown()
        rlite.init(num_devices=1)
    assert [row["step"] for row in logged(tmp_path)] == [0, 1]
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["step-1"]


def test_the_same_run_goes_on_by_itself_and_another_one_is_refused_before_it_starts(model, tmp_path, session):
    trainer(model, tmp_path, total_steps=2).fit()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(
        ConfigError, match=r"another run \(actor\.clip: 0\.2 there, 0\.3 here\).*trainer\.overwrite=true"
    ):
        trainer(model, tmp_path, total_steps=2, actor={"clip": 0.3})
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    rlite.shutdown()
    rlite.init(num_devices=1)
    trainer(model, tmp_path, total_steps=3).fit()
    assert [row["step"] for row in logged(tmp_path)] == [1, 2, 3]


def test_a_prompt_that_leaves_no_room_for_an_answer_is_named_before_anything_is_built(model, tmp_path):
    rows = [*ROWS[:2], {"prompt": "x" * 100}]
    with pytest.raises(
        DataError, match=r"train_data, row index 2: its prompt has 100 tokens, .* in 64 .*max_model_len"
    ):
        trainer(model, tmp_path, total_steps=1, rows=rows)


def test_the_context_is_as_long_as_prompts_and_answers_need_and_the_plan_says_so(tmp_path, session, capsys):
    model = build_model_dir(tmp_path / "model", "qwen3", hidden=32, max_position_embeddings=16384)
    sampling = SamplingOptions(max_new_tokens=5000)
    options = PpoConfig(
        actor=ActorOptions(model_name=str(model)),
        train_data=PromptOptions(prompts_per_rollout=1),
        rollout=RolloutOptions(train_sampling_params=sampling, max_num_seqs=2),
        trainer=TrainerOptions(save_dir=str(tmp_path / "run"), total_steps=1),
    )
    made = PpoTrainer(options, SingleTurnWorkflow(digits, sampling.gconfig(), byte_tokenizer()), [{"prompt": "2+3="}])
    made.start()
    assert made.engines.rollout.options.max_model_len == 5004
    assert re.search(r"context +at most 5004 tokens; prompts of at most 4\n", capsys.readouterr().out)
    made.run.close()


@pytest.mark.nightly
def test_a_stopped_run_goes_on_from_its_newest_checkpoint(model, tmp_path, session):
    out = tmp_path / "run"
    first = trainer(model, out, total_steps=6)
    first.start()
    for _ in range(5):  # killed after step 5, one step past the checkpoint
        batch = first.with_advantages(first.rollouts.next_batch())
        first.update(batch)
        first.sync()
        first.finish_step(batch)
        if first.run.step == 4:
            position = first.prompts.order.position
    first.run.close()
    rlite.shutdown()
    rlite.init(num_devices=1)
    second = trainer(model, out, total_steps=8, load_ckpt_from="latest")
    second.start()
    assert second.run.step == 4
    assert second.prompts.order.position == position >= 32
    assert second.engines.rollout.get_version() == 4
    assert [row["step"] for row in logged(out)] == [1, 2, 3, 4]
    rlite.shutdown()
    rlite.init(num_devices=1)
    trainer(model, out, total_steps=8, load_ckpt_from="latest").fit()
    assert [row["step"] for row in logged(out)] == list(range(1, 9))
    assert [row["step"] for row in recorded(out)] == [step for step in range(1, 9) for _ in range(64)]
    assert sorted(path.name for path in (out / "state").iterdir()) == ["step-4", "step-8"]


def test_several_updates_on_one_batch_use_the_old_policy(model, tmp_path, session):
    out = tmp_path / "run"
    trainer(model, out, total_steps=2, actor={"update_per_rollout": 4}).fit()
    last = logged(out)[-1]
    assert last["ratio"] == pytest.approx(1.0, abs=0.2)
    assert last["approx_kl"] != 0


class LastHalfMasked(PpoTrainer):
    """The last update of two has no trained token."""

    def update(self, batch):
        mask = batch["loss_mask"].clone()
        mask[len(batch) // 2 :] = 0
        return super().update(with_keys(batch, loss_mask=mask))


def test_update_without_trained_tokens_keeps_the_record_of_others(model, tmp_path, session):
    actor = {"update_per_rollout": 2}
    trainer(model, tmp_path, total_steps=1, kind=LastHalfMasked, actor=actor, record="all").fit()
    sequences = recorded(tmp_path, kind="tokens")
    assert [sequence["entropy"] is None for sequence in sequences] == [False] * 32 + [True] * 32
    assert all(sum(sequence["entropy"]) > 0 for sequence in sequences[:32])
    assert [row["status"] for row in recorded(tmp_path)] == ["trained"] * 32 + ["skipped"] * 32


def test_the_old_policy_of_several_updates_has_the_temperature_of_sampling(model, tmp_path, session):
    actor = {"update_per_rollout": 2, "scheduler": "linear", "warmup_ratio": 1.0}
    trainer(model, tmp_path / "run", total_steps=1, temperature=0.5, actor=actor).fit()
    row = logged(tmp_path / "run")[0]
    assert row["logprob_drift"] < 1e-3, "the engine's log-probabilities are those of the old policy"
    assert row["ratio"] == pytest.approx(1.0, abs=0.1)


def of_workflow(model, folder, gconfig, test_gconfig=None, test_rows=(), **rollout):
    """A trainer whose workflow brings its own sampling parameters."""
    options = PpoConfig(
        actor=ActorOptions(model_name=model, avg_level="constant"),
        train_data=PromptOptions(prompts_per_rollout=4, responses_per_prompt=4),
        rollout=RolloutOptions(max_model_len=64, max_num_seqs=64, **rollout),
        trainer=TrainerOptions(save_dir=str(folder), total_steps=1),
    )
    tests = None if test_gconfig is None else SingleTurnWorkflow(digits, test_gconfig, byte_tokenizer())
    return PpoTrainer(options, SingleTurnWorkflow(digits, gconfig, byte_tokenizer()), ROWS, test_rows, tests)


def test_the_loss_and_the_evaluation_go_by_how_the_workflow_samples(model, tmp_path, session):
    learner = of_workflow(model, tmp_path, {"temperature": 0.6, "max_tokens": 6, "min_tokens": 2}, test_rows=ROWS[:4])
    assert (learner.loss.temperature, learner.loss.max_new_tokens) == (0.6, 6)
    test = learner.evaluations.sets[""].workflow.gconfig
    assert (test.greedy, test.max_new_tokens, test.min_new_tokens) == (True, 6, 2)
    assert learner.workflow.gconfig.temperature == 0.6
    learner.fit()
    row = logged(tmp_path)[-1]
    assert row["logprob_drift"] < 1e-3, "the engine's log-probabilities are those of the loss"
    assert learner.evaluate() == (again := learner.evaluate()), "greedy"
    assert again["accuracy"] == row["accuracy"]
    assert load(PpoConfig, ["--config", str(tmp_path / "config.yaml")]).temperature == 0.6


def test_an_option_that_contradicts_the_workflow_is_refused(model, tmp_path):
    sampling, six = SamplingOptions(temperature=0.8), {"temperature": 0.6, "max_tokens": 6}
    with pytest.raises(
        ConfigError, match=r"train_sampling_params\.temperature=0\.8, and the workflow .*temperature=0\.6"
    ):
        of_workflow(model, tmp_path, six, train_sampling_params=sampling)
    wanted = EvaluationSamplingOptions(temperature=0.3)
    with pytest.raises(
        ConfigError, match=r"test_sampling_params\.temperature=0\.3, and the workflow .*temperature=0\.9"
    ):
        of_workflow(model, tmp_path, six, {"temperature": 0.9}, test_sampling_params=wanted)
    same = SamplingOptions(temperature=0.6)
    asked = of_workflow(
        model, tmp_path, six, test_rows=ROWS[:1], train_sampling_params=same, test_sampling_params=wanted
    )
    assert asked.evaluations.sets[""].workflow.gconfig.temperature == 0.3
    own = of_workflow(model, tmp_path, six, {"temperature": 0.9}, test_rows=ROWS[:1])
    assert own.evaluations.sets[""].workflow.gconfig.temperature == 0.9


@pytest.mark.nightly
def test_engines_that_take_turns_on_the_device_save_and_go_on(model, tmp_path, session):
    out = tmp_path / "run"
    trainer(model, out, total_steps=5, actor={"offload_model": True}).fit()
    assert [row["step"] for row in logged(out)] == [1, 2, 3, 4, 5]
    assert sorted(path.name for path in (out / "state").iterdir()) == ["step-4", "step-5"]
    assert all(row["logprob_drift"] < 1e-3 for row in logged(out))


def test_rows_without_a_prompt_are_refused_before_anything_starts(model, tmp_path, session):
    with pytest.raises(DataError, match="train_data, row index 1"):
        trainer(model, tmp_path, total_steps=1, rows=[ROWS[0], {"question": "?"}])


def test_a_missing_checkpoint_is_refused_before_anything_starts(model, tmp_path, session):
    with pytest.raises(CheckpointError, match="no such folder"):
        trainer(model, tmp_path, total_steps=1, load_ckpt_from=str(tmp_path / "nowhere"))


def test_the_best_of_a_metric_that_no_evaluation_has_is_refused_before_anything_starts(model, tmp_path):
    with pytest.raises(ConfigError, match=r"best_metric=acuracy: expected a metric of the evaluation, accuracy"):
        trainer(model, tmp_path, total_steps=1, test_rows=ROWS[:2], best_metric="acuracy")


class GradedTrainer(PpoTrainer):
    evaluated = ("accuracy", "grade")

    def evaluate(self):
        grades = {2: float("nan"), 3: 2.0, 4: 1.0}
        return {**super().evaluate(), **({"grade": grades[self.run.step]} if self.run.step in grades else {})}


@pytest.mark.nightly
def test_an_evaluation_without_the_metric_of_the_best_costs_one_warning_and_not_the_run(
    model, tmp_path, session, caplog
):
    changes = {"best_metric": "grade", "test_freq": 1, "actor": {"offload_model": True}}
    learner = trainer(model, tmp_path, total_steps=4, test_rows=ROWS[:2], kind=GradedTrainer, **changes)
    learner.fit()
    (warning,) = [record.getMessage() for record in caplog.records if "best_metric" in record.getMessage()]
    assert "the evaluation at step 1 has no such metric (accuracy, accuracy_finished, num_errors, pass@1, " in warning
    assert (tmp_path / "best").is_dir()
    assert learner.run.best.value == 2.0, "the highest, of what is no loss, and a number"


def test_the_logged_reward_is_that_of_all_answers_and_not_of_those_trained_on(model, tmp_path, session):
    given = []

    def grade(prompt, completions, prompt_ids, completion_ids, is_easy):
        given.append(1.0 if is_easy else digits(prompt, completions, prompt_ids, completion_ids) / 2)
        return given[-1]

    def graded(options, workflow, *rows):
        reward = RewardFunction(grade, in_process=True)
        return PpoTrainer(options, SingleTurnWorkflow(reward, workflow.gconfig, byte_tokenizer()), *rows)

    rows = [{"prompt": f"{number}+", "is_easy": number % 2 == 0} for number in range(64)]
    trainer(model, tmp_path, total_steps=1, rows=rows, kind=graded).fit()
    (step,) = logged(tmp_path)
    assert step["reward"] == pytest.approx(sum(given) / len(given))
    assert step["reward"] > 0.4 > step["reward_trained"], "groups of equal rewards were generated and replaced"


def test_an_evaluation_whose_grader_fails_is_wrong_and_chooses_no_best_model(model, tmp_path, session, capsys):
    learner = trainer(model, tmp_path, total_steps=2, test_rows=ROWS[:8], best_metric="accuracy", test_freq=1)
    broken = []

    def grade(prompt, completions, prompt_ids, completion_ids, **row):
        if broken and (learner.run.step == 2 or "1+" in prompt):
            raise OSError("the judge is down")
        return 1.0

    judged = SingleTurnWorkflow(RewardFunction(grade, in_process=True), learner.workflow.gconfig, byte_tokenizer())
    learner.evaluations.sets = {"": replace(learner.evaluations.sets[""], workflow=judged)}
    learner.start()
    broken.append(True)
    for _ in range(2):
        learner.finish_step(learner.with_advantages(learner.rollouts.next_batch()))
    learner.run.close()
    before, some, none = logged(tmp_path)
    assert (before["accuracy"], before["num_errors"]) == (1.0, 0)
    assert (some["accuracy"], some["num_errors"], some["accuracy_finished"]) == (0.75, 2, 1.0)
    assert (none["accuracy"], none["num_errors"], none["errors/RewardRaised"]) == (0.0, 8, 8)
    assert "accuracy_finished" not in none
    assert not (tmp_path / "best").exists()
    assert capsys.readouterr().out.count("the evaluation is invalid") == 1


def test_a_trainer_without_a_session_says_what_to_call(model, tmp_path):
    with pytest.raises(RliteError, match=r"rlite\.init"):
        trainer(model, tmp_path, total_steps=1).fit()


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("actor.modle_name=x", "did you mean 'actor.model_name'"),
        ("train_data.path=missing.json", "missing.json"),
        ("trainer.total_steps=abc", "trainer.total_steps"),
        ("rollout.env_path=missing.py", "missing.py"),
        ("rollout.env_memory_limit_gib=0.001", "memory_limit_gib=0.001"),
        ("rollout.executor=vlm", "unknown inference executor 'vlm'"),
    ],
)
def test_the_command_line_names_what_is_wrong(model, tmp_path, monkeypatch, argument, expected):
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    (tmp_path / "env.py").write_text("async def step(state, action, extra_info): return {}\n")
    settings = [f"actor.model_name={model}", f"train_data.path={tmp_path}/rows.json"]
    settings += [f"rollout.env_path={tmp_path}/env.py", argument]
    monkeypatch.setattr(sys, "argv", ["rlite", "ppo", *settings])
    with pytest.raises(SystemExit) as error:
        cli.main()
    rlite.shutdown()
    assert expected in str(error.value)


def test_a_trace_shows_each_phase_each_worker_and_each_group(model, tmp_path, session):
    trainer(model, tmp_path / "run", total_steps=3, trace=True, trace_steps=[2, 3]).fit()
    assert not trace.is_on()
    events = read_trace(tmp_path / "run" / "trace.json")
    rows = {row: [span["name"] for span in spans] for row, spans in rows_of(events).items()}
    program, actor, served = (
        next(names for (process, row), names in rows.items() if process.startswith(of) and row.startswith(at))
        for of, at in (("driver", "the program"), ("actor", "rank 0"), ("rollout", "rank 0"))
    )
    phases = [name for name in program if name in ("step", "rollout", "update", "sync")]
    assert phases == ["step", "rollout", "update", "sync"] * 2, "of steps 2 and 3"
    assert {"wait for rollouts", "weight sync"} <= set(program)
    assert {"describe weights", "train_batch"} <= set(actor)
    assert {"advance", "read weights", "weights_changed"} <= set(served)
    groups = {event["id"] for event in events if event.get("cat") == "group"}
    assert len(groups) >= 2 * 8
    reasons = [e["args"]["reason"] for e in events if e["ph"] == "e" and e["name"].startswith("group ")]
    assert reasons == ["consumed"] * len(groups)
    for task in ("generate", "reward function"):
        assert sum(e["ph"] == "b" and e["name"] == task for e in events) == 8 * len(groups)


def test_steps_to_trace_are_a_first_and_a_last_one():
    with pytest.raises(ConfigError, match=r"trace_steps=\[3\]: expected two numbers"):
        TrainerOptions(trace_steps=[3])
