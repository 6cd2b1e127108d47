"""The audit of a run: `rlite audit RUN` computes again what follows from its record and checkpoints, and compares.

    rlite audit runs/grpo                        hashes, fates of rollouts, advantages, losses, metrics, weights
    rlite audit runs/grpo --code my.py           also the rewards, by the functions of this file
    rlite audit runs/grpo replay=none            only what needs no forward pass

It needs no GPU and none of the processes that made the run. What the chain of hashes says decides no other check.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rlite import config, files
from rlite.algorithms import Mean, TokenLogprobs, is_selective, next_token
from rlite.assembly.proof.bundle import open_source
from rlite.assembly.proof.chained import device_facts, versions
from rlite.assembly.proof.comparison import compare_rows
from rlite.assembly.proof.options import AuditConfig, ReplayConfig
from rlite.assembly.proof.replay import replay, replaying
from rlite.assembly.proof.report import REPLAYED, Report
from rlite.assembly.proof.rewards import RewardChecks
from rlite.assembly.proof.rollouts import IN_BATCH, LEDGER, RolloutChecks, Row, place_of
from rlite.assembly.proof.source import Source
from rlite.assembly.proof.trainers import RecordedWorkflow, RunOfTrainer, columns_of
from rlite.assembly.rl import PartsMaker
from rlite.batch import NAMED_REWARD
from rlite.data.packs import lazy_pack, with_keys
from rlite.errors import CheckpointError, ConfigError, DataError
from rlite.evaluation.metrics import Sample, summary
from rlite.runtime.storage.atomic import verify
from rlite.services.console.terminal import ConsoleReporter
from rlite.services.record.batches import DAMAGED, DamagedBatch, RecordedBatch
from rlite.services.record.chain import METRICS, Folded, hash_file
from rlite.services.record.files import TRAIN, read_gaps
from rlite.services.record.writer import MAX_PENDING
from rlite.trainer.held_out import prefixed
from rlite.trainer.rl.coefficients import coefficients_at
from rlite.trainer.rl.options import KlOptions, PpoConfig
from rlite.trainer.rl.rollouts import SAID_ONCE, Generated
from rlite.trainer.run.checkpoints import steps_of
from rlite.trainer.run.folder import CHAIN, CONFIG
from rlite.yaml_texts import differences, flat, some_of

RESULT = "audit.json"
"""file in the run's folder that the viewer shows"""
HASHES, ADVANTAGES, LOSSES, OF_ROLLOUTS = "hashes", "advantages", "losses and their metrics", "metrics of rollouts"
EVALUATIONS, FILES = "metrics of evaluations", "files of the record"
CHANGED = "its hash is not that of the chain: it was changed"
READ_BY_ADVANTAGES = ("values", "ref_logprobs", "old_logprobs", "full_old_logprobs")


def main(argv: Sequence[str]) -> None:
    """Audit a run, show the result, and write it to `audit.json`."""
    options = config.load(AuditConfig, AuditConfig.arguments(list(argv)))
    folder = Path(options.run).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"{options.run}: an audit needs the folder of the run; `rlite replay` opens a bundle")
    report, console = audit(options), ConsoleReporter()
    made = {"steps made again": len(report.steps)} if report.steps else {}
    console.report("checked", {name: f"{count:,}" for name, count in {**made, **report.checked}.items()})
    if report.notes:
        console.warn("not checked", [("", note) for note in report.notes])
    if report.found:
        left = len(report.found) - options.max_problems
        more = [("", f"and {left} more")] if left > 0 else []
        console.alarm(f"{len(report.found)} contradictions", [*report.found[: options.max_problems], *more])
    report.write(folder / RESULT, *([Path(options.result).expanduser()] if options.result else []))
    if report.found:
        place, problem = report.found[0]
        raise DataError(f"{options.run}: {len(report.found)} contradictions, the first one at {place}: {problem}")


