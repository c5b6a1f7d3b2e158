"""Who waits, and who is next.

Three rules, each O(log n) in the requests that wait:

1. Classes. A request of priority p counts as if it had arrived `p * ageing_s` seconds later than it did; the class
   whose oldest request arrived earliest by that measure is served. So class 0 goes first, but never passes a request
   of class p that has waited `p * ageing_s` longer.
2. Keys. Within the class, the key that was given the fewest tokens by its weight goes first (virtual token counters).
   A key that comes back after a pause starts from where the others are, it has saved up nothing.
3. Within a key, the oldest.

Bound: between two requests that a waiting key gets served, any other key of its class is given at most its weight's
share plus one request; see `tests/unit/scheduling/test_waiting.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

from runners.request import Request


@dataclass(slots=True)
class Account:
    """Tokens served to one key, divided by its weight."""

    key_id: str
    weight: float
    virtual_tokens: float = 0.0
    num_decoding: int = 0
    num_live: int = 0

    def charge(self, tokens: int) -> None:
        self.virtual_tokens += tokens / self.weight


@dataclass(slots=True)
class _KeyQueue:
    account: Account
    requests: list[tuple[int, int, Request]] = field(default_factory=list)  # heap: number, ticket


@dataclass(slots=True)
class _Class:
    keys: dict[str, _KeyQueue] = field(default_factory=dict)
    order: list[tuple[float, int, str]] = field(default_factory=list)  # heap: virtual tokens when entered, turn, key
    oldest: list[tuple[float, int, int, Request]] = field(default_factory=list)  # heap: arrival, number, ticket


class WaitingQueue:
    """The waiting requests of one model."""

    def __init__(self, *, ageing_s: float = 10.0, key_weights: Mapping[str, float] | None = None) -> None:
        self.ageing_s = ageing_s
        self._weights = dict(key_weights or {})
        self._classes: dict[int, _Class] = {}
        self._accounts: dict[str, Account] = {}
        self._floor = 0.0  # virtual tokens of the key served last: where a key that comes back starts
        self._ticket = 0
        self._entries = 0  # heap entries, those of requests that have left included
        self._len = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return self._len

    def account(self, key_id: str) -> Account:
        """The account of a key with requests; made when there is none."""
        account = self._accounts.get(key_id)
        if account is None:
            account = Account(key_id, self._weights.get(key_id, 1.0), self._floor)
            self._accounts[key_id] = account
        return account

    def close_account(self, account: Account) -> None:
        """The key's last request has ended. Its counter is kept only while it lies above where it would restart."""
        if account.virtual_tokens <= self._floor:
            self._accounts.pop(account.key_id, None)

    def push(self, request: Request) -> None:
        """`request.account` is set. A request that was preempted keeps its number, and with it its place."""
        self._ticket += 1
        request.queue_ticket = self._ticket
        account = request.account
        assert account is not None
        if account.num_live == 0 and account.virtual_tokens < self._floor:
            account.virtual_tokens = self._floor
        group = self._classes.setdefault(request.priority, _Class())
        queue = group.keys.get(account.key_id)
        if queue is None:
            queue = group.keys[account.key_id] = _KeyQueue(account)
            heapq.heappush(group.order, (account.virtual_tokens, self._ticket, account.key_id))
        heapq.heappush(queue.requests, (request.number, self._ticket, request))
        heapq.heappush(group.oldest, (request.arrival_time, request.number, self._ticket, request))
        self._len += 1
        self._entries += 1
        self.num_tokens += len(request.token_ids)

    def discard(self, request: Request) -> None:
        """Take a request out, wherever it stands. Its heap entries die; they are swept when they outnumber the live."""
        if not request.queue_ticket:
            return
        request.queue_ticket = 0
        self._len -= 1
        self.num_tokens -= len(request.token_ids)
        if self._entries > 2 * self._len + 64:
            self._sweep()

    def peek(self) -> Request | None:
        """Who is next."""
        best: tuple[float, int] | None = None
        for priority, group in list(self._classes.items()):
            oldest = group.oldest
            while oldest and oldest[0][3].queue_ticket != oldest[0][2]:
                heapq.heappop(oldest)
            if not oldest:
                del self._classes[priority]
                continue
            score = (oldest[0][0] + priority * self.ageing_s, priority)
            if best is None or score < best:
                best = score
        return None if best is None else self._head(self._classes[best[1]])

    def take(self, request: Request) -> None:
        """The request that `peek` named is admitted."""
        account = request.account
        assert account is not None
        self._floor = max(self._floor, account.virtual_tokens)
        self.discard(request)

    def _head(self, group: _Class) -> Request:
        order = group.order
        while True:
            entered, turn, key_id = order[0]
            queue = group.keys[key_id]
            requests = queue.requests
            while requests and requests[0][2].queue_ticket != requests[0][1]:
                heapq.heappop(requests)
            if not requests:
                heapq.heappop(order)
                del group.keys[key_id]
            elif queue.account.virtual_tokens > entered:
                # Counters only grow, so an entry that is out of date can only lie too far ahead.
                heapq.heapreplace(order, (queue.account.virtual_tokens, turn, key_id))
            else:
                return requests[0][2]

    def _sweep(self) -> None:
        self._entries = self._len
        for group in self._classes.values():
            group.oldest = [entry for entry in group.oldest if entry[3].queue_ticket == entry[2]]
            heapq.heapify(group.oldest)
            for queue in group.keys.values():
                queue.requests = [entry for entry in queue.requests if entry[2].queue_ticket == entry[1]]
                heapq.heapify(queue.requests)

    def requests(self) -> list[Request]:
        """All who wait, in no particular order (for checks)."""
        return [
            entry[3] for group in self._classes.values() for entry in group.oldest if entry[3].queue_ticket == entry[2]
        ]
