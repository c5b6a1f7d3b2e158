"""Where each slot stands in its grammar, and which tokens that allows. No torch: any executor may use it.

How an executor drives it, beside its forward pass:

    for init in plan.slot_inits: grammars.assign(init)       # state rebuilt from the tokens known so far
    if grammars.any_active(row_slots):
        grammars.start(row_slots)                            # masks are computed in a thread while the device works
    …forward pass…
    masks = grammars.finish()                                # None when no row has a grammar
    …ops.apply_token_mask(logits, masks.rows, masks.bits), sample…
    grammars.advance(row_slots, token_ids)                   # before the next `start`

With a pipelined device: launch forward k+1, read the tokens of step k, `advance`, `start`, `finish`, upload, launch
sample k+1. Rows without a grammar need none of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import llguidance
import numpy as np
from numpy.typing import NDArray

from runners.grammar.compiler import GrammarCompiler
from runners.grammar.limits import GrammarError
from runners.scheduling.scheduler_output import SlotInit

_MASK_THREADS = 4


@dataclass(frozen=True, slots=True)
class GrammarMasks:
    """Masks of the rows [m] int64 that have a grammar: bits [m, ceil(V / 32)] int32, bit t % 32 of word t // 32 is set
    for an allowed token. `failures` says of which rows the grammar could not be followed, and why."""

    rows: NDArray[np.int64]
    bits: NDArray[np.int32]
    failures: dict[int, str] = field(default_factory=dict)


class GrammarSlots:
    """One matcher a slot that has a grammar. `compiler` None: grammars are refused."""

    def __init__(self, compiler: GrammarCompiler | None, num_slots: int, vocab_size: int) -> None:
        self._compiler = compiler
        self._words = -(-vocab_size // 32)
        self._matchers: dict[int, llguidance.LLMatcher] = {}
        self._faults: dict[int, str] = {}
        self._active = np.zeros(num_slots, dtype=bool)
        self._thread: ThreadPoolExecutor | None = None
        self._executor: llguidance.LLExecutor | None = None
        self._pending: Future[GrammarMasks] | None = None

    def assign(self, init: SlotInit) -> None:
        """A slot begins to serve a request; doing it again for the same plan changes nothing."""
        slot, grammar = init.slot, init.sampling.grammar
        self._matchers.pop(slot, None)
        self._faults.pop(slot, None)
        self._active[slot] = bool(grammar)
        if not grammar:
            return
        try:
            if self._compiler is None:
                raise GrammarError("this executor has no tokenizer for grammars")
            matcher = self._compiler.matcher(grammar)
        except GrammarError as error:
            self._faults[slot] = str(error)
            return
        generated = list(init.token_ids[init.num_prompt_tokens :])
        if generated and not matcher.consume_tokens(generated):
            self._faults[slot] = matcher.get_error()
            return
        self._matchers[slot] = matcher

    def any_active(self, row_slots: NDArray[np.int64]) -> bool:
        return bool(self._active[row_slots].any())

    def is_complete(self, slot: int) -> bool:
        """True when nothing but an end token can follow."""
        matcher = self._matchers.get(slot)
        return matcher is not None and matcher.is_stopped()

    def start(self, row_slots: NDArray[np.int64]) -> None:
        """Begin to compute the masks of a step's rows."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="token-mask")
            self._executor = llguidance.LLExecutor(num_threads=_MASK_THREADS)
        if self._pending is not None:
            self._pending.result()  # of a step that failed before it sampled: two threads must not share a matcher
        self._pending = self._thread.submit(self._compute, row_slots.copy())

    def finish(self) -> GrammarMasks | None:
        """The masks of the last `start`, waited for; None when there was none."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def advance(self, row_slots: NDArray[np.int64], token_ids: Sequence[int], skip: Iterable[int] = ()) -> None:
        """Each row's slot has got its token; the rows in `skip` have not."""
        skipped = set(skip)
        for row in np.flatnonzero(self._active[row_slots]).tolist():
            matcher = self._matchers.get(int(row_slots[row]))
            if matcher is not None and row not in skipped:
                matcher.consume_token(token_ids[row])  # a refusal shows as an error at the next mask

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def _compute(self, row_slots: NDArray[np.int64]) -> GrammarMasks:
        rows = np.flatnonzero(self._active[row_slots])
        bits = np.zeros((len(rows), self._words), dtype=np.int32)
        failures: dict[int, str] = {}
        tasks: list[tuple[llguidance.LLMatcher, int]] = []
        for index, row in enumerate(rows.tolist()):
            slot = int(row_slots[row])
            if slot in self._faults:
                failures[row] = self._faults[slot]
            else:
                tasks.append((self._matchers[slot], index))
        if tasks:
            assert self._executor is not None
            self._executor.unsafe_compute_mask_ptr(tasks, bits.ctypes.data, self._words * 4, len(rows))
        for matcher, index in tasks:
            if matcher.is_error():
                failures[int(rows[index])] = matcher.get_error()
        return GrammarMasks(rows, bits, failures)
