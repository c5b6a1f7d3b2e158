"""One copy a plan: its packed pass, what changed in the slots, block copies, tokens for penalty counts."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kernels import ops
from runners.execution.device_sampler import DeviceSampler
from runners.execution.device_slots import DeviceSlots
from runners.execution.device_streams import DeviceStreams
from runners.execution.packed_step import num_packed_words, padding_words
from runners.execution.step_keys import DecodeKey, StepKey
from runners.kv_cache.device_cache import DeviceCache
from runners.scheduling.scheduler_output import SlotInit, StepPlan

# Words of the fixed buffer that graphs read their inputs from: the largest pass in buckets, and many changes.
_STAGING_WORDS = 1 << 18
_NO_WORDS = np.empty(0, dtype=np.int32)


class PlanUpload:
    """What a plan tells the slots, on its way to the device."""

    def __init__(self, streams: DeviceStreams, slots: DeviceSlots, sampler: DeviceSampler, cache: DeviceCache) -> None:
        self._streams = streams
        self._slots = slots
        self._sampler = sampler
        self._cache = cache
        self._staging = torch.zeros(_STAGING_WORDS, dtype=torch.int32, device=streams.device)
        self._numbers: list[tuple[SlotInit, NDArray[np.int64]]] = []

    def assign(self, plan: StepPlan) -> None:
        """Slot inits and block appends, on the host; `send` tells the device."""
        self._numbers = []
        for init in plan.slot_inits:
            self._slots.assign(init)
            numbers = self._sampler.assign(init)
            if numbers is not None:
                self._numbers.append((init, numbers))
        for append in plan.block_appends:
            self._slots.append_blocks(append)

    def send(self, plan: StepPlan, words: NDArray[np.int32] = _NO_WORDS, *, is_static: bool = True) -> torch.Tensor:
        """Apply what changed on the device, and copy `words` there: into the fixed buffer where `is_static`."""
        copies = np.array([(copy.source, copy.target) for copy in plan.block_copies], dtype=np.int64).reshape(-1, 2)
        sent, (pairs, *numbers) = self._send(
            words, [copies.ravel(), *(numbers for _, numbers in self._numbers)], is_static
        )
        if len(pairs):
            ops.copy_blocks(self._cache.pool, pairs[0::2], pairs[1::2])
        for (init, _), on_device in zip(self._numbers, numbers, strict=True):
            self._sampler.begin(init, on_device)
        return sent

    def send_changes(self) -> None:
        """Only what the slots noted since the last `send`."""
        self._send(_NO_WORDS, [], is_static=False)

    def padding(self, key: StepKey) -> torch.Tensor:
        """The fixed buffer, filled for a step of `key` whose rows and tokens are all padding."""
        slots = self._slots
        if isinstance(key, DecodeKey):
            slots.set_rows(np.empty(0, dtype=np.int64), key.width)
            self.send_changes()
            return self._staging[:0]
        words = padding_words(key, slots.padding_slot)
        return self._streams.upload(words, self._staging)[: num_packed_words(key)]

    def _send(
        self, words: NDArray[np.int32], wide: list[NDArray[np.int64]], is_static: bool
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(words, wide) on the device, the slots' changes applied there, by one copy."""
        indices, values = self._slots.changes()
        wide = [indices, *wide]
        sizes = [2 * len(part) for part in wide]
        if not len(words) and not any(sizes):
            empty = self._staging[:0]
            return empty, [empty] * (len(wide) - 1)
        buffer = np.concatenate([words, *(part.view(np.int32) for part in wide), values])
        fits = is_static and len(buffer) <= _STAGING_WORDS
        on_device = self._streams.upload(buffer, self._staging if fits else None)
        sent, *parts, new_values = torch.split(on_device[: len(buffer)], [len(words), *sizes, len(values)])
        if is_static and not fits and len(words):
            sent = self._staging[: len(words)].copy_(sent)
        changed, *others = (part.view(torch.int64) for part in parts)
        if len(indices):
            self._slots.state.index_copy_(0, changed, new_values)
        self._slots.changes_sent()
        return sent, others
