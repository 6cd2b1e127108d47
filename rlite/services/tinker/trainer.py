"""The work of training requests, one at a time, on the engines. Everything here runs in one thread.

    bring (load the state, redo open gradients) ──> work ──> settle ──> save the state when it is due

A model that is not resident is on disk as it was after its last settled request: its saved state, and in its journal
the requests whose gradients are accumulated.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from rlite.engine.train import RliteTrainEngine
from rlite.errors import CheckpointError, ConfigError, DataError, StorageError, WeightSyncError
from rlite.files import replace
from rlite.nn.options import LoraOptions
from rlite.runtime.storage.atomic import discard, publish, staging
from rlite.services.tinker.journal import REQUEST, RESULT, STATE, Record
from rlite.services.tinker.losses import work_of
from rlite.services.tinker.sampling import ServedAdapters, served_name
from rlite.services.tinker.tenants import Request, Result, Sampler, TenantModel, Tenants
from rlite.services.tinker.wire import read_forward, write_forward

logger = logging.getLogger(__name__)
ALPHA = 32.0
"""scale of all adapters, as the API has it"""
INFLIGHT, UNNAMED = "_inflight", "_seq-"
"""names of weights that clients do not name: those of inflight samplers, which a model's share, and of others"""
_BYTES_PER_PARAMETER = 16
"""float32 value and gradient, and two numbers of AdamW"""


@dataclass(frozen=True)
class TrainerLimits:
    """Limits of one tenant, and of its models."""

    max_bytes: float
    """memory of the adapters that the engine holds, with gradients and optimizers"""
    save_every: int
    """optimizer steps between saved states"""
    max_journal_bytes: int
    keep_samplers: int
    """unnamed samplers of a model; older ones are dropped"""
    keep_weights: int | None
    """named states and samplers of a model, each; None keeps all"""


