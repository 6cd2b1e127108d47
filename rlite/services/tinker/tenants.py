"""Sessions, models and samplers of tenants: their names and folders, kept on disk.

    FOLDER/SESSION/session.json                  owner, samplers
    FOLDER/SESSION/train-N/model.json            adapter of model SESSION:train:N
    FOLDER/SESSION/train-N/journal               accepted requests since the last saved state
    FOLDER/SESSION/train-N/state-SEQ             the last saved state
    FOLDER/SESSION/train-N/weights/NAME          tinker://SESSION:train:N/weights/NAME
    FOLDER/SESSION/train-N/sampler_weights/NAME  tinker://SESSION:train:N/sampler_weights/NAME

A client knows names alone. A name of another tenant's session is answered as if there were none.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlite.errors import ConfigError, DataError
from rlite.files import replace
from rlite.runtime.storage.atomic import discard
from rlite.services.tinker.journal import Journal
from rlite.services.tinker.weights import read_facts

SESSION_ID = r"s[0-9a-f]{16}"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,127}")
_PATH = re.compile(rf"tinker://(({SESSION_ID}):train:(\d{{1,9}}))/(weights|sampler_weights)/(.*)", re.DOTALL)
_MODEL = re.compile(rf"({SESSION_ID}):train:(\d{{1,9}})")
MAX_RESULTS, MAX_RESULT_BYTES = 256, 64 << 20
"""results of a model that clients may ask for again"""
MAX_EMPTY, MAX_SAMPLERS = 256, 1024
"""sessions of a tenant without a model, and samplers of a session; older ones give way"""
MAX_POINTS = 100
"""steps whose metrics are shown"""
Kind = Literal["weights", "sampler_weights"]


class UnknownName(DataError):
    """A session, a model, weights or a sampler that does not exist, or belongs to another tenant."""


@dataclass(frozen=True)
class Result:
    """The end of a request, as bytes of protobuf or of JSON."""

    body: bytes
    is_proto: bool = False
    is_failure: bool = False
    digest: bytes = b""
    """hash of the request, which tells a retry from a second writer"""

    @classmethod
    def of(cls, value: dict[str, Any]) -> Result:
        """Return the result of a JSON object."""
        return cls(json.dumps(value).encode())

    @classmethod
    def failed(cls, message: str, category: Literal["user", "server"] = "user") -> Result:
        """Return the result of a request that failed."""
        return cls(json.dumps({"error": message, "category": category}).encode(), is_failure=True)

    @property
    def encoded(self) -> bytes:
        """The result as bytes of the journal."""
        return bytes([self.is_proto, self.is_failure]) + self.digest + self.body

    @classmethod
    def decoded(cls, data: bytes) -> Result:
        """Return the result of bytes of the journal."""
        return cls(data[34:], bool(data[0]), bool(data[1]), data[2:34])


@dataclass(frozen=True)
class Request:
    """One accepted request of a model, `kind` and its body."""

    kind: str
    """forward_backward, whose body is protobuf, or another name, whose body is JSON"""
    body: bytes

    @property
    def encoded(self) -> bytes:
        """The request as bytes of the journal."""
        return self.kind.encode() + b"\0" + self.body

    @property
    def digest(self) -> bytes:
        """A hash of the request, 32 bytes."""
        return hashlib.sha256(self.encoded).digest()

    @classmethod
    def decoded(cls, data: bytes) -> Request:
        """Return the request of bytes of the journal."""
        kind, _, body = data.partition(b"\0")
        return cls(kind.decode(), body)


@dataclass(frozen=True)
class State:
    """A saved state of a model."""

    folder: str
    with_optimizer: bool
    """True if the state of the optimizer is read back; otherwise the optimizer begins anew"""


@dataclass
class TenantModel:
    """One model of a tenant: an adapter. `model_id` is its name, SESSION:train:N."""

    owner: str
    folder: Path
    spec: dict[str, Any]
    """rank, seed and layers, and metadata of the client"""
    is_gone: bool = False
    """the client has unloaded it, or it could not be made"""
    next_seq: int = 0
    """the request that is worked on next"""
    pending: dict[int, Request] = field(default_factory=dict)
    results: OrderedDict[int, Result] = field(default_factory=OrderedDict)
    open: dict[int, Request] = field(default_factory=dict)
    """requests whose gradients are accumulated"""
    state: State | None = None
    """the newest saved state"""
    broken: str | None = None
    """why the next step is not made: a request since the last one has failed, so its gradients are missing"""
    steps_since_save: int = 0
    num_steps: int = 0
    num_inflight: int = 0
    """versions of the inflight sampler"""
    is_resident: bool = False
    """the engine holds it"""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """held while a request is accepted"""
    used_at: float = field(default_factory=time.monotonic)
    last: dict[str, float] = field(default_factory=dict)
    """newest metrics"""
    points: deque[dict[str, float]] = field(default_factory=lambda: deque(maxlen=MAX_POINTS))
    """metrics of the newest steps"""

    def __post_init__(self) -> None:
        number = self.folder.name.removeprefix("train-")
        self.model_id, self.journal = f"{self.session_id}:train:{number}", Journal(self.folder / "journal")
        if "load" in self.spec:  # it was made from saved weights
            self.state = State(self.spec["load"], self.spec["optimizer"])

    @property
    def session_id(self) -> str:
        """Session of the model."""
        return self.folder.parent.name

    @property
    def is_ready(self) -> bool:
        """True if the next request is there."""
        return self.next_seq in self.pending

    def digest(self, seq_id: int) -> bytes | None:
        """Return the hash of an accepted request; None if there is none, or it is no longer known."""
        given = self.pending.get(seq_id) or self.results.get(seq_id)
        return None if given is None else given.digest

    def settle(self, seq_id: int, result: Result) -> None:
        """Keep a result, and forget the oldest ones beyond the limits."""
        self.results[seq_id] = result
        while len(self.results) > 1 and (
            len(self.results) > MAX_RESULTS or sum(len(r.body) for r in self.results.values()) > MAX_RESULT_BYTES
        ):
            self.results.popitem(last=False)

    def path(self, kind: Kind, name: str) -> str:
        """Return the address of weights."""
        return f"tinker://{self.model_id}/{kind}/{name}"

    def write(self) -> None:
        """Write the model's description to disk."""
        replace(self.folder / "model.json", json.dumps({"spec": self.spec, "is_gone": self.is_gone}).encode(), 0o600)