def audit(options: AuditConfig) -> Report:
    """Return what an audit of a run finds."""
    given = ReplayConfig(run=options.run, code=options.code, variables=options.variables, any_versions=True)
    with open_source(given) as source:
        report = Report(notes=[*source.notes])
        with report.checking(HASHES, CHAIN):
            check_chain(source, report)
        texts = source.texts(lambda why: report.note(f"texts are not compared with tokens: {why}"))
        rollouts = RolloutChecks(report, texts, source.vocabulary)
        if source.run.is_rl:
            RlAudit(source, report, options.code, rollouts).check()
        check_lines(source, report)
        check_evaluations(source, report, rollouts)
        for name, text in source.reader.problems.items():
            report.expect(False, FILES, f"record/{name}", text)
        if options.replay == "checkpoints":
            check_replay(source, report, given)
        else:
            report.note("no step was made again (replay=none): weights and gradient norms are not checked")
    return report


def check_chain(source: Source, report: Report) -> None:
    """Check the files of a run against its chain of hashes, and its checkpoints against their manifests."""
    folder, chain = source.folder, source.chain

    def expect(holds: bool, place: str, told: str) -> None:
        report.expect(holds, HASHES, place, told)

    for path in sorted((folder / "state").glob("step-*")):
        with report.checking(HASHES, f"state/{path.name}"):
            verify(path)
            report.checked[HASHES] += 1
    if chain.is_empty:
        report.note("the run has no chain.jsonl: an earlier version of rlite made it, or the chain was removed")
        return
    for text in chain.breaks:
        expect(False, CHAIN, text)
    for name, step in chain.changed.items():
        expect(False, name, f"it was changed or removed while the run was stopped, before it went on at step {step}")
    for _, name, value in chain.files():
        if files.is_inside(folder / name, folder):
            found = hash_file(folder / name)
            expect(found == value, name, "it was removed" if found is None else CHANGED)
        else:
            expect(False, CHAIN, f"it names {name!r}, {files.LEADS_OUT}")
    there = {f"record/{path.name}" for path in (folder / "record").glob("*.parquet")} if chain.has_ended else set()
    for name in sorted(there - {name for _, name, _ in chain.files()}):
        expect(False, name, "the chain does not know this file: it was added")
    begin = chain.begins[-1] if chain.begins else {}
    expect(hash_file(folder / CONFIG) == begin.get("config"), CONFIG, CHANGED)
    if isinstance(kept := begin.get("options"), dict):
        different = differences(dict(flat(json.loads(json.dumps(source.run.saved)))), dict(flat(kept)))
        expect(not different, CONFIG, f"its options are not those of the chain: {some_of(different)}")
    expect(not (fault := chain.fault_of_metrics(folder)), METRICS, fault)
    for kind in ("code", "data"):
        for name, value in (chain.begins[0].get(kind, {}) if chain.begins else {}).items():
            now = hash_file(Path(name.rpartition(":")[0] if ".py:" in name else name).expanduser())
            if now != value:
                report.note(f"{kind} {name}: {'not there' if now is None else 'changed'} since the run began")


def check_lines(source: Source, report: Report) -> None:
    """Check that metrics.jsonl has a readable line for each step from its first one on."""
    steps, last = sorted(step for step in source.metrics if step > 0), source.chain.last
    if steps and source.chain.has_ended and "error" not in last:
        steps.append(last.get("step", 0) + 1)
    for before, after in pairwise(steps):
        told = f"it has no line of the steps {before + 1} to {after - 1} that can be read"
        report.expect(after <= before + 1, "lines of metrics", METRICS, told)