class Trainer:
    """Works on requests.

    Args:
        train: the train engine.
        served: the adapters of the inference engine.
        tenants: all sessions.
        limits: limits of a tenant.
    """

    def __init__(
        self, train: RliteTrainEngine, served: ServedAdapters, tenants: Tenants, limits: TrainerLimits
    ) -> None:
        self._train, self._served, self._tenants, self._limits = train, served, tenants, limits
        self._linear = {name: layer for name, layer in train.module.named_modules() if isinstance(layer, nn.Linear)}
        self._actions = {
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "load_weights": self._load_weights,
            "save_weights_for_sampler": self._save_for_sampler,
        }

    # -- requests ------------------------------------------------------------------------------------------------

    def work(self, model: TenantModel) -> None:
        """Work on a model's next request, and settle it."""
        seq_id = model.next_seq
        request = model.pending[seq_id]
        is_state = False
        try:
            self.bring(model)
            if request.kind in self._actions:
                result, is_state = self._actions[request.kind](model, request.body)
            else:
                result = Result.of(json.loads(request.body))
        except (ConfigError, DataError, CheckpointError, WeightSyncError) as error:
            result = Result.failed(str(error))
        except Exception as error:  # of any engine: one request may not end the work of all tenants
            logger.exception("a request of %s failed", model.model_id)
            result = Result.failed(f"the server failed with {type(error).__name__}; its log has more", "server")
        if seq_id == 0 and not model.is_resident:
            model.is_gone = True
            model.write()
        model.settle(seq_id, result)
        del model.pending[seq_id]
        model.next_seq += 1
        model.used_at = time.monotonic()
        limits = self._limits
        if model.is_resident and not is_state and request.kind == "optim_step":
            is_state = model.steps_since_save >= limits.save_every
            if is_state or model.journal.num_bytes > limits.max_journal_bytes // 2:
                try:
                    self.save_state(model)
                except (CheckpointError, StorageError) as error:  # the journal still holds what the state would
                    logger.warning("the state of %s could not be saved: %s", model.model_id, error)

    def recover(self, model: TenantModel) -> None:
        """Read what a server before this one has accepted."""
        records = model.journal.read()
        state = next((record for record in records if record.kind == STATE), None)
        if state is None:
            model.pending[0] = Request("create", json.dumps(model.spec["answer"]).encode())
        else:
            facts = json.loads(state.body)
            model.next_seq, model.open_seqs, model.num_steps = state.seq_id + 1, facts["open"], facts["num_steps"]
        for record in records:
            if record.kind == RESULT:
                model.results[record.seq_id] = Result(record.body[1:], record.body[:1] == b"p")
            elif record.kind == REQUEST and record.seq_id >= model.next_seq:
                model.pending[record.seq_id] = Request.decoded(record.body)

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
        records = model.journal.read()
        state = next((record for record in records if record.kind == STATE), None)
        facts = {"folder": model.spec.get("load"), "optimizer": model.spec.get("optimizer", True), "open": []}
        facts |= {} if state is None else json.loads(state.body)
        if facts["folder"] is None:
            options = LoraOptions(rank=model.spec["rank"], alpha=ALPHA, target_modules=self._targets(model.spec))
            self._make_room(model, self._bytes_of(options))
            self._train.add_adapter(model.model_id, options, model.spec["seed"])
        else:
            self._make_room(model, 0)
            self._train.load_adapter(model.model_id, model.folder / facts["folder"], facts["optimizer"])
        model.is_resident = True
        bodies = {record.seq_id: record.body for record in records if record.kind == REQUEST}
        model.open_seqs = []
        for seq_id in facts["open"]:
            self._compute(model, Request.decoded(bodies[seq_id]).body)
            model.open_seqs.append(seq_id)

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

    def bytes_of(self, model: TenantModel) -> int:
        """Return the memory of a model that the engine holds; 0 if it does not."""
        options = self._train.adapters.get(model.model_id)
        return 0 if options is None else self._bytes_of(options)

    def _make_room(self, model: TenantModel, num_bytes: int) -> None:
        """Offload models of the same tenant that rest, until another one fits.

        Raises:
            ConfigError: it does not fit.
        """
        held = [own for own in self._tenants.models(model.owner) if own.is_resident]
        taken = num_bytes + sum(map(self.bytes_of, held))
        for own in sorted(held, key=lambda each: each.used_at):
            if taken > self._limits.max_bytes and not own.pending:
                taken -= self.bytes_of(own)
                self.offload(own)
        if taken > self._limits.max_bytes:
            told = (
                f"its adapters would take {taken / 2**20:.0f} MiB, and {self._limits.max_bytes / 2**20:.0f} are allowed"
            )
            raise ConfigError(f"tenant {model.owner!r}: {told} (max_adapter_mib); unload a model, or take a lower rank")

    def _bytes_of(self, options: LoraOptions) -> int:
        chosen = options.target_modules
        layers = [layer for name, layer in self._linear.items() if name in chosen or chosen == ["all-linear"]]
        return sum(_BYTES_PER_PARAMETER * options.rank * (each.in_features + each.out_features) for each in layers)

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
        facts = {"folder": folder.name, "optimizer": with_optimizer, "open": model.open_seqs}
        state = Record(STATE, seq_id, json.dumps({**facts, "num_steps": model.num_steps}).encode())
        results = [
            Record(RESULT, number, (b"p" if result.is_proto else b"j") + result.body)
            for number, result in model.results.items()
            if number <= seq_id
        ]
        opened = set(model.open_seqs)
        model.journal.rewrite(
            [state, *results],
            lambda record: record.kind == REQUEST and (record.seq_id > seq_id or record.seq_id in opened),
        )
        for other in model.folder.glob("state-*"):
            if other != folder:
                discard(other)
        model.steps_since_save = 0

    # -- actions -------------------------------------------------------------------------------------------------

    def _forward_backward(self, model: TenantModel, body: bytes) -> tuple[Result, bool]:
        result, is_open = self._compute(model, body)
        if is_open:
            model.open_seqs.append(model.next_seq)
        return result, False

    def _compute(self, model: TenantModel, body: bytes) -> tuple[Result, bool]:
        """Return the result, and whether gradients have accumulated.

        Raises:
            DataError: the loss is not finite.
        """
        request, _ = read_forward(body)
        work = work_of(request)
        if request.is_forward_only:
            values = self._train.forward(work.batch, work.hook, adapter=model.model_id)
            loss = work.loss_of(values)
        else:
            stats = self._train.forward_backward(work.batch, work.loss, adapter=model.model_id)
            loss, values = stats["loss"], stats["logprobs"]
        num_tokens = float(sum(shape[0] for shape in work.lengths))
        model.last |= {"loss_per_token": loss / num_tokens}
        if not math.isfinite(loss):
            raise DataError(f"the loss is {loss}: the gradients are not finite, and optim_step will make no step")
        metrics = {"loss:sum": loss, "num_tokens:sum": num_tokens}
        return Result(write_forward(work.logprobs_of(values), metrics), is_proto=True), not request.is_forward_only

    def _optim_step(self, model: TenantModel, body: bytes) -> tuple[Result, bool]:
        given = json.loads(body)["adam_params"]
        stats = self._train.optimizer_step(
            model.model_id,
            lr=given["learning_rate"],
            betas=(given["beta1"], given["beta2"]),
            eps=given["eps"],
            weight_decay=given["weight_decay"],
            max_grad_norm=given["grad_clip_norm"] or math.inf,
        )
        model.open_seqs = []
        if stats["is_skipped"] and stats["weight"]:
            raise DataError("no step was made: a loss or a gradient is not finite; the gradients are dropped")
        model.steps_since_save += 1
        model.num_steps += 1
        model.last |= {"grad_norm": stats["grad_norm"], "lr": stats["lr"]}
        metrics = {"grad_norm:mean": stats["grad_norm"], "is_skipped:max": stats["is_skipped"]}
        return Result.of({"type": "optim_step", "metrics": metrics}), False

    def _save_weights(self, model: TenantModel, body: bytes) -> tuple[Result, bool]:
        asked = json.loads(body)
        name = asked.get("path") or f"seq-{model.next_seq}"
        folder = self._write(model, "weights", name, asked)
        self._after(model, folder, with_optimizer=True)
        return Result.of({"type": "save_weights", "path": model.path("weights", name)}), True

    def _load_weights(self, model: TenantModel, body: bytes) -> tuple[Result, bool]:
        asked = json.loads(body)
        _, folder = self._tenants.weights(model.owner, asked["path"], "weights")
        self._train.load_adapter(model.model_id, folder, asked["optimizer"])
        model.open_seqs = []
        self._after(model, folder, asked["optimizer"])
        answer = {"type": "load_weights", "path": asked["path"], "model_id": model.model_id}
        return Result.of(answer), True

    def _save_for_sampler(self, model: TenantModel, body: bytes) -> tuple[Result, bool]:
        asked = json.loads(body)
        number, is_inflight = asked.get("sampling_session_seq_id"), asked.get("kind") == "inflight"
        name = asked.get("path") or (INFLIGHT if is_inflight else f"{UNNAMED}{model.next_seq}")
        folder = self._write(model, "sampler_weights", name, {**asked, "overwrite": is_inflight})
        if is_inflight:
            self._served.renew(served_name(model.model_id, name), folder)
        if number is None:
            path = model.path("sampler_weights", name)
            return Result.of({"type": "save_weights_for_sampler", "path": path}), False
        session = self._tenants.sessions[model.model_id.partition(":")[0]]
        sampler = Sampler(f"{session.session_id}:sample:{number}", model.model_id, name, is_inflight)
        session.samplers[number] = sampler
        self._drop_old_samplers(model, session.samplers)
        session.write()
        answer = {"type": "save_weights_for_sampler", "path": None, "sampling_session_id": sampler.sampler_id}
        return Result.of(answer), False

    # -- files ---------------------------------------------------------------------------------------------------

    def _after(self, model: TenantModel, folder: Path, with_optimizer: bool) -> None:
        """Take saved weights as the state after the request that is worked on."""
        model.next_seq += 1
        try:
            self.save_state(model, folder, with_optimizer)
        finally:
            model.next_seq -= 1

    def _write(self, model: TenantModel, kind: Any, name: str, asked: dict[str, Any]) -> Path:
        """Write weights under a name, whole or not at all.

        Returns:
            Their folder.

        Raises:
            ConfigError: the name is taken.
        """
        folder = model.folder / kind / name
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        facts = read_facts(folder)
        if facts is not None and facts["seq_id"] != model.next_seq and not asked.get("overwrite"):
            raise ConfigError(f"{model.path(kind, name)} exists; take another name, or overwrite=True")
        self._train.save_adapter(model.model_id, folder)
        seconds = asked.get("ttl_seconds")
        facts = {"seq_id": model.next_seq, "time": time.time(), "user_metadata": asked.get("user_metadata")}
        facts |= {"expires": None if seconds is None else time.time() + seconds, "spec": model.spec}
        replace(facts_file(folder), json.dumps(facts).encode(), 0o600)
        if self._limits.keep_weights is not None and asked.get("path"):
            named = [own for own in saved_weights(folder.parent) if not own.name.startswith("_")]
            for old in named[: -self._limits.keep_weights]:
                drop_weights(old)
        return folder

    def _drop_old_samplers(self, model: TenantModel, samplers: dict[int, Sampler]) -> None:
        own = [
            (number, each)
            for number, each in samplers.items()
            if each.model_id == model.model_id and each.name and each.name.startswith(UNNAMED)
        ]
        for number, sampler in own[: -self._limits.keep_samplers]:
            del samplers[number]
            drop_weights(model.folder / "sampler_weights" / str(sampler.name))


