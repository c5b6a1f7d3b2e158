"""What the engine did, as events of Chrome's trace format, which Perfetto reads.

Format: "Trace Event Format" (Google, 2016). X: a slice with a duration; C: counters; i: an instant; M: names of
tracks. Times are microseconds of the monotonic clock.

    engine   loop phases            admit │ launch │ sync │ read │ emit │ idle
             wave, mixed, decode …  one track a plan kind, a slice a step
             KV blocks, requests, width (counters)
    slots    slot 0, slot 1 …       prefill │ decode of one request, until it pauses or ends

Each model has such a pair; the loop's phases stand with the model that they were gathered with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from runners.messages import RequestOutput
from runners.scheduling.scheduler_output import PlanKind, StepPlan
from runners.telemetry.step_observer import StepBatch

Event = dict[str, Any]

_PHASE_TRACK = 1
_KIND_TRACK = {kind: 10 + place for place, kind in enumerate(PlanKind)}
_FIRST_SLOT_TRACK = 1
# The loop's own phases, in the words in which such profiles are read.
_PHASE_NAMES = {
    "receive": "admit",
    "schedule": "admit",
    "launch": "launch",
    "collect": "sync",
    "commit": "read",
    "publish": "emit",
    "idle": "idle",
}
_SHORTEST_PHASE_S = 2e-6  # an empty queue looked at: not worth a hundred bytes
_KEPT_REQUESTS = 4096
_LONGEST_SPAN_S = 1.0  # a file that breaks off lacks no more than this of a slot


@dataclass(slots=True)
class _Span:
    """A slot decodes for one request, step after step."""

    request_id: str
    start: float
    end: float
    tokens: int


class TraceEvents:
    """Turns batches into events; remembers what every slot of every model is doing."""

    def __init__(self) -> None:
        self._models: dict[str, _ModelEvents] = {}

    def header(self) -> Iterator[Event]:
        """The names of every track known so far: what a file begins with."""
        yield {"ph": "M", "pid": 0, "tid": 0, "name": "process_name", "args": {"name": "wavelane"}}
        for model in self._models.values():
            yield from model.header()

    def of(self, batch: StepBatch) -> Iterator[Event]:
        """The events of one batch."""
        model = self._models.get(batch.model)
        if model is None:
            model = self._models[batch.model] = _ModelEvents(batch.model, len(self._models))
            yield from model.header()
        yield from model.of(batch)

    def close(self) -> Iterator[Event]:
        """What is still under way."""
        for model in self._models.values():
            yield from model.close()


class _ModelEvents:
    """One model's: two groups of tracks."""

    def __init__(self, name: str, place: int) -> None:
        self._name = name
        self._engine = 2 * place + 1
        self._slot_group = 2 * place + 2
        self._named_slots: set[int] = set()
        self._spans: dict[int, _Span] = {}
        self._slot_of: dict[str, int] = {}
        self._track_end: dict[PlanKind, float] = {}
        self._width = -1

    def header(self) -> Iterator[Event]:
        yield _name("process_name", self._engine, 0, f"engine {self._name}")
        yield _name("process_name", self._slot_group, 0, f"slots {self._name}")
        yield from _track(self._engine, _PHASE_TRACK, "loop phases")
        for kind, track in _KIND_TRACK.items():
            yield from _track(self._engine, track, f"{kind} steps")
        for slot in sorted(self._named_slots):
            yield from self._slot_name(slot)

    def of(self, batch: StepBatch) -> Iterator[Event]:
        for phase, start, end in batch.phases:
            if end - start >= _SHORTEST_PHASE_S:
                name = _PHASE_NAMES.get(phase, phase)
                yield _slice(self._engine, _PHASE_TRACK, name, start, end, {"phase": phase})
        for plan, start, end in batch.steps:
            yield self._step(plan, start, end)
            yield from self._slots(plan, start, end)
            if plan.flight_id is None and plan.width != self._width:
                self._width = plan.width
                yield _counter(self._engine, "width", start, {"rows": plan.width})
        yield from self._emissions(batch.emissions)
        yield from self._counters(batch)
        yield from self._long_spans()

    def close(self) -> Iterator[Event]:
        for slot in list(self._spans):
            yield self._end_span(slot)

    def _step(self, plan: StepPlan, start: float, end: float) -> Event:
        # Flights may overlap; slices of one track may not.
        start = min(end, max(start, self._track_end.get(plan.kind, start)))
        self._track_end[plan.kind] = end
        facts = {
            "step": plan.step_id,
            "tokens": plan.num_tokens,
            "decode rows": len(plan.decode_rows),
            "prompts": len(plan.chunks),
            "width": plan.width,
        }
        return _slice(self._engine, _KIND_TRACK[plan.kind], str(plan.kind), start, end, facts)

    def _slots(self, plan: StepPlan, start: float, end: float) -> Iterator[Event]:
        busy = set()
        for row in plan.decode_rows:
            yield from self._name_slot(row.slot)
            busy.add(row.slot)
            span = self._spans.get(row.slot)
            if span is not None and span.request_id == row.request_id:
                span.end = end
                span.tokens += 1
                continue
            if span is not None:
                yield self._end_span(row.slot)
            self._spans[row.slot] = _Span(row.request_id, start, end, 1)
            self._slot_of[row.request_id] = row.slot
        for chunk in plan.chunks:
            yield from self._name_slot(chunk.slot)
            if chunk.slot in self._spans:
                yield self._end_span(chunk.slot)
            self._slot_of[chunk.request_id] = chunk.slot
            facts = {"request": chunk.request_id, "from": chunk.start, "tokens": len(chunk.token_ids)}
            yield _slice(self._slot_group, _FIRST_SLOT_TRACK + chunk.slot, "prefill", start, end, facts)
        if plan.flight_id is None:
            for slot in [slot for slot in self._spans if slot not in busy]:
                yield self._end_span(slot)

    def _name_slot(self, slot: int) -> Iterator[Event]:
        if slot not in self._named_slots:
            self._named_slots.add(slot)
            yield from self._slot_name(slot)

    def _slot_name(self, slot: int) -> Iterator[Event]:
        return _track(self._slot_group, _FIRST_SLOT_TRACK + slot, f"slot {slot}")

    def _end_span(self, slot: int) -> Event:
        span = self._spans.pop(slot)
        facts = {"request": span.request_id, "tokens": span.tokens}
        return _slice(self._slot_group, _FIRST_SLOT_TRACK + slot, "decode", span.start, span.end, facts)

    def _long_spans(self) -> Iterator[Event]:
        for slot, span in list(self._spans.items()):
            if span.end - span.start > _LONGEST_SPAN_S:
                yield self._end_span(slot)
                self._spans[slot] = _Span(span.request_id, span.end, span.end, 0)

    def _emissions(self, emissions: list[tuple[float, list[RequestOutput]]]) -> Iterator[Event]:
        for time, outputs in emissions:
            for output in outputs:
                # None: it never had a slot, for it was refused or answered from what was known.
                slot = self._slot_of.get(output.request_id)
                if slot is not None:
                    yield _instant(self._slot_group, slot, time, output)
                if output.is_final:
                    self._slot_of.pop(output.request_id, None)
        for request_id in list(self._slot_of)[:-_KEPT_REQUESTS]:  # aborted, or nobody notes emissions
            del self._slot_of[request_id]

    def _counters(self, batch: StepBatch) -> Iterator[Event]:
        stats = batch.stats
        used = stats.total_blocks - stats.free_blocks
        yield _counter(self._engine, "KV blocks", batch.time, {"in use": used, "cached": batch.cached_blocks})
        yield _counter(self._engine, "requests", batch.time, {"running": stats.running, "waiting": stats.waiting})


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _slice(pid: int, tid: int, name: str, start: float, end: float, args: Event) -> Event:
    at = _us(start)
    duration = max(0.0, round(_us(end) - at, 3))
    return {"ph": "X", "pid": pid, "tid": tid, "ts": at, "dur": duration, "name": name, "args": args}


def _instant(pid: int, slot: int, time: float, output: RequestOutput) -> Event:
    args: Event = {"request": output.request_id, "tokens": len(output.token_ids) // 4}
    if output.finish_reason is not None:
        args["finish reason"] = output.finish_reason
    track = {"pid": pid, "tid": _FIRST_SLOT_TRACK + slot}
    return {"ph": "i", "s": "t"} | track | {"ts": _us(time), "name": "emit", "args": args}


def _counter(pid: int, name: str, time: float, args: Event) -> Event:
    return {"ph": "C", "pid": pid, "tid": 0, "ts": _us(time), "name": name, "args": args}


def _name(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}}


def _track(pid: int, tid: int, name: str) -> Iterator[Event]:
    yield _name("thread_name", pid, tid, name)
    yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