class RlAudit:
    """The checks of a run that learns from rollouts."""

    def __init__(self, source: Source, report: Report, code: str | None, rollouts: RolloutChecks) -> None:
        self._source, self._report, self._code, self._rollouts = source, report, code, rollouts
        self._rewards = None if code is None else RewardChecks(source, code, report)
        self._options: dict[RunOfTrainer, PpoConfig] = {}

    def _maker(self, step: int) -> PartsMaker:
        """Return what makes the parts of a trainer with the options of a step, and the coefficients that it had."""
        run = self._source.run_at(step)
        if run not in self._options:
            self._options[run] = run.options(self._source.folder, self._code)
        options, line = self._options[run], self._source.metrics.get(step, {})
        return PartsMaker(options.with_coefficients(coefficients_at(options, step, line)))

    def check(self) -> None:
        """Check all recorded steps."""
        source, report, reader = self._source, self._report, self._source.reader
        if TRAIN not in reader.sources:
            report.note("the run kept no record of its rollouts: trainer.record=sample or all would have")
            return
        gaps = read_gaps(source.folder)
        for gap in gaps:
            report.note(f"record: {gap}")
        steps = sorted(set(reader.table(TRAIN)["step"].to_pylist()))
        logged = sorted(step for step in source.metrics if step > 0)
        for step in steps:
            rows = reader.rollouts(TRAIN, step)
            if logged and step > logged[-1] and not any(row["status"] in IN_BATCH for row in rows):
                continue  # what was under way when the run ended
            try:
                options = self._maker(step).options
            except ConfigError as error:
                report.note(f"rollouts, advantages and losses are not checked: {error}")
                return
            with report.checking(FILES, f"record, step {step}"):
                bound = int(source.run_at(step).saved["rollout"].get("max_head_offpolicyness") or 0)
                self._rollouts.rows(step, rows, options, bound)
                self._tokens(step, rows)
                self._step(step, rows, is_in_turns=not bound)
        written = max([*steps_of(source.folder / "state"), *(step - MAX_PENDING for step in logged[-1:])], default=0)
        for step in [step for step in logged if step not in steps and not any(step in gap for gap in gaps)]:
            if step <= written or source.chain.has_ended:
                report.expect(False, FILES, "record", f"there are no rollouts of step {step}")
            else:
                report.note(f"step {step} is not recorded: the run was killed, and has not been resumed")

    def _tokens(self, step: int, rows: Sequence[Row]) -> None:
        sequences: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for sequence in self._source.reader.batch_rows(step):
            sequences.setdefault((sequence["group"], sequence["sample"]), []).append(sequence)
        by_place = {(row["group"], row["sample"]): row for row in rows}
        for place, own in sequences.items():
            told = "the record has tokens of a rollout that has no row"
            self._report.expect(place in by_place, LEDGER, f"record, step {step}, group {place[0]}", told)
            if place in by_place:
                self._rollouts.tokens(by_place[place], own)
        if self._rewards is not None:
            self._rewards.check(sequences, by_place)

    def _step(self, step: int, rows: Sequence[Row], is_in_turns: bool) -> None:
        """Compute the advantages, losses and metrics of a step again from its tokens."""
        source, report, line = self._source, self._report, self._source.metrics.get(step)
        place = f"{METRICS}, step {step}"
        trained = [row["reward"] for row in rows if row["status"] in IN_BATCH and row["reward"] is not None]
        if line is not None and trained:
            again = {"reward_trained": math.fsum(trained) / len(trained)}
            again |= metrics_of_rows(rows) if is_in_turns or source.is_complete(step) else {}
            report.compare_numbers(line, again, OF_ROLLOUTS, place)
        try:
            batch = source.recorded(step)
        except DamagedBatch as error:
            report.expect(False, FILES, f"record, step {step}", str(error))
            return
        except DataError as error:
            report.note(f"advantages and losses of some steps are not computed again: {error}")
            return
        if line is not None and all(row["status"] in IN_BATCH for row in rows):
            made = batch.given["versions"]
            oldest = made.masked_fill(made < 0, step - 1).amin(1).clamp(max=step - 1)
            again = {"rollout/staleness": (step - 1 - oldest).double().mean().item()}
            report.compare_numbers(line, again, OF_ROLLOUTS, place)
        self._advantages(step, batch)
        if line is not None:
            report.compare_numbers(line, self._losses(step, batch), LOSSES, place)

    def _advantages(self, step: int, batch: RecordedBatch) -> None:
        maker, place = self._maker(step), f"record, step {step}"
        kl = maker.options.kl
        if _is_unknown(kl, self._source.metrics.get(step, {})) and kl.type in ("reward", "advantage"):
            self._report.note("kl.adaptive_target: the weight of the KL is not known, so advantages are not computed")
            return
        if maker.options.has_teacher_advantages:
            self._report.note("distill.use_as=advantage: advantages of a teacher are compared by replay alone")
            return
        workflow = RecordedWorkflow(maker.options.rollout.train_sampling_params.gconfig(), batch.given)
        known = {key: value for key, value in batch.made.items() if key in READ_BY_ADVANTAGES}
        again = maker.advantages(workflow)(with_keys(batch.given, **known), kl_coef=kl.coef)
        for name in [name for name in ("advantages", "returns") if name in batch.made and name in again]:
            self._report.compare(compare_rows(name, batch.made[name], again[name]), ADVANTAGES, place)

    def _losses(self, step: int, batch: RecordedBatch) -> dict[str, float]:
        """Return the loss of one update and its metrics, from recorded log-probabilities."""
        own, made, loss = self._maker(step).options, batch.made, self._maker(step).policy_loss()
        logprobs = made.get("trained_logprobs", made["trainer_logprobs"])
        is_unknown = bool(made["entropy"].isnan().any() or logprobs.isnan().any())
        is_one = own.actor.update_per_rollout == 1 and step > own.actor.freeze_steps
        if not is_one or is_unknown or is_selective(loss.configured) or own.distill.teacher:
            self._report.note("losses of several updates, of teachers or that select tokens are replayed alone")
            return {}
        if loss.kl_coef and ("kept_counts" in batch.given or _is_unknown(own.kl, self._source.metrics[step])):
            self._report.note("losses with a KL over more than the kept ids, or an adaptive weight, are replayed alone")
            return {}
        columns = {key: value for key, value in made.items() if key in ("old_logprobs", "ref_logprobs")}
        joined = with_keys(batch.given, advantages=made["advantages"], **columns)
        data = lazy_pack(columns_of(joined), range(len(batch.given)), torch.device("cpu"))
        mask = batch.given["attention_mask"]
        packed = [next_token(value[mask], data["cu_seqlens"]) for value in (logprobs, made["entropy"])]
        value, metrics = loss(TokenLogprobs(*packed), data)
        return {"loss": value.item()} | {key: each.item() for key, each in metrics.items() if isinstance(each, Mean)}


