"""Conversations whose KV stays between requests.

A session keeps the tokens of its last whole turn and, pinned, the blocks that hold their KV. The blocks can be taken
back when nothing else is left to evict: the session then still knows its tokens, and its next turn computes them
again. So a full pool never refuses a request for the sake of conversations that are idle.

    begin ──► (admitted: the request takes the blocks over) ──► end_turn      tokens = the whole turn
          └────────────────────────────────────────────────────► abort_turn  tokens as before
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from runners.errors import ConflictError, NotFoundError


class BlockTable:
    """The blocks of one sequence in order; entry i holds the KV of tokens `i*block_tokens..(i+1)*block_tokens`.

    `digests` are those of its full blocks as far as they were needed, `num_entered` counts the leading blocks that the
    prefix cache has seen.
    """

    __slots__ = ("block_ids", "digests", "num_entered", "root")

    def __init__(self, root: bytes) -> None:
        self.root = root
        self.block_ids: list[int] = []
        self.digests: list[bytes] = []
        self.num_entered = 0


@dataclass(slots=True)
class Session:
    """`num_computed` of `token_ids` have KV in `table`; `busy_request_id` is the request whose turn it is."""

    session_id: str
    table: BlockTable
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    busy_request_id: str | None = None
    last_request_id: str | None = None
    last_prompt_tokens: int = 0
    last_used: float = 0.0
    num_turns: int = 0


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What `/v1/sessions` shows. Times are seconds of the scheduler's clock; a busy session does not expire."""

    session_id: str
    num_tokens: int
    num_blocks: int
    num_turns: int
    busy: bool
    last_used: float
    expires_at: float | None


