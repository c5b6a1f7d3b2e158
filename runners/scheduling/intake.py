"""From a message to a request: its tokens, its session's turn, its limits; or the client fault that stops it here."""

from __future__ import annotations

from runners.errors import ContextLengthError, InvalidRequestError
from runners.kv_cache.cache_manager import CacheManager
from runners.kv_cache.sessions import Session
from runners.messages import AddRequest, unpack_ids
from runners.request import Request
from runners.scheduling.policies import SchedulerLimits


def make_request(message: AddRequest, cache: CacheManager, limits: SchedulerLimits, now: float) -> Request:
    """A request that holds its session's turn, if it has one.

    ClientError when it cannot be served: no token to compute from, a context or a KV quota that is too small, a session
    in use or of another salt. The session is then as it was.
    """
    prompt = unpack_ids(message.prompt)
    root = cache.root(message.cache_salt, message.key_id)
    session = None
    if message.session_id is not None:
        cache.sessions.expire(now)  # an engine that slept has not looked: what is past its time must not come back
        session = cache.sessions.begin(message.session_id, message.request_id, root, now)
    try:
        return _make_request(message, prompt, root, session, cache, limits)
    except Exception:  # whatever it was, a session must not stay busy for a request that never began
        if session is not None:
            cache.sessions.cancel(session, now)
        raise


def _make_request(
    message: AddRequest,
    prompt: list[int],
    root: bytes,
    session: Session | None,
    cache: CacheManager,
    limits: SchedulerLimits,
) -> Request:
    known = session.token_ids if session is not None else []
    token_ids = known + prompt if message.append_to_session else prompt
    if not token_ids:
        raise InvalidRequestError("The prompt is empty.", param="prompt", code="invalid_request")
    params = message.params
    total = len(token_ids) + params.max_tokens
    if total > limits.max_context:
        raise ContextLengthError(
            f"This model's maximum context length is {limits.max_context} tokens, but {total} were asked for "
            f"({len(token_ids)} in the prompt{', the session included' if message.append_to_session else ''}, "
            f"{params.max_tokens} in the completion)."
        )
    if cache.blocks_for(len(token_ids)) > cache.pool.quota_blocks:
        raise ContextLengthError(cache.too_large(len(token_ids)))
    stop_token_ids = frozenset(params.stop_token_ids)
    return Request(
        message.request_id,
        token_ids,
        params,
        table=cache.new_table(root),
        arrival_time=message.arrival_time,
        deadline=message.deadline,
        priority=message.priority,
        key_id=message.key_id,
        length_limit=total,
        stop_token_ids=stop_token_ids if params.ignore_eos else stop_token_ids | limits.eos_token_ids,
        session=session,
        session_shared=common_prefix(known, token_ids),
    )


def common_prefix(first: list[int], second: list[int]) -> int:
    """Leading tokens that both have, by bisection over list comparisons (which run in C)."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while low < high - 1:
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low
