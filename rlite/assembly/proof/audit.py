"""The audit of a run: `rlite audit RUN` computes again what follows from its record and checkpoints, and compares.

    rlite audit runs/grpo                        hashes, fates of rollouts, advantages, losses, metrics, weights
    rlite audit runs/grpo --code my.py           also the rewards, by the functions of this file
    rlite audit runs/grpo replay=none            only what needs no forward pass

It needs no GPU and none of the processes that made the run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rlite import config, files
from rlite.algorithms import Mean, TokenLogprobs, is_selective, next_token
from rlite.assembly.proof.bundle import open_source
from rlite.assembly.proof.chained import device_facts, versions
from rlite.assembly.proof.comparison import Comparison, compare, compare_numbers
from rlite.assembly.proof.findings import Findings
from rlite.assembly.proof.options import AuditConfig, ReplayConfig
from rlite.assembly.proof.replay import Replay, replay, replaying
from rlite.assembly.proof.rewards import RewardChecks
from rlite.assembly.proof.rollouts import IN_BATCH, RolloutChecks, SequenceChecks, place_of
from rlite.assembly.proof.source import Source, columns_of
from rlite.assembly.proof.trainers import RecordedWorkflow
from rlite.assembly.rl import PartsMaker
from rlite.batch import NAMED_REWARD
from rlite.data.packs import lazy_pack, with_keys
from rlite.errors import CheckpointError, ConfigError, DataError, RliteError, writing
from rlite.evaluation.metrics import Sample, summary
from rlite.nn.pretrained import load_tokenizer
from rlite.runtime.storage.atomic import verify
from rlite.services.console.terminal import ConsoleReporter
from rlite.services.record.batches import DamagedBatch, RecordedBatch, read_batch
from rlite.services.record.chain import Folded, hash_file, metrics_prefix
from rlite.services.record.files import TRAIN, read_gaps
from rlite.services.record.reader import RecordReader
from rlite.services.record.recorder import TokenTexts
from rlite.trainer.held_out import prefixed
from rlite.trainer.rl.rollouts import SAID_ONCE, Generated, trajectory_rewards
from rlite.trainer.run.checkpoints import steps_of

RESULT = "audit.json"
"""file in the run's folder that the viewer shows"""
HASHES, ADVANTAGES, LOSSES, METRICS = "hashes", "advantages", "losses and their metrics", "metrics of rollouts"
EVALUATIONS, REPLAYED, FILES = "metrics of evaluations", "steps made again", "files of the record"


def main(argv: Sequence[str]) -> None:
    """Audit a run, show the result, and write it to `audit.json`.

    Raises:
        ConfigError: there is no folder of a run.
        DataError: something contradicts what the rest implies.
    """
    options = config.load(AuditConfig, AuditConfig.arguments(list(argv)))
    if not Path(options.run).expanduser().is_dir():
        raise ConfigError(f"{options.run}: an audit needs the folder of the run; `rlite replay` opens a bundle")
    findings = audit(options)
    console = ConsoleReporter()
    console.report("checked", {name: f"{count:,}" for name, count in findings.checked.items()})
    if findings.notes:
        console.warn("not checked", [("", note) for note in findings.notes])
    if findings.found:
        console.alarm(f"{len(findings.found)} contradictions", list(findings.lines(options.max_problems)))
    content = json.dumps(findings.as_json(), indent=2).encode()
    for path in {Path(options.run).expanduser() / RESULT, *([Path(options.result)] if options.result else [])}:
        with writing(path):
            files.replace(path, content)
    if findings.found:
        place, problem = findings.found[0]
        raise DataError(f"{options.run}: {len(findings.found)} contradictions, the first one at {place}: {problem}")


def audit(options: AuditConfig) -> Findings:
    """Return what an audit of a run finds.

    Raises:
        ConfigError: the folder holds no run.
    """
    findings = Findings()
    with open_source(ReplayConfig(run=options.run, code=options.code, any_versions=True)) as source:
        chain = source.chain
        check_chain(source, chain, findings)
        if source.run.is_rl:
            RlAudit(source, findings, options).check(has_ended=chain is not None and chain.last.get("kind") == "end")
        check_evaluations(source, findings, texts_of(source, findings), has_chain=chain is not None)
        if options.replay == "checkpoints":
            check_replay(source, findings, options, is_exact=source.is_one_device and is_same_machine(chain))
        else:
            findings.note("no step was made again (replay=none): weights and gradient norms are not checked")
    return findings