def _is_unknown(kl: KlOptions, line: Mapping[str, float]) -> bool:
    """Return whether the weight of the KL in a step is not known: it was adapted, and the step was not logged."""
    return kl.adaptive_target is not None and "kl_coef" not in line


def metrics_of_rows(rows: Sequence[Row]) -> dict[str, float]:
    """Return the metrics of the rollouts of a step from their rows; see `rlite.trainer.rl.rollouts.Generated`."""
    if not (made := [row for row in rows if row["reward"] is not None]):
        return {}
    columns: dict[str, Tensor] = {
        "loss_mask": torch.tensor([[row["response_tokens"]] for row in made]),  # whose sum is read, and nothing else
        "rewards": torch.tensor([row["reward"] for row in made], dtype=torch.float64),
        "group_ids": torch.tensor([row["group"] for row in made]),
    }
    for key, name in {**SAID_ONCE, "truncated": "truncated"}.items():
        if all(row[name] is not None for row in made):
            columns[key] = torch.tensor([float(row[name]) for row in made])
    parts = [dict(row["reward_parts"] or ()) for row in made]
    for name in {name for own in parts for name in own}:
        columns[f"{NAMED_REWARD}{name}"] = torch.tensor([own.get(name, math.nan) for own in parts])
    generated = Generated()
    generated.add(TensorDict(columns, batch_size=[len(made)]))
    filtered = {row["group"] for row in rows if row["status"] == "filtered"}
    rewards: dict[int, set[float]] = {}
    for row in made:
        if row["status"] in IN_BATCH:
            rewards.setdefault(row["group"], set()).add(row["reward"])
    num_uniform = sum(len(own) == 1 for own in rewards.values())
    return {**generated.metrics(), "num_filtered": len(filtered), "num_unreplaced": num_uniform}


