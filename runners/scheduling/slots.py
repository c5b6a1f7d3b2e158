"""Which device slots are free. A slot never moves: it belongs to one request from admission to end."""

from __future__ import annotations


class SlotMap:
    """Free slots as the bits of one integer, so that the lowest and the highest are found at once."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = (1 << num_slots) - 1

    @property
    def num_free(self) -> int:
        return self._free.bit_count()

    def is_free(self, slot: int) -> bool:
        return bool(self._free >> slot & 1)

    def take_lowest(self) -> int | None:
        """For a request that decodes next; None when all are taken."""
        if not self._free:
            return None
        slot = (self._free & -self._free).bit_length() - 1
        self._free &= ~(1 << slot)
        return slot

    def take_highest(self) -> int | None:
        """For a prompt that is prefilled over several steps, out of the way of the decode slots."""
        if not self._free:
            return None
        slot = self._free.bit_length() - 1
        self._free &= ~(1 << slot)
        return slot

    def release(self, slot: int) -> None:
        """ValueError when the slot is free already or does not exist."""
        if not 0 <= slot < self.num_slots or self.is_free(slot):
            raise ValueError(f"slot {slot} is not taken")
        self._free |= 1 << slot
