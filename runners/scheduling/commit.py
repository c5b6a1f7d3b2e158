"""What a step's result changes: tokens appended, ends noticed, filled blocks made known to the prefix cache.

A step is committed through its own row to request map, since by then rows may have moved and requests may have ended
(their token is dropped) or been preempted (their token is appended).
"""

from __future__ import annotations

from runners.execution.executor import StepResult
from runners.messages import RequestOutput, TokenLogprobs, pack_ids
from runners.request import FinishReason, Request, RequestStatus
from runners.scheduling.live_set import LiveSet
from runners.scheduling.plans import StepRecord


def commit_step(live: LiveSet, record: StepRecord, result: StepResult, now: float) -> int:
    """Apply `result`; returns how many tokens were appended. ValueError when the result is another step's."""
    if result.step_id != record.step_id:
        raise ValueError(f"result of step {result.step_id} where step {record.step_id} is due")
    expected = len(record.rows) + sum(samples for _, _, samples in record.chunks)
    if len(result.token_ids) != expected:
        raise ValueError(f"step {record.step_id}: {len(result.token_ids)} tokens where {expected} are due")
    appended = _commit_rows(live, record.rows, result, now) if record.rows else 0
    return appended + _commit_chunks(live, record, result, now) if record.chunks else appended


def _commit_rows(live: LiveSet, rows: tuple[Request, ...], result: StepResult, now: float) -> int:
    # The hot loop of the engine: about 0.3 µs a row. Anything unusual leaves it by `_append_token`.
    packed = pack_ids(result.token_ids)
    failures, logprobs, running = result.failures, result.logprobs, RequestStatus.RUNNING
    block_tokens, cache, emit = live.cache.block_tokens, live.cache, live.outputs.append
    appended = 0
    start = -4
    for request, token_id in zip(rows, result.token_ids, strict=False):
        start += 4
        if request.status is not running or failures or (logprobs and request.request_id in logprobs):
            appended += _append_token(live, request, token_id, result, now)
            continue
        token_ids = request.token_ids
        token_ids.append(token_id)
        appended += 1
        known = len(token_ids)
        if known >= request.length_limit or token_id in request.stop_token_ids:
            reason = _finish_reason(request, token_id)
            if reason is not None:
                emit(RequestOutput(request.request_id, packed[start : start + 4], reason))
                live.finish(request, now)
                continue
        if (known - 1) % block_tokens == 0:
            cache.commit(request.table, token_ids, known - 1)
        emit(RequestOutput(request.request_id, packed[start : start + 4]))
    return appended


def _commit_chunks(live: LiveSet, record: StepRecord, result: StepResult, now: float) -> int:
    appended = 0
    place = len(record.rows)
    for request, end, samples in record.chunks:
        token_id = result.token_ids[place] if samples else None
        place += samples
        if request.status.is_terminal:
            continue
        if request.request_id in result.failures:
            live.fail(request, result.failures[request.request_id], now, distrust=True)
            continue
        if request.prompt_logprobs is not None and not request.started:
            request.prompt_logprobs.extend(result.prompt_logprobs.get(request.request_id, ()))
        if request.status is not RequestStatus.WAITING:  # preempted ones have given their blocks back
            request.num_prefilled = end
            live.cache.commit(request.table, request.token_ids, end)
        if token_id is not None:
            request.decoding = request.status is not RequestStatus.WAITING
            appended += _append_token(live, request, token_id, result, now)
        elif end == len(request.token_ids):
            embedding = result.pooled.get(request.request_id, b"")
            _emit(live, request, b"", None, FinishReason.LENGTH, embedding)
            live.finish(request, now)
    return appended


def _append_token(live: LiveSet, request: Request, token_id: int, result: StepResult, now: float) -> int:
    """One token of a request in any state; returns 1 when it was appended."""
    if request.status.is_terminal:
        return 0
    request_id = request.request_id
    if request_id in result.failures:
        live.fail(request, result.failures[request_id], now, distrust=True)
        return 0
    request.token_ids.append(token_id)
    if request.status is RequestStatus.WAITING:
        request.num_owed -= 1
        live.waiting.num_tokens += 1
    elif request.decoding and (len(request.token_ids) - 1) % live.cache.block_tokens == 0:
        live.cache.commit(request.table, request.token_ids, len(request.token_ids) - 1)
    reason = _finish_reason(request, token_id)
    logprobs = result.logprobs.get(request_id)
    _emit(live, request, pack_ids((token_id,)), None if logprobs is None else [logprobs], reason)
    if reason is not None:
        live.finish(request, now)
    return 1


def _finish_reason(request: Request, token_id: int) -> FinishReason | None:
    """Whether the token just appended is the last one."""
    if token_id in request.stop_token_ids and request.num_generated > request.params.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(request.token_ids) >= request.length_limit else None


def _emit(
    live: LiveSet,
    request: Request,
    token_ids: bytes,
    logprobs: list[TokenLogprobs] | None,
    reason: FinishReason | None,
    embedding: bytes = b"",
) -> None:
    """An output; a request's first one also says what came from the cache, and brings the prompt's logprobs."""
    first = not request.started
    request.started = True
    live.outputs.append(
        RequestOutput(
            request.request_id,
            token_ids,
            reason,
            logprobs=logprobs,
            prompt_logprobs=request.prompt_logprobs if first else None,
            cached_tokens=(request.cached_tokens or 0) if first else 0,
            embedding=embedding,
            queue_s=request.queue_s if first else None,
        )
    )