def check_chain(source: Source, chain: Folded | None, findings: Findings) -> None:
    """Check the files of a run against its chain of hashes, and its checkpoints against their manifests.

    Args:
        source: the run.
        chain: content of its chain; None if it has none.
        findings: takes contradictions.
    """
    folder, expect = source.folder, findings.expect
    for path in sorted((folder / "state").glob("step-*")):
        try:
            verify(path)
            findings.checked[HASHES] += 1
        except CheckpointError as error:
            expect(False, HASHES, f"state/{path.name}", str(error))
    if chain is None:
        findings.note("the run has no chain.jsonl: an earlier version of rlite made it, or the chain was removed")
        return
    for text in chain.breaks:
        expect(False, HASHES, "chain.jsonl", text)
    places = {
        "record": lambda name: folder / "record" / name,
        "checkpoints": lambda name: folder / "state" / name / "manifest.json",
        "models": lambda name: folder / name,
    }
    for part, entries in chain.entries.items():
        for name, value in entries.items():
            path = places[part](name)
            if "\0" in name or not files.is_inside(path, folder):
                expect(False, HASHES, "chain.jsonl", f"it names {name!r}, {files.LEADS_OUT}")
                continue
            found = hash_file(path)
            told = "it was removed" if found is None else "its hash is not that of the chain: it was changed"
            expect(found == value, HASHES, str(path.relative_to(folder)), told)
    there = {path.name for path in (folder / "record").glob("*.parquet")}
    for name in sorted(there - chain.entries["record"].keys()):
        expect(
            chain.last.get("kind") != "end", HASHES, f"record/{name}", "the chain does not know this file: it was added"
        )
    wanted = hash_file(folder / "config.yaml")
    expect(wanted == chain.last_config, HASHES, "config.yaml", "its hash is not that of the chain: it was changed")
    if chain.metrics:
        size = (files.stamp(folder / "metrics.jsonl") or (0, 0))[1]
        known = chain.metrics.get("bytes")
        known = known if isinstance(known, int) else 0
        is_same = metrics_prefix(folder, known) == chain.metrics.get("sha256", "")
        expect(is_same, HASHES, "metrics.jsonl", "a line was changed, added or removed: its hash is not the chain's")
        is_longer = chain.last.get("kind") == "end" and size > known
        expect(not is_longer, HASHES, "metrics.jsonl", "lines were added after the end of the run")
    for kind in ("code", "data"):
        for name, value in chain.first.get(kind, {}).items():
            now = hash_file(Path(name.rpartition(":")[0] if ".py:" in name else name).expanduser())
            if now != value:
                findings.note(f"{kind} {name}: {'not there' if now is None else 'changed'} since the run began")