def check_evaluations(source: Source, report: Report, rollouts: RolloutChecks) -> None:
    """Compute the metrics of evaluations again from their rows, with their standard errors."""
    reader, is_recent = source.reader, _is_recent(source)
    for name in [name for name in reader.sources if name != TRAIN]:
        own = name.removeprefix("eval.")
        for step in sorted(set(reader.table(name)["step"].to_pylist())):
            line, place = source.metrics.get(step, {}), f"evaluation {own} after step {step}"
            with report.checking(EVALUATIONS, f"record, {place}"):
                rows = reader.rollouts(name, step)
                for row in rows:
                    rollouts.tokens(row, reader.tokens(name, step, (row["group"], row["sample"])))
                    is_one = {row["version_min"], row["version_max"]} <= {None, step}
                    told = f"tokens of other policy versions than {step}"
                    report.expect(is_one, EVALUATIONS, f"{own}: {place_of(row)}", told)
                samples = [Sample.of_row({**row, "item": str(row["group"])}) for row in rows]
                found = prefixed("" if own == "test" else own, summary(samples, _samples_of(source, own)))
                if not is_recent:
                    report.note("standard errors are not compared: an earlier version of rlite had other ones")
                    found = {key: value for key, value in found.items() if "standard_error" not in key}
                report.compare_numbers(line, found, EVALUATIONS, f"{METRICS}, {place}")


def _samples_of(source: Source, name: str) -> int:
    """Return the largest k of pass@k of a set of evaluations."""
    own = source.run.saved.get("test_data") or {}
    own = own if "path" in own else own.get(name, {})
    return int(own.get("k") or own.get("samples") or 1)


def _is_recent(source: Source) -> bool:
    """Return whether this version of rlite, or a later one, has made the run: it has a chain, or records batches."""
    rows = (row for step in source.metrics for row in source.reader.batch_rows(step))
    return not source.chain.is_empty or any(row["row"] is not None for row in rows)


def is_same_machine(chain: Folded) -> bool:
    """Return whether a run was made with the same versions and the same kind of processor, so that bits are equal."""
    facts = {"versions": versions(), **device_facts()}
    there = [{**(link.get("devices") or {}), "versions": link.get("versions")} for link in chain.begins]
    return bool(there) and all({**own, **facts} == own for own in there)


def check_replay(source: Source, report: Report, options: ReplayConfig) -> None:
    """Make the steps between checkpoints again, as far as the record reaches, and compare everything."""
    with report.checking(HASHES, CHAIN):
        report.is_exact = source.run.is_one_device and is_same_machine(source.chain)
    if not report.is_exact:
        report.note("bits are not compared: other devices, versions or processors made the run; numbers are")
    kept, logged = sorted(steps_of(source.folder / "state")), [step for step in source.metrics if step > 0]
    if not logged:
        report.note(f"{METRICS} has no step: no step was made again")
        return
    for end in dict.fromkeys([*(step for step in kept if step > 0), max(logged)]):
        place = f"steps {source.first_step(end)} to {end}"
        try:
            with replaying(source, end, options, report) as trainer:
                replay(source, trainer, end, options, report)
        except DamagedBatch as error:
            report.expect(False, REPLAYED, place, str(error))
        except (DataError, ConfigError) as error:
            report.note(f"the {place} are not made again: {error}")
        except (CheckpointError, *DAMAGED) as error:
            report.expect(False, REPLAYED, place, f"they cannot be made again: {type(error).__name__}: {error}")
