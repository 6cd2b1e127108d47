"""The recurrent states of sequences, beside the pages of their keys and values.

Slot i is the state of row i of the batch. The slots behind the rows keep states of prefixes.

A state has a fixed size and belongs to a number of tokens: it can be continued, not shortened. Whoever wants the state
of a prefix must have copied it when the sequence was as long.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rlite.backends.models.mixers import State


class SlotStates:
    """One state of each mixer in each slot."""

    def __init__(self, shapes: Mapping[int, State], num_slots: int) -> None:
        self._states = {
            mixer: {key: tensor.new_zeros(num_slots, *tensor.shape[1:]) for key, tensor in state.items()}
            for mixer, state in shapes.items()
        }

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return state_bytes(self._states)

    def take(self, mixer: int, slots: slice) -> State:
        """Return the state of a mixer in neighbouring slots. It shares the memory of the slots."""
        return {key: tensor[slots] for key, tensor in self._states[mixer].items()}

    def put(self, mixer: int, slots: slice, state: State) -> None:
        """Store the state of a mixer in neighbouring slots.

        `state`: the state, `[slots, ...]` each. What was taken and then changed in place is there already.
        """
        for key, tensor in self.take(mixer, slots).items():
            if tensor.data_ptr() != state[key].data_ptr():
                tensor.copy_(state[key])

    def copy(self, source: int, target: int) -> None:
        """Copy the states of one slot to another."""
        for tensor in self._tensors():
            tensor[target] = tensor[source]

    def drop(self, slot: int) -> None:
        """Write the state of a sequence that has not begun: zeros."""
        for tensor in self._tensors():
            tensor[slot] = 0

    def _tensors(self) -> list[Tensor]:
        return [tensor for state in self._states.values() for tensor in state.values()]


def state_bytes(states: Mapping[int, State]) -> int:
    """Return the size of states in bytes."""
    return sum(tensor.nbytes for state in states.values() for tensor in state.values())
