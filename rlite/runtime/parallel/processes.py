"""Membership in torch.distributed, and process groups over any subset of ranks."""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

COLLECTIVE_TIMEOUT = timedelta(hours=2)
_START = secrets.token_hex(8)
all_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch's collective, by its name since torch 2.13"""

_subgroups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
_open_stores: dict[int, dist.Store] = {}  # by port; a TCPStore serves as long as it is referenced


def process_identity() -> str:
    """Return a text that no other process has, on any node.

    A process id alone is reused by later processes, and a forked process inherits what its parent drew.
    """
    return f"{os.getpid()}-{_START}"


def backend_for(device_kind: str) -> str:
    """Return torch's backends: gloo for CPU tensors, NCCL for CUDA tensors; a CUDA process has both."""
    return "gloo" if device_kind == "cpu" else "cpu:gloo,cuda:nccl"


def join_alone(device_kind: str) -> None:
    """Make this process a world of one rank, without a network."""
    if not dist.is_initialized():
        with unnumbered():
            dist.init_process_group(backend_for(device_kind), store=dist.HashStore(), rank=0, world_size=1)


@contextmanager
def unnumbered() -> Iterator[None]:
    """Let a world of one rank begin inside of the block, without "[rank0]" before its tracebacks and warnings."""
    excepthook = sys.excepthook
    yield
    sys.excepthook = excepthook
    torch._C._distributed_c10d._set_global_rank(-1)


def open_store(ip: str) -> int:
    """Start a rendezvous store on this node that listens on `ip` only."""
    listener = socket.socket()
    listener.bind((ip, 0))
    listener.listen(1024)
    port = listener.getsockname()[1]
    store = dist.TCPStore(ip, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    _open_stores[port] = store
    return port


def close_store(port: int) -> None:
    """End the store that `open_store` started here on this port, if any."""
    _open_stores.pop(port, None)


def connect_store(ip: str, port: int, timeout_s: float) -> dist.Store:
    """Return a client of a store that `open_store` started.

    `timeout_s`: seconds to wait for it.
    """
    return dist.TCPStore(ip, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def join(rank: int, world_size: int, ip: str, port: int, own_ip: str, device_kind: str, timeout_s: float) -> None:
    """Join a world whose members meet at a store.

    `timeout_s`: seconds to wait for the store.
    """
    if (interface := _interface(own_ip)) is not None:  # else gloo would ask what the host name resolves to
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    store = connect_store(ip, port, timeout_s)
    dist.init_process_group(
        backend_for(device_kind), store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT
    )


def _interface(ip: str) -> str | None:
    """Return this node's network interface that has the address `ip`."""
    if ip.startswith("127."):
        return "lo0" if sys.platform == "darwin" else "lo"
    found = (name for name, addresses in psutil.net_if_addrs().items() if any(a.address == ip for a in addresses))
    return next(found, None)


class _ProgramWorld(c10d._World):
    """State of torch.distributed in rank 0 under torchrun, whose main thread is a world of its own and not a rank."""

    alone: dist.ProcessGroup

    @property
    def default_pg(self) -> dist.ProcessGroup | None:
        is_program = threading.current_thread() is threading.main_thread()
        return self.alone if is_program and self._default_pg is not None else self._default_pg

    @default_pg.setter
    def default_pg(self, value: dist.ProcessGroup | None) -> None:
        self._default_pg = value  # type: ignore[assignment]


def make_program_a_world() -> None:
    """Let a collective of the main thread return at once: other ranks serve that thread and never join its collectives.

    All other threads stay in the group of all ranks.
    """
    alone = _new_group(dist.HashStore(), "program", [0], 0, dist.get_backend())
    world: Any = c10d._world
    world.__class__, world.alone = _ProgramWorld, alone


def leave() -> None:
    """Leave torch.distributed and close the stores that were opened here."""
    if dist.is_initialized():
        dist.destroy_process_group()
    c10d._world.__class__ = c10d._World
    _subgroups.clear()
    _open_stores.clear()


def keep_for_ever(*objects: Any) -> None:
    """Never destroy these objects, even at the end of the interpreter.

    A forked child needs this for owners of native threads: their destructors wait for threads that only the parent has.
    """
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def _disown() -> None:
    """Detach a forked child from all process groups. A collective then raises, and tensors use one core."""
    if dist.is_initialized():
        keep_for_ever([*c10d._world.pg_map.items(), *_subgroups.values(), *_open_stores.values()])
        dist.GroupMember.WORLD = None
        torch.set_num_threads(1)  # OpenMP's threads are not there either


os.register_at_fork(after_in_child=_disown)


def subgroup(ranks: Sequence[int], purpose: str = "", backend: str | None = None) -> dist.ProcessGroup:
    """Return the process group over `ranks` of the default group. Only its members need to call this.

    All callers share one group, because a process runs one call at a time, in the same order as its peers. Work that
    runs beside the calls, in another thread, needs its own `purpose`. A group is named by its purpose and ranks:
    torch's own `new_group` names groups by a counter per process, so ranks that were in different numbers of groups
    would wait for each other forever.

    `backend`: torch's backend; None is the default group's.
    """
    members = tuple(ranks)
    key = (purpose, members)
    if key not in _subgroups:
        _subgroups[key] = _new_group(
            c10d._get_default_store(), purpose, members, members.index(dist.get_rank()), backend or dist.get_backend()
        )
    return _subgroups[key]


def _new_group(store: dist.Store, purpose: str, members: Sequence[int], rank: int, backend: str) -> dist.ProcessGroup:
    name = c10d.GroupName(f"rlite-{purpose}-{'-'.join(map(str, members))}")
    group, _ = c10d._new_process_group_helper(
        len(members), rank, list(members), dist.Backend(backend), store, name, timeout=COLLECTIVE_TIMEOUT
    )
    assert isinstance(group, dist.ProcessGroup)  # a rank that is not a member gets a sentinel instead
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(members)}
    return group


def set_up_device(torch_device: str, num_threads: int) -> None:
    """Give this process its device and its share of the cores.

    `torch_device`: such as "cpu" or "cuda:1". `num_threads`: threads of torch; 0 keeps torch's default.
    """
    if torch_device != "cpu":
        torch.cuda.set_device(torch_device)
    if num_threads:
        torch.set_num_threads(num_threads)
