"""Rendezvous of the workloads of each role: the address and the port at which the process of rank 0 listens."""

from __future__ import annotations

from rlite.cluster.group import WorkerGroup, apply_on_processes
from rlite.control.roles import RLRoleType
from rlite.control.workload import hold_port
from rlite.errors import RliteError


class StaleRendezvous(RliteError):
    """A workload cannot be restarted beside its peers, because their rendezvous is no longer valid."""


class Rendezvous:
    """Rendezvous of all roles.

    Args:
        timeout: seconds for a process to hold a port.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self.known: dict[RLRoleType, tuple[str, int]] = {}
        """address and port, by role"""

    def make(self, role: RLRoleType, group: WorkerGroup) -> None:
        """Let the process of rank 0 hold a free port for new workloads of a role."""
        address = "127.0.0.1" if _is_on_one_node(group) else group.devices[0].ip
        self.known[role] = (address, self._hold(group, address, 0))

    def keep(self, role: RLRoleType, group: WorkerGroup, rank: int) -> None:
        """Check that the rendezvous which the peers of a new workload know is valid, and hold its port for rank 0.

        Args:
            role: the role.
            group: its processes.
            rank: rank of the new workload.

        Raises:
            StaleRendezvous: the rendezvous is not valid.
        """
        if role not in self.known:
            raise StaleRendezvous(f"no workload of {role} knows the rendezvous of its peers")
        address, port = self.known[role]
        now = group.devices[0].ip
        if address != now and not (address == "127.0.0.1" and _is_on_one_node(group)):
            raise StaleRendezvous(f"the peers of {role} expect rank 0 at {address}:{port}, and it is at {now} now")
        if rank != 0:
            return
        try:
            self._hold(group, address, port)
        except OSError as error:
            raise StaleRendezvous(f"the peers of {role} expect rank 0 at {address}:{port}: {error}") from error

    def _hold(self, group: WorkerGroup, address: str, port: int) -> int:
        """Return a port that the process of rank 0 holds: this one, or a free one for 0."""
        calls = [(group, 0, (), (address, port))]
        (held,) = apply_on_processes(calls, hold_port, [group], "hold a port", self._timeout)
        return held


def _is_on_one_node(group: WorkerGroup) -> bool:
    return len({device.node for device in group.devices}) == 1