@dataclass
class Sampler:
    """Source of a sampling session's samples."""

    sampler_id: str
    model_id: str | None
    """None is the base model"""
    name: str | None
    """name of the weights"""
    is_inflight: bool = False


@dataclass
class Session:
    """One session of a client."""

    session_id: str
    owner: str
    folder: Path
    models: dict[int, TenantModel] = field(default_factory=dict)
    samplers: dict[int, Sampler] = field(default_factory=dict)
    is_finished: bool = False
    used_at: float = field(default_factory=time.monotonic)
    turn: threading.Lock = field(default_factory=threading.Lock)
    """held while the description is written"""

    def add_sampler(self, number: int, sampler: Sampler) -> None:
        """Keep a sampler. A retry changes nothing.

        Args:
            number: its number in the session.
            sampler: the sampler.

        Raises:
            DataError: the number was given to another sampler.
        """
        if self.samplers.setdefault(number, sampler) != sampler:
            raise DataError(f"sampler {sampler.sampler_id} was already made from other weights; take another number")
        for old in list(self.samplers)[:-MAX_SAMPLERS]:
            self.samplers.pop(old, None)
        self.write()

    def write(self) -> None:
        """Write the session's description to disk."""
        with self.turn:
            samplers = {number: vars(sampler) for number, sampler in list(self.samplers.items())}
            facts = {"owner": self.owner, "is_finished": self.is_finished, "samplers": samplers}
            replace(self.folder / "session.json", json.dumps(facts).encode(), 0o600)


