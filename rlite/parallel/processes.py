"""Joining and leaving torch.distributed, and process groups over any subset of ranks."""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

COLLECTIVE_TIMEOUT = timedelta(hours=2)
_START = secrets.token_hex(8)

_subgroups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
_open_stores: dict[int, dist.Store] = {}  # by port; a TCPStore serves as long as somebody holds it


def process_identity() -> str:
    """Return a text that no other process has, on any node.

    A process id alone is used again by later processes, and a forked process inherits what its parent drew.
    """
    return f"{os.getpid()}-{_START}"


def backend_for(device_kind: str) -> str:
    """gloo for CPU tensors, NCCL for CUDA tensors; a CUDA process has both."""
    return "gloo" if device_kind == "cpu" else "cpu:gloo,cuda:nccl"


def join_alone(device_kind: str) -> None:
    """Make this process a world of its own, without a network."""
    if not dist.is_initialized():
        dist.init_process_group(backend_for(device_kind), store=dist.HashStore(), rank=0, world_size=1)


def open_store(ip: str) -> int:
    """Start a rendezvous store on this node, listening on `ip` alone; returns its port."""
    listener = socket.socket()
    listener.bind((ip, 0))
    listener.listen(1024)
    port = listener.getsockname()[1]
    store = dist.TCPStore(ip, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    _open_stores[port] = store
    return port


def close_store(port: int) -> None:
    """End the store that `open_store` started here on this port, if it did."""
    _open_stores.pop(port, None)


def connect_store(ip: str, port: int, timeout_s: float) -> dist.Store:
    """A client of the store that `open_store` started on `ip:port`."""
    return dist.TCPStore(ip, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def join(rank: int, world_size: int, ip: str, port: int, own_ip: str, device_kind: str, timeout_s: float) -> None:
    """Join the world that meets at the store on `ip:port`; `own_ip` is how the others reach this node."""
    if (interface := _interface(own_ip)) is not None:  # else gloo would ask what the host name resolves to
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    store = connect_store(ip, port, timeout_s)
    dist.init_process_group(
        backend_for(device_kind), store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT
    )


def _interface(ip: str) -> str | None:
    """The network interface of this node that has the address `ip`."""
    if ip.startswith("127."):
        return "lo0" if sys.platform == "darwin" else "lo"
    found = (name for name, addresses in psutil.net_if_addrs().items() if any(a.address == ip for a in addresses))
    return next(found, None)


class _ProgramWorld(c10d._World):
    """What torch.distributed knows in rank 0 under torchrun: its main thread is no rank, but a world of its own."""

    alone: dist.ProcessGroup

    @property
    def default_pg(self) -> dist.ProcessGroup | None:
        is_program = threading.current_thread() is threading.main_thread()
        return self.alone if is_program and self._default_pg is not None else self._default_pg

    @default_pg.setter
    def default_pg(self, value: dist.ProcessGroup | None) -> None:
        self._default_pg = value  # type: ignore[assignment]


def make_program_a_world() -> None:
    """Let a collective of the main thread return at once: the other ranks serve it and will never join it.

    Every other thread goes on in the group of all ranks.
    """
    alone = _new_group(dist.HashStore(), "program", [0], 0, dist.get_backend())
    world: Any = c10d._world
    world.__class__, world.alone = _ProgramWorld, alone


def leave() -> None:
    """Leave torch.distributed, and close the stores that were opened here."""
    if dist.is_initialized():
        dist.destroy_process_group()
    c10d._world.__class__ = c10d._World
    _subgroups.clear()
    _open_stores.clear()


def keep_for_ever(*objects: Any) -> None:
    """Never destroy these objects, not at the end of the interpreter either.

    A forked child needs it for owners of native threads: a destructor waits for threads that only the parent has.
    """
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def _disown() -> None:
    """Let a forked child own no process group: a collective raises there, and one core is enough for its tensors."""
    if dist.is_initialized():
        keep_for_ever([*c10d._world.pg_map.items(), *_subgroups.values(), *_open_stores.values()])
        dist.GroupMember.WORLD = None
        torch.set_num_threads(1)  # OpenMP's threads are not there either


os.register_at_fork(after_in_child=_disown)


def subgroup(ranks: Sequence[int], purpose: str = "", backend: str | None = None) -> dist.ProcessGroup:
    """The process group over `ranks` of the default group, in that order; only they need to ask for it.

    There is one for all who ask: a process runs one call at a time, in the same order as its peers. What runs beside
    the calls, in another thread, needs one for its own `purpose`. A group is named by its purpose and ranks, because
    torch's own `new_group` names a group by how many each process has been in, and ranks that have been in different
    numbers of groups would wait for each other for ever.
    """
    members = tuple(ranks)
    key = (purpose, members)
    if key not in _subgroups:
        _subgroups[key] = _new_group(
            c10d._get_default_store(), purpose, members, members.index(dist.get_rank()), backend or dist.get_backend()
        )
    return _subgroups[key]


def _new_group(store: dist.Store, purpose: str, members: Sequence[int], rank: int, backend: str) -> dist.ProcessGroup:
    group, _ = c10d._new_process_group_helper(
        len(members),
        rank,
        list(members),
        dist.Backend(backend),
        store,
        c10d.GroupName(f"rlite-{purpose}-{'-'.join(map(str, members))}"),
        timeout=COLLECTIVE_TIMEOUT,
    )
    assert isinstance(group, dist.ProcessGroup)  # a rank that is not a member gets a sentinel instead
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(members)}
    return group


def set_up_device(torch_device: str, num_threads: int) -> torch.device:
    """Give this process its device and its share of the cores (0 leaves torch's default)."""
    device = torch.device(torch_device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if num_threads:
        torch.set_num_threads(num_threads)
    return device


def call_on(function: Any, *args: Any) -> Any:
    """Apply `function`; lets a launcher run a function of this module in a process that hosts no worker yet."""
    return function(*args)