class RlAudit:
    """The checks of a run that learns from rollouts.

    Args:
        source: the run.
        findings: takes contradictions.
        options: options of the command.
    """

    def __init__(self, source: Source, findings: Findings, options: AuditConfig) -> None:
        self._source, self._findings = source, findings
        self._rewards = None if options.code is None else RewardChecks(source, options.code, findings)
        self._own = source.run.options(source.folder, options.code, False)
        self._maker = PartsMaker(self._own)
        self._reader = RecordReader(source.folder)
        self._reader.refresh()

    @property
    def _is_in_turns(self) -> bool:
        """True if each step was generated while nothing was trained, so that all its rollouts have rows in it."""
        return not self._source.run.saved["rollout"].get("max_head_offpolicyness")

    def check(self, has_ended: bool) -> None:
        """Check all recorded steps.

        Args:
            has_ended: the run has ended by itself; one that was killed has logged steps that are not recorded.
        """
        if TRAIN not in self._reader.sources:
            self._findings.note("the run kept no record of its rollouts: trainer.record=sample or all would have")
            return
        for gap in read_gaps(self._source.folder):
            self._findings.note(f"record: {gap}")
        checks, sequences = self._checks()
        steps = sorted(set(self._reader.table(TRAIN)["step"].to_pylist()))
        logged = sorted(step for step in self._source.logged_steps if step > 0)
        for step in steps:
            rows = self._reader.rollouts(TRAIN, step)
            if logged and step > logged[-1] and not any(row["status"] in IN_BATCH for row in rows):
                continue  # what was under way when the run ended
            with self._findings.checking(FILES, f"record, step {step}"):
                checks.rows(step, rows)
                self._tokens(step, rows, sequences)
                if step > self._source.changed_after:
                    self._step(step, rows)
                else:
                    told = f"the run had other options up to step {self._source.changed_after}"
                    self._findings.note(f"{told}: advantages, losses and metrics of these steps are not computed again")
        missing = [step for step in logged if step not in steps]
        if not read_gaps(self._source.folder):
            for step in missing:
                if has_ended or step <= max(steps_of(self._source.folder / "state"), default=0):
                    self._findings.expect(False, FILES, "record", f"there are no rollouts of step {step}")
                else:
                    self._findings.note(f"step {step} is not recorded: the run was killed, and has not been resumed")
        for name, text in self._reader.problems.items():
            self._findings.expect(False, FILES, f"record/{name}", text)

    def _checks(self) -> tuple[RolloutChecks, SequenceChecks]:
        saved, own = self._source.run.saved, self._own
        weights = {name or "reward": reward.weight for name, reward in own.reward.items()}
        weights = weights if len(weights) > 1 else {}
        texts = texts_of(self._source, self._findings)
        bound = int(saved["rollout"].get("max_head_offpolicyness") or 0)
        return RolloutChecks(self._findings, own, weights, bound), SequenceChecks(self._findings, texts)

    def _tokens(self, step: int, rows: Sequence[Mapping[str, Any]], checks: SequenceChecks) -> None:
        sequences: dict[tuple[int, int], list[dict[str, Any]]] = {}
        others = {self._key(row): row.get("others") for row in self._reader.batch_rows(step)}
        for sequence in self._reader.tokens(TRAIN, step):
            sequence["others"] = others.get(self._key(sequence))
            sequences.setdefault((sequence["group"], sequence["sample"]), []).append(sequence)
        by_place = {(row["group"], row["sample"]): row for row in rows}
        for place, own in sequences.items():
            told = "the record has tokens of a rollout that has no row"
            self._findings.expect(
                place in by_place, "fates of rollouts", f"record, step {step}, group {place[0]}", told
            )
            if place in by_place:
                checks.tokens(by_place[place], own)
        if self._rewards is not None:
            self._rewards.check(sequences, by_place)

    @staticmethod
    def _key(sequence: Mapping[str, Any]) -> tuple[int, int, int]:
        return sequence["group"], sequence["sample"], sequence["sequence"]

    def _step(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Compute the advantages, losses and metrics of a step again from its tokens."""
        line, own = self._source.metrics(step), self._own
        trained = [row for row in rows if row["status"] in IN_BATCH]
        if line is not None and trained:
            mean = torch.tensor([row["reward"] for row in trained if row["reward"] is not None]).double().mean()
            self._metric(step, line, "reward_trained", mean.item())
            if self._is_in_turns or self._source.is_complete(step):
                for name, value in metrics_of_rows(rows).items():
                    self._metric(step, line, name, value)
        try:
            batch = read_batch(self._source.folder, step)
        except DamagedBatch as error:
            self._findings.expect(False, FILES, f"record, step {step}", str(error))
            return
        except DataError as error:
            self._findings.note(f"advantages and losses of some steps are not computed again: {error}")
            return
        if line is not None:
            self._of_rollouts(step, line, batch, rows)
        if own.kl.adaptive_target is not None and own.kl.type in ("reward", "advantage"):
            self._findings.note("kl.adaptive_target: the weight of the KL is not known, so advantages are not computed")
        else:
            self._advantages(step, batch)
        if line is not None:
            self._losses(step, line, batch)

    def _of_rollouts(self, step: int, line: Mapping[str, float], batch: RecordedBatch, rows: Sequence[Any]) -> None:
        self._metric(step, line, "reward_trained", trajectory_rewards(batch.given).mean().item())
        versions = batch.given["versions"]
        oldest = versions.masked_fill(versions < 0, torch.iinfo(torch.int64).max).amin(1)
        if all(row["status"] in IN_BATCH for row in rows):
            age = (step - 1 - oldest.clamp(max=step - 1)).double().mean().item()
            self._metric(step, line, "rollout/staleness", age)

    def _advantages(self, step: int, batch: RecordedBatch) -> None:
        seats = int(batch.given["seat_ids"].max()) + 1 if "seat_ids" in batch.given else 1
        workflow = RecordedWorkflow(self._own.rollout.train_sampling_params.gconfig(), seats)
        known = {key: value for key, value in batch.made.items() if key in _READ_BY_ADVANTAGES}
        again = self._maker.advantages(workflow)(with_keys(batch.given, **known), kl_coef=self._own.kl.coef)
        place = f"record, step {step}"
        found = self._compare("advantages", batch.made["advantages"], again["advantages"])
        self._findings.expect_near(found, ADVANTAGES, place)
        if "returns" in batch.made and "returns" in again:
            found = self._compare("returns", batch.made["returns"], again["returns"])
            self._findings.expect_near(found, ADVANTAGES, place)

    def _compare(self, name: str, kept: Tensor, again: Tensor) -> Comparison:
        again = torch.where(kept.isnan(), kept, again) if kept.shape == again.shape else again
        return compare(f"{name} of tokens", kept, again, [f"row {row}" for row in range(len(kept))])

    def _losses(self, step: int, line: Mapping[str, float], batch: RecordedBatch) -> None:
        """Compute the loss of one update again from recorded log-probabilities."""
        own, made = self._own, batch.made
        logprobs = made.get("trained_logprobs", made["trainer_logprobs"])
        is_known = not made["entropy"].isnan().any() and not logprobs.isnan().any()
        if (
            own.actor.update_per_rollout != 1
            or step <= own.actor.freeze_steps
            or is_selective(self._maker.policy_loss().configured)
            or not is_known
        ):
            self._findings.note(
                "losses of several updates, or of a loss that selects tokens, are compared by replay alone"
            )
            return
        columns = {key: value for key, value in made.items() if key in ("old_logprobs", "ref_logprobs")}
        joined = with_keys(batch.given, advantages=made["advantages"], **columns)
        data = lazy_pack(columns_of(joined), range(len(batch.given)), torch.device("cpu"))
        cu_seqlens = data["cu_seqlens"]
        packed = [next_token(value[batch.given["attention_mask"]], cu_seqlens) for value in (logprobs, made["entropy"])]
        loss = self._maker.policy_loss()
        if loss.kl_coef and ("kept_counts" in batch.given or own.kl.adaptive_target is not None):
            self._findings.note(
                "losses with a KL over more than the kept ids, or with an adaptive weight, are replayed"
            )
            return
        value, metrics = loss(TokenLogprobs(*packed), data)
        found = {"loss": value.item()} | {key: each.item() for key, each in metrics.items() if isinstance(each, Mean)}
        for name, number in found.items():
            self._metric(step, line, name, number, LOSSES)

    def _metric(self, step: int, line: Mapping[str, float], name: str, value: float, check: str = METRICS) -> None:
        if name in line:
            found = compare_numbers(name, line[name], value)
            self._findings.expect_near(found, check, f"metrics.jsonl, step {step}")


def metrics_of_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of the rollouts of a step from their rows; see `rlite.trainer.rl.rollouts.Generated`."""
    made = [row for row in rows if row["reward"] is not None]
    generated = Generated()
    lengths = torch.tensor([row["response_tokens"] for row in made])
    columns: dict[str, Tensor] = {
        "loss_mask": torch.arange(int(lengths.max()) if len(made) else 0) < lengths[:, None],
        "rewards": torch.tensor([row["reward"] for row in made], dtype=torch.float64),
        "group_ids": torch.tensor([row["group"] for row in made]),
    }
    for key, name in {**SAID_ONCE, "truncated": "truncated"}.items():
        if all(row[name] is not None for row in made):
            columns[key] = torch.tensor([float(row[name]) for row in made])
    for name in {name for row in made for name, _ in row["reward_parts"] or ()}:
        values = [dict(row["reward_parts"] or ()).get(name, math.nan) for row in made]
        columns[f"{NAMED_REWARD}{name}"] = torch.tensor(values)
    if not made:
        return {}
    generated.add(TensorDict(columns, batch_size=[len(made)]))
    filtered = {row["group"] for row in rows if row["status"] == "filtered"}
    rewards: dict[int, set[float]] = {}
    for row in made:
        if row["status"] in IN_BATCH:
            rewards.setdefault(row["group"], set()).add(row["reward"])
    num_uniform = sum(len(own) == 1 for own in rewards.values())
    return {**generated.metrics(), "num_filtered": len(filtered), "num_unreplaced": num_uniform}


_READ_BY_ADVANTAGES = ("values", "ref_logprobs", "old_logprobs", "full_old_logprobs")


def texts_of(source: Source, findings: Findings) -> TokenTexts | None:
    """Return what decodes the tokens of a run; None if its tokenizer is not there."""
    try:
        return TokenTexts(load_tokenizer(source.run.saved["actor"]["model_name"]))
    except (RliteError, KeyError, TypeError) as error:
        findings.note(f"texts are not compared with tokens: {error}")
        return None


def check_evaluations(source: Source, findings: Findings, texts: TokenTexts | None, has_chain: bool) -> None:
    """Compute the metrics of evaluations again from their rows, with their standard errors.

    Args:
        source: the run.
        findings: takes contradictions.
        texts: decodes tokens.
        has_chain: this version of rlite, or a later one, has made the run: earlier ones had other standard errors.
    """
    checks = SequenceChecks(findings, texts)
    reader = RecordReader(source.folder)
    reader.refresh()
    for name in reader.sources:
        if name == TRAIN:
            continue
        own = name.removeprefix("eval.")
        for step in sorted(set(reader.table(name)["step"].to_pylist())):
            rows, line = reader.rollouts(name, step), source.evaluated(step)
            with findings.checking(EVALUATIONS, f"record, evaluation {own} after step {step}"):
                for row in rows:
                    checks.tokens(row, reader.tokens(name, step, (row["group"], row["sample"])))
                    is_one = row["version_min"] in (None, step) and row["version_max"] in (None, step)
                    place = f"{own}: {place_of(row)}"
                    findings.expect(is_one, EVALUATIONS, place, f"tokens of other policy versions than {step}")
                samples = [Sample.of_row({**row, "item": str(row["group"])}) for row in rows]
                found = summary(samples, source.samples_of(own))
                for key, value in prefixed("" if own == "test" else own, found).items():
                    if key in line and (has_chain or "standard_error" not in key):
                        place = f"metrics.jsonl, evaluation {own} after step {step}"
                        findings.expect_near(compare_numbers(key, line[key], value), EVALUATIONS, place)
    for name, text in reader.problems.items():
        findings.expect(False, FILES, f"record/{name}", text)


def is_same_machine(chain: Folded | None) -> bool:
    """Return whether a run was made with the same versions and the same kind of processor, so that bits are equal."""
    if chain is None:
        return False
    devices, here = chain.first.get("devices", {}), device_facts()
    return chain.first.get("versions") == versions() and {**devices, **here} == devices


def check_replay(source: Source, findings: Findings, options: AuditConfig, is_exact: bool) -> None:
    """Make the steps between checkpoints again, as far as the record reaches, and compare everything.

    Args:
        source: the run.
        findings: takes contradictions.
        options: options of the command.
        is_exact: every bit has to be equal.
    """
    if not is_exact:
        findings.note("bits are not compared: other devices, versions or processors made the run; numbers are")
    kept = sorted(steps_of(source.folder / "state"))
    if not (logged := [step for step in source.logged_steps if step > 0]):
        findings.note("metrics.jsonl has no step: no step was made again")
        return
    begin, last = min([0, *kept]), max(logged)
    ends = [*kept, *([last] if last not in kept else [])]
    for end in [end for end in ends if end > begin]:
        own = ReplayConfig(run=options.run, code=options.code)
        try:
            with replaying(source, end, own) as (trainer, result):
                replay(source, trainer, end, result, own)
        except CheckpointError as error:
            findings.expect(False, REPLAYED, f"state/step-{end}", str(error))
            continue
        except (DataError, ConfigError) as error:
            findings.note(f"the steps up to {end} are not made again: {error}")
            continue
        _take(result, findings, is_exact)


def _take(result: Replay, findings: Findings, is_exact: bool) -> None:
    for step in result.steps:
        for each in step.comparisons:
            is_metric = each.kept is not None and not each.name.endswith("of tokens")
            place = f"metrics.jsonl, step {step.step}" if is_metric else f"record, step {step.step}"
            if each.name.rpartition(": ")[2] in ("weights", "optimizer state"):
                place = f"state/step-{step.step}"
            findings.expect_near(each, REPLAYED, place, is_exact)
    for note in result.notes:
        findings.note(note)