class Tenants:
    """All sessions of a server.

    Args:
        folder: where they are kept. What it holds of an earlier server is read.

    Raises:
        ConfigError: a description in the folder cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for unwritten in folder.glob("s*/train-*/.*.writing"):
            discard(unwritten)
        self.sessions = {path.parent.name: _read_session(path) for path in sorted(folder.glob("s*/session.json"))}

    def open_session(self, owner: str) -> Session:
        """Return a new session. The tenant's oldest ones without a model give way."""
        empty = [own for own in self.sessions.values() if own.owner == owner and not own.models]
        for old in sorted(empty, key=lambda each: each.used_at)[: max(0, len(empty) + 1 - MAX_EMPTY)]:
            del self.sessions[old.session_id]
            discard(old.folder)
        session_id = f"s{secrets.token_hex(8)}"
        session = Session(session_id, owner, self.folder / session_id)
        session.folder.mkdir(mode=0o700)
        session.write()
        self.sessions[session_id] = session
        return session

    def session(self, owner: str, session_id: str) -> Session:
        """Return a session of a tenant.

        Raises:
            UnknownName: there is none.
        """
        session = self.sessions.get(session_id)
        if session is None or session.owner != owner:
            raise UnknownName(f"session {session_id[:80]!r} does not exist")
        session.used_at = time.monotonic()
        return session

    def models(self, owner: str | None = None) -> Iterator[TenantModel]:
        """Yield the models of a tenant, or all of them."""
        for session in list(self.sessions.values()):
            if owner in (None, session.owner):
                yield from list(session.models.values())

    def new_model(self, session: Session, number: int, spec: dict[str, Any], is_gone: bool = False) -> TenantModel:
        """Return a new model, with its folder on disk.

        Args:
            session: its session.
            number: its number in the session.
            spec: its description.
            is_gone: it holds saved weights alone, and does not learn.
        """
        folder = session.folder / f"train-{number}"
        folder.mkdir(mode=0o700, exist_ok=True)
        model = TenantModel(session.owner, folder, spec, is_gone)
        model.write()
        session.models[number] = model
        return model

    def model(self, owner: str, model_id: str) -> TenantModel:
        """Return a model of a tenant.

        Raises:
            UnknownName: there is none.
        """
        found = _MODEL.fullmatch(model_id)
        if found is None or int(found[2]) not in (models := self.session(owner, found[1]).models):
            raise UnknownName(f"model {model_id[:80]!r} does not exist")
        return models[int(found[2])]

    def weights(self, owner: str, path: str, kind: Kind | None = None) -> tuple[TenantModel, Path]:
        """Return the model and the folder of saved weights.

        Args:
            owner: the tenant.
            path: `tinker://MODEL/weights/NAME` or `tinker://MODEL/sampler_weights/NAME`.
            kind: the kind that is expected; None for either.

        Raises:
            UnknownName: there are no such weights, or they belong to another tenant.
            DataError: the path has another form, or names another kind.
        """
        found = _PATH.fullmatch(path)
        if found is None:
            expected = "expected tinker://SESSION:train:N/weights/NAME or .../sampler_weights/NAME"
            raise DataError(f"path {path[:120]!r}: {expected}")
        if kind is not None and found[4] != kind:
            raise DataError(f"path {path!r}: expected {kind}, and these are {found[4]}")
        try:
            model = self.model(owner, found[1])
            folder = model.folder / found[4] / checked_name(found[5])
        except DataError as error:
            raise UnknownName(f"path {path[:200]!r}: there are no such weights") from error
        if read_facts(folder) is None:
            raise UnknownName(f"path {path!r}: there are no such weights")
        return model, folder


def checked_name(name: str) -> str:
    """Return the name of weights.

    Raises:
        DataError: it may not stand in a path.
    """
    if not _NAME.fullmatch(name):
        told = "expected letters, digits, _, . and -, at most 128, with a letter or digit first"
        raise DataError(f"name of weights {name[:80]!r}: {told}")
    return name


def _read_session(path: Path) -> Session:
    try:
        facts = json.loads(path.read_bytes())
        session = Session(path.parent.name, facts["owner"], path.parent, is_finished=facts["is_finished"])
        session.samplers = {int(number): Sampler(**each) for number, each in facts["samplers"].items()}
        for folder in sorted(path.parent.glob("train-*")):
            if not (folder / "model.json").exists():  # the server was killed before it told anyone of the model
                continue
            told = json.loads((folder / "model.json").read_bytes())
            model = TenantModel(session.owner, folder, told["spec"], told["is_gone"])
            session.models[int(folder.name.removeprefix("train-"))] = model
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}; move {path.parent} away to start without it") from error
    return session