def link(source: Path, folder: Path) -> None:
    """Make a folder with the same files as another, without copying them.

    Args:
        source: the folder.
        folder: the folder to make or replace.

    Raises:
        CheckpointError: the files could not be linked.
    """
    try:
        staged = staging(folder)
        shutil.copytree(source, staged, copy_function=_link_or_copy, dirs_exist_ok=True)
        publish(staged, folder)
    except (OSError, shutil.Error) as error:
        raise CheckpointError(f"{folder}: could not be written: {error}") from error


def _link_or_copy(source: str, target: str) -> None:
    try:
        Path(target).hardlink_to(source)
    except OSError:  # a file system without links
        shutil.copy2(source, target)


def facts_file(folder: Path) -> Path:
    """Return the file of what is known of saved weights."""
    return folder.with_name(f".{folder.name}.json")


def read_facts(folder: Path) -> dict[str, Any] | None:
    """Return what is known of saved weights; None if they do not exist."""
    file = facts_file(folder)
    return json.loads(file.read_bytes()) if folder.is_dir() and file.exists() else None


def saved_weights(folder: Path) -> list[Path]:
    """Return the folders of weights in a folder, the oldest first."""
    found = {each: read_facts(each) for each in folder.glob("[!.]*")} if folder.is_dir() else {}
    return sorted((each for each, facts in found.items() if facts), key=lambda each: found[each]["time"])  # type: ignore[index]


def drop_weights(folder: Path) -> None:
    """Delete saved weights."""
    discard(facts_file(folder))
    discard(folder)
