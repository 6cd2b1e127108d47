"""The work of training requests, one at a time, on the engines. Everything here runs in one thread.

    bring (load the state, redo open gradients) ──> work ──> settle ──> save the state when it is due

A step is made of all its gradients or not at all: once a request for gradients has failed, the next `optim_step` drops
the others, too. A failure that was told is in the journal, so that a server after this one fails there, too.

A model that is not resident is on disk as it was after its last settled request: its saved state, and in its journal
the requests whose gradients are accumulated.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from rlite.engine.train import RliteTrainEngine
from rlite.errors import CheckpointError, ConfigError, DataError, RliteError, StorageError, WeightSyncError
from rlite.nn.options import LoraOptions
from rlite.runtime.storage.atomic import discard
from rlite.services.tinker.journal import REQUEST, RESULT, STATE, Record
from rlite.services.tinker.losses import work_of
from rlite.services.tinker.options import TinkerLimits
from rlite.services.tinker.sampling import ServedAdapters, served_name
from rlite.services.tinker.tenants import Kind, Request, Result, Sampler, Session, State, TenantModel, Tenants
from rlite.services.tinker.weights import drop_weights, expiry, link, read_facts, saved_weights, write_facts
from rlite.services.tinker.wire import read_forward, write_forward

logger = logging.getLogger(__name__)
ALPHA = 32.0
"""scale of all adapters, as the API has it"""
INFLIGHT, UNNAMED = "_inflight", "_seq-"
"""names of weights that clients do not name: those of inflight samplers, which a model's share, and of others"""
_BYTES_PER_PARAMETER = 16
"""float32 value and gradient, and two numbers of AdamW"""


@dataclass(frozen=True)
class Ending:
    """The end of a request."""

    result: Result
    saved: Path | None = None
    """a folder that holds the state after the request"""
    with_optimizer: bool = True
    """True if its state of the optimizer is read back"""


