"""Groups that have ended, as a record shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlite.observability.record.schema import Status
from rlite.rollout.episode import Episode


@dataclass(frozen=True, eq=False, slots=True)
class Ended:
    """A group that was lost or consumed, or that is under way at the end of a run. Its episodes may still run."""

    group: int
    item: str
    """name of the data item"""
    status: Status | None
    """None: consumed; the consumer sets it"""
    reason: str
    """why the group is lost"""
    episodes: list[Episode]
    num_tokens: dict[int, int]
    """tokens that each episode has generated, by its number"""
    first_sample: int = 0
    """number of the first episode among those of the item"""
    columns: Mapping[str, str] = field(default_factory=dict)
    """columns of the data item, shortened"""

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and tensors."""
        return {
            "group": self.group,
            "item": self.item,
            "status": self.status,
            "reason": self.reason,
            "num_tokens": dict(self.num_tokens),
            "columns": dict(self.columns),
            "episodes": [
                {
                    **episode.state_dict(),
                    "trajectory": None if episode.trajectory is None else dict(episode.trajectory.items()),
                }
                for episode in self.episodes
            ],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Ended:
        """Return the group that was saved."""
        return cls(
            **{name: state[name] for name in ("group", "item", "status", "reason")},
            episodes=[Episode.from_state(each, each["trajectory"]) for each in state["episodes"]],
            num_tokens=dict(state["num_tokens"]),
            columns=state.get("columns", {}),
        )