class SessionStore:
    """All sessions of one model, in the order of their last use."""

    def __init__(self, ttl_s: float, release: Callable[[BlockTable], None]) -> None:
        self.ttl_s = ttl_s
        self._release = release
        self._sessions: dict[str, Session] = {}
        self._idle: OrderedDict[str, Session] = OrderedDict()  # least recently used first
        self._pinned: OrderedDict[str, Session] = OrderedDict()  # those that own blocks, least recently used first
        self.num_pinned_blocks = 0  # blocks that `reclaim` could give up, counted once a session
        self._ended_turns: dict[str, Session] = {}  # request id of each session's last turn

    def __len__(self) -> int:
        return len(self._sessions)

    def tables(self) -> list[BlockTable]:
        return [session.table for session in self._sessions.values()]

    def begin(self, session_id: str, request_id: str, root: bytes, now: float) -> Session:
        """The session for this request's turn, made if new.

        ConflictError while another request has it, and when `root` is not the one it was begun with: its KV must not
        become known under another salt.
        """
        session = self._sessions.get(session_id)
        if session is None:
            session = self._sessions[session_id] = Session(session_id, BlockTable(root), last_used=now)
        elif session.busy_request_id is not None:
            raise ConflictError("The session is in use by another request.", param="session_id")
        elif session.table.root != root:
            raise ConflictError(
                "The session was begun with another 'cache_salt': send that one, or begin a new session.",
                param="cache_salt",
                code="session_salt_mismatch",
            )
        session.busy_request_id = request_id
        self._idle.pop(session_id, None)
        return session

    def take_table(self, session: Session) -> BlockTable:
        """The request was admitted: it owns the session's blocks until its turn ends."""
        self._unpin(session)
        table, session.table = session.table, BlockTable(session.table.root)
        session.num_computed = 0
        return table

    def end_turn(
        self,
        session: Session,
        token_ids: list[int],
        prompt_tokens: int,
        table: BlockTable,
        num_computed: int,
        now: float,
    ) -> None:
        """The turn is whole: prompt and kept completion become the session's tokens."""
        session.token_ids = token_ids
        session.num_turns += 1
        if session.last_request_id is not None:
            self._ended_turns.pop(session.last_request_id, None)
        assert session.busy_request_id is not None
        session.last_request_id = session.busy_request_id
        session.last_prompt_tokens = prompt_tokens
        self._ended_turns[session.last_request_id] = session
        self._give_back(session, table, num_computed, now)

    def abort_turn(self, session: Session, table: BlockTable, num_computed: int, now: float) -> None:
        """The turn is void: the session stands where it stood, with KV for `num_computed` of its tokens."""
        self._give_back(session, table, num_computed, now)
        if session.num_turns == 0:  # nothing to go back to: the session is as if it had never begun
            self._forget(session)

    def cancel(self, session: Session, now: float) -> None:
        """The turn never began: its request was refused."""
        self.abort_turn(session, session.table, session.num_computed, now)

    def _give_back(self, session: Session, table: BlockTable, num_computed: int, now: float) -> None:
        self._unpin(session)
        session.table = table
        session.num_computed = num_computed
        session.busy_request_id = None
        session.last_used = now
        self._idle[session.session_id] = session
        if table.block_ids:
            self._pinned[session.session_id] = session
            self.num_pinned_blocks += len(table.block_ids)

    def _unpin(self, session: Session) -> None:
        if self._pinned.pop(session.session_id, None) is not None:
            self.num_pinned_blocks -= len(session.table.block_ids)

    def ended_turn(self, request_id: str) -> Session | None:
        """The idle session whose last turn was this request's."""
        session = self._ended_turns.get(request_id)
        return session if session is not None and session.busy_request_id is None else None

    def shorten(self, session: Session, num_tokens: int, trim: Callable[[BlockTable, int], int]) -> None:
        """Forget the tokens of an idle session beyond `num_tokens`; `trim` gives back their blocks."""
        pinned = session.session_id in self._pinned
        before = len(session.table.block_ids)
        del session.token_ids[num_tokens:]
        session.num_computed = trim(session.table, min(session.num_computed, num_tokens))
        if pinned:
            self.num_pinned_blocks -= before - len(session.table.block_ids)

    def reclaim(self, keep: Session | None) -> bool:
        """Give up the blocks of the least recently used session other than `keep`; False when there is none."""
        for session in self._pinned.values():
            if session is not keep:
                self._unpin(session)
                self._release(session.table)
                session.num_computed = 0
                return True
        return False

    def reclaimable_since(self, keep: Session | None) -> float | None:
        """When the session that `reclaim` would take was last used; None when there is none."""
        return next((session.last_used for session in self._pinned.values() if session is not keep), None)

    def expire(self, now: float) -> None:
        """Drop the sessions that nobody has used for the time to live."""
        while self._idle:
            session = next(iter(self._idle.values()))
            if session.last_used + self.ttl_s > now:
                return
            self._forget(session)

    def delete(self, session_id: str, now: float) -> None:
        """NotFoundError when there is none (any longer), ConflictError while a request has it."""
        self.expire(now)
        session = self._sessions.get(session_id)
        if session is None:
            raise NotFoundError("There is no such session.", param="session_id")
        if session.busy_request_id is not None:
            raise ConflictError("The session is in use by a request.", param="session_id")
        self._forget(session)

    def clear(self) -> None:
        """Drop every session that no request has."""
        for session in list(self._idle.values()):
            self._forget(session)

    def _forget(self, session: Session) -> None:
        self._unpin(session)
        self._release(session.table)
        del self._sessions[session.session_id]
        self._idle.pop(session.session_id, None)
        if session.last_request_id is not None:
            self._ended_turns.pop(session.last_request_id, None)

    def token_ids(self, session_id: str) -> list[int]:
        """Tokens of the session's last whole turn (not to be changed); none for a session that there is not."""
        session = self._sessions.get(session_id)
        return session.token_ids if session is not None else []

    def list(self, now: float) -> Sequence[SessionInfo]:
        """All that have not expired."""
        self.expire(now)
        return [self._info(session) for session in self._sessions.values()]

    def get(self, session_id: str, now: float) -> SessionInfo:
        """NotFoundError when there is none (any longer)."""
        self.expire(now)
        session = self._sessions.get(session_id)
        if session is None:
            raise NotFoundError("There is no such session.", param="session_id")
        return self._info(session)

    def _info(self, session: Session) -> SessionInfo:
        busy = session.busy_request_id is not None
        return SessionInfo(
            session_id=session.session_id,
            num_tokens=len(session.token_ids),
            num_blocks=len(session.table.block_ids),
            num_turns=session.num_turns,
            busy=busy,
            last_used=session.last_used,
            expires_at=None if busy else session.last_used + self.ttl_s,
        )