class Trainer:
    """Works on requests.

    Args:
        train: the train engine.
        served: the adapters of the inference engine.
        tenants: all sessions.
        limits: limits of tenants.
    """

    def __init__(self, train: RliteTrainEngine, served: ServedAdapters, tenants: Tenants, limits: TinkerLimits) -> None:
        self._train, self._served, self._tenants, self._limits = train, served, tenants, limits
        self._linear = {name: layer for name, layer in train.module.named_modules() if isinstance(layer, nn.Linear)}
        self._actions: dict[str, Callable[[TenantModel, bytes], Ending]] = {
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "load_weights": self._load_weights,
            "save_weights_for_sampler": self._save_for_sampler,
        }

    # -- requests ------------------------------------------------------------------------------------------------

    def work(self, model: TenantModel) -> None:
        """Work on a model's next request, and settle it."""
        seq_id, request, ending = model.next_seq, model.pending[model.next_seq], Ending(Result(b""))
        result = model.results.get(seq_id)  # of an earlier server, which has failed here
        if result is None:
            ending = self._act(model, request)
            result = replace(ending.result, digest=request.digest)
        if result.is_failure:
            self._fail(model, seq_id, request, result)
        if seq_id == 0 and not model.is_resident:
            model.is_gone = True
            model.write()
        model.settle(seq_id, result)
        del model.pending[seq_id]
        model.next_seq += 1
        model.used_at = time.monotonic()
        is_due = model.steps_since_save >= self._limits.save_every
        is_due |= request.kind != "forward_backward" and model.journal.num_bytes > self._limits.max_journal_mib << 19
        if ending.saved is not None or (model.is_resident and is_due):
            try:
                self.save_state(model, ending.saved, ending.with_optimizer)
            except (CheckpointError, StorageError) as error:  # the journal still holds what the state would
                logger.warning("the state of %s could not be saved: %s", model.model_id, error)

    def _act(self, model: TenantModel, request: Request) -> Ending:
        try:
            self.bring(model)
            if request.kind in self._actions:
                return self._actions[request.kind](model, request.body)
            return Ending(Result.of(json.loads(request.body)))
        except (ConfigError, DataError, CheckpointError, StorageError, WeightSyncError) as error:
            return Ending(Result.failed(str(error)))
        except Exception as error:  # of any engine: one request may not end the work of all tenants
            logger.exception("a request of %s failed", model.model_id)
            told = f"the server failed with {type(error).__name__}; its log has more"
            return Ending(Result.failed(told, "server"))

    def _fail(self, model: TenantModel, seq_id: int, request: Request, result: Result) -> None:
        """Let the step fail to which a failed request belongs, and keep the failure on disk."""
        is_step = request.kind == "optim_step"
        try:
            if is_step or (request.kind == "forward_backward" and not read_forward(request.body)[0].is_forward_only):
                model.broken = None if is_step else model.broken or json.loads(result.body)["error"]
                model.open = {}
                if model.is_resident:
                    self._train.forget_gradients(model.model_id)
            if seq_id and seq_id not in model.results:
                model.journal.append(Record(RESULT, seq_id, result.encoded))
        except RliteError as error:
            logger.warning("a failure of %s could not be kept: %s", model.model_id, error)

    def recover(self, model: TenantModel) -> None:
        """Read what a server before this one has accepted."""
        records = model.journal.read()
        requests = {each.seq_id: Request.decoded(each.body) for each in records if each.kind == REQUEST}
        model.results |= {each.seq_id: Result.decoded(each.body) for each in records if each.kind == RESULT}
        if records and records[0].kind == STATE:
            facts = json.loads(records[0].body)
            model.state, model.next_seq, model.broken = State(**facts["state"]), records[0].seq_id + 1, facts["broken"]
            model.num_steps, model.num_inflight = facts["num_steps"], facts["num_inflight"]
            model.open = {seq_id: requests[seq_id] for seq_id in facts["open"]}
        else:
            model.pending[0] = Request("create", json.dumps(model.spec["answer"]).encode())
        model.pending |= {seq_id: request for seq_id, request in requests.items() if seq_id >= model.next_seq}

    # -- residence -----------------------------------------------------------------------------------------------

    def bring(self, model: TenantModel) -> None:
        """Let the engine hold a model as it is after its last settled request.

        Raises:
            ConfigError: the adapter cannot be made here, or the tenant's memory is full.
            CheckpointError: its state is damaged.
        """
        if model.is_resident:
            return
        if model.is_gone:
            raise ConfigError(f"model {model.model_id!r} was unloaded")
        self._make_room(model)
        if model.state is None:
            options = LoraOptions(rank=model.spec["rank"], alpha=ALPHA, target_modules=self._targets(model.spec))
            self._train.add_adapter(model.model_id, options, model.spec["seed"])
        else:
            self._train.load_adapter(model.model_id, model.folder / model.state.folder, model.state.with_optimizer)
        try:
            for request in model.open.values():
                self._compute(model, request.body)
        except BaseException:
            self._train.remove_adapter(model.model_id)
            raise
        model.is_resident = True

    def offload(self, model: TenantModel) -> None:
        """Free a model's memory. Its next request brings it back."""
        if model.is_resident:
            self.save_state(model)
            self._train.remove_adapter(model.model_id)
            model.is_resident = False

    def drop(self, model: TenantModel) -> None:
        """Free a model's memory for good. Its saved weights stay."""
        if model.is_resident:
            self._train.remove_adapter(model.model_id)
        model.is_resident, model.is_gone = False, True
        model.write()
        for path in [*model.folder.glob("state-*"), model.folder / "journal"]:
            discard(path)

    def _make_room(self, model: TenantModel) -> None:
        """Offload models of the same tenant that rest, until another one fits.

        Raises:
            ConfigError: it does not fit.
        """
        held = [own for own in self._tenants.models(model.owner) if own.is_resident]
        taken, most = sum(map(self._mib_of, [model, *held])), self._limits.max_adapter_mib
        for own in sorted(held, key=lambda each: each.used_at):
            if taken > most and not own.pending:
                taken -= self._mib_of(own)
                self.offload(own)
        if taken > most:
            told = f"its adapters would take {taken:.0f} MiB, and {most:.0f} are allowed (max_adapter_mib)"
            raise ConfigError(f"tenant {model.owner!r}: {told}; unload a model, or take a lower rank")

    def _mib_of(self, model: TenantModel) -> float:
        chosen = self._targets(model.spec)
        layers = [layer for name, layer in self._linear.items() if name in chosen or chosen == ["all-linear"]]
        num = model.spec["rank"] * sum(each.in_features + each.out_features for each in layers)
        return num * _BYTES_PER_PARAMETER / 2**20

    def _targets(self, spec: dict[str, Any]) -> list[str]:
        """Return the layers of an adapter: those of attention, of the MLPs, or all.

        Raises:
            ConfigError: the model has none of this kind.
        """
        if spec["train_attn"] and spec["train_mlp"]:
            return ["all-linear"]
        kind = "attn" if spec["train_attn"] else "mlp"
        found = [name for name in self._linear if any(kind in part for part in name.split(".")[:-1])]
        if not found:
            raise ConfigError(f"train_{kind}: the model has no linear layer of this kind; train all of them")
        return found

    # -- states --------------------------------------------------------------------------------------------------

    def save_state(self, model: TenantModel, source: Path | None = None, with_optimizer: bool = True) -> None:
        """Save the state after the last settled request, and drop what the journal no longer has to hold.

        Args:
            model: the model.
            source: a folder that holds the state already; its files are linked.
            with_optimizer: the state of the optimizer is read back, too.
        """
        seq_id = model.next_seq - 1
        folder = model.folder / f"state-{seq_id}"
        if source is None:
            self._train.save_adapter(model.model_id, folder)
        else:
            link(source, folder)
        state = State(folder.name, with_optimizer)
        facts: dict[str, Any] = {"state": vars(state), "open": list(model.open), "broken": model.broken}
        facts |= {"num_steps": model.num_steps, "num_inflight": model.num_inflight}
        first = [Record(STATE, seq_id, json.dumps(facts).encode())]
        first += [Record(RESULT, number, result.encoded) for number, result in model.results.items()]
        model.journal.rewrite(
            first, lambda record: record.kind == REQUEST and (record.seq_id > seq_id or record.seq_id in model.open)
        )
        model.state = state
        for other in model.folder.glob("state-*"):
            if other != folder:
                discard(other)
        model.steps_since_save = 0

    # -- actions -------------------------------------------------------------------------------------------------

    def _forward_backward(self, model: TenantModel, body: bytes) -> Ending:
        result, is_open = self._compute(model, body)
        if is_open:
            model.open[model.next_seq] = Request("forward_backward", body)
        return Ending(result)

    def _compute(self, model: TenantModel, body: bytes) -> tuple[Result, bool]:
        """Return the result, and whether gradients have accumulated.

        Raises:
            DataError: the loss is not finite, or an earlier request for gradients of the same step has failed.
        """
        request, _ = read_forward(body)
        work, is_open = work_of(request), not request.is_forward_only
        if is_open and model.broken:
            raise DataError(f"the gradients of this step are dropped, as an earlier request has failed: {model.broken}")
        run = self._train.forward_backward if is_open else self._train.eval_batch
        stats = run(work.batch, work.loss, adapter=model.model_id)
        num_tokens = float(sum(shape[0] for shape in work.lengths))
        if not math.isfinite(loss := stats["loss"]):
            told = "the gradients are not finite, and optim_step will make no step" if is_open else "it is no number"
            raise DataError(f"the loss is {loss}: {told}")
        model.last |= {"loss_per_token": loss / num_tokens}
        metrics = {"loss:sum": loss, "num_tokens:sum": num_tokens}
        return Result(write_forward(work.logprobs_of(stats["logprobs"]), metrics), is_proto=True), is_open

    def _optim_step(self, model: TenantModel, body: bytes) -> Ending:
        if model.broken:
            raise DataError(f"no step was made: a request for gradients has failed, so all are dropped: {model.broken}")
        given = json.loads(body)
        stats = self._train.optimizer_step(
            model.model_id,
            lr=given["learning_rate"],
            betas=(given["beta1"], given["beta2"]),
            eps=given["eps"],
            weight_decay=given["weight_decay"],
            max_grad_norm=given["grad_clip_norm"] or math.inf,
        )
        if stats["is_skipped"] and stats["weight"]:
            raise DataError("no step was made: a gradient is not finite; the gradients are dropped")
        model.open = {}
        model.steps_since_save += 1
        model.num_steps += 1
        model.last |= {"grad_norm": stats["grad_norm"], "lr": stats["lr"]}
        model.points.append({"step": model.num_steps, **model.last})
        metrics = {"grad_norm:mean": stats["grad_norm"], "is_skipped:max": stats["is_skipped"]}
        return Ending(Result.of({"type": "optim_step", "metrics": metrics}))

    def _save_weights(self, model: TenantModel, body: bytes) -> Ending:
        asked = json.loads(body)
        name = asked["path"] or f"seq-{model.next_seq}"
        folder = self._write(model, "weights", name, asked)
        return Ending(Result.of({"type": "save_weights", "path": model.path("weights", name)}), folder)

    def _load_weights(self, model: TenantModel, body: bytes) -> Ending:
        asked = json.loads(body)
        _, folder = self._tenants.weights(model.owner, asked["path"], "weights")
        self._train.load_adapter(model.model_id, folder, asked["optimizer"])
        model.open, model.broken = {}, None
        answer = {"type": "load_weights", "path": asked["path"], "model_id": model.model_id}
        return Ending(Result.of(answer), folder, asked["optimizer"])

    def _save_for_sampler(self, model: TenantModel, body: bytes) -> Ending:
        asked = json.loads(body)
        number, is_inflight = asked["sampling_session_seq_id"], asked["kind"] == "inflight"
        name = asked["path"] or (INFLIGHT if is_inflight else f"{UNNAMED}{model.next_seq}")
        version = model.num_inflight + is_inflight
        folder = self._write(model, "sampler_weights", name, {**asked, "overwrite": is_inflight}, version)
        if is_inflight:
            model.num_inflight = version
            self._served.renew(served_name(model.model_id, name), folder)
        if number is None:
            path = model.path("sampler_weights", name)
            return Ending(Result.of({"type": "save_weights_for_sampler", "path": path}))
        session = self._tenants.sessions[model.session_id]
        sampler = Sampler(f"{session.session_id}:sample:{number}", model.model_id, name, is_inflight)
        session.add_sampler(number, sampler)
        self._drop_old_samplers(model, session)
        answer = {"type": "save_weights_for_sampler", "path": None, "sampling_session_id": sampler.sampler_id}
        return Ending(Result.of(answer))

    # -- files ---------------------------------------------------------------------------------------------------

    def _write(self, model: TenantModel, kind: Kind, name: str, asked: dict[str, Any], version: int = 0) -> Path:
        """Write weights under a name, whole or not at all.

        Returns:
            Their folder.

        Raises:
            ConfigError: the name is taken.
        """
        folder = model.folder / kind / name
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        before = read_facts(folder)
        if before is not None and before["seq_id"] != model.next_seq and not asked["overwrite"]:
            raise ConfigError(f"{model.path(kind, name)} exists; take another name, or overwrite=True")
        self._train.save_adapter(model.model_id, folder, with_optimizer=kind == "weights")
        facts = {"seq_id": model.next_seq, "version": version, "time": time.time(), "spec": model.spec}
        facts |= {"expires": expiry(asked["ttl_seconds"]), "user_metadata": asked["user_metadata"]}
        write_facts(folder, facts)
        if self._limits.keep_weights is not None and asked["path"]:
            for old, _ in saved_weights(folder.parent)[: -self._limits.keep_weights]:
                drop_weights(old)
        return folder

    def _drop_old_samplers(self, model: TenantModel, session: Session) -> None:
        samplers = [
            (number, each) for number, each in list(session.samplers.items()) if each.model_id == model.model_id
        ]
        own = [(number, each.name) for number, each in samplers if each.name and each.name.startswith(UNNAMED)]
        for number, name in own[: -self._limits.keep_samplers]:
            session.samplers.pop(number, None)
            drop_weights(model.folder / "sampler_weights" / name)
