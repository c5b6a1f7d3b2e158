"""Who waits, and who is next.

Three rules, together O(log n) in the requests that wait:

1. Classes. A request of priority p (0 is the most urgent in common use) counts as if it had arrived `p * ageing_s`
   seconds later than it did; the class of the request that is oldest by that measure is served.
2. Keys. Within the class, the key that was given the fewest tokens by its weight goes first (virtual token counters,
   Sheng et al. 2023). A key of which nothing waits starts from where the others are: it has saved nothing up.
3. Within a key, the oldest.

Nobody starves. A waiting request can be passed only by older ones of its key, by requests of more urgent classes that
arrived less than `p * ageing_s` after it, and by other keys of its class until their counters have passed its key's:
between keys that wait all the time, tokens over weight differ by no more than one request's.
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
    num_waiting: int = 0

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


class WaitingQueue:
    """The waiting requests of one model."""

    def __init__(self, *, ageing_s: float = 10.0, key_weights: Mapping[str, float] | None = None) -> None:
        self.ageing_s = ageing_s
        self._weights = dict(key_weights or {})
        self._classes: dict[int, _Class] = {}
        self._oldest: list[tuple[float, int, int, int, Request]] = []  # heap: aged arrival, priority, number, ticket
        self._accounts: dict[str, Account] = {}
        self._floors: dict[int, float] = {}  # a class: virtual tokens of the key served last; a key starts there
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
            account = Account(key_id, self._weights.get(key_id, 1.0))
            self._accounts[key_id] = account
        return account

    def close_account(self, account: Account) -> None:
        """The key's last request has ended. Its counter is kept only while it lies above where it would restart."""
        if account.virtual_tokens <= min(self._floors.values(), default=0.0):
            self._accounts.pop(account.key_id, None)

    def push(self, request: Request) -> None:
        """`request.account` is set. A request that was preempted keeps its number, and with it its place."""
        self._ticket += 1
        request.queue_ticket = self._ticket
        account = request.account
        assert account is not None
        # Also a key that has requests running: what others were given meanwhile is not owed to it.
        if account.num_waiting == 0:
            account.virtual_tokens = max(account.virtual_tokens, self._floors.get(request.priority, 0.0))
        account.num_waiting += 1
        group = self._classes.setdefault(request.priority, _Class())
        queue = group.keys.get(account.key_id)
        if queue is None:
            queue = group.keys[account.key_id] = _KeyQueue(account)
            heapq.heappush(group.order, (account.virtual_tokens, self._ticket, account.key_id))
        queue.account = account  # its account may have been closed and opened again meanwhile
        heapq.heappush(queue.requests, (request.number, self._ticket, request))
        aged = request.arrival_time + request.priority * self.ageing_s
        heapq.heappush(self._oldest, (aged, request.priority, request.number, self._ticket, request))
        self._len += 1
        self._entries += 1
        self.num_tokens += len(request.token_ids)

    def discard(self, request: Request) -> None:
        """Take a request out, wherever it stands. Its heap entries die; they are swept when they outnumber the live."""
        if not request.queue_ticket:
            return
        request.queue_ticket = 0
        account = request.account
        assert account is not None
        account.num_waiting -= 1
        self._len -= 1
        self.num_tokens -= len(request.token_ids)
        if self._entries > 2 * self._len + 64:
            self._sweep()

    def peek(self) -> Request | None:
        """Who is next."""
        oldest = self._oldest
        while oldest and oldest[0][4].queue_ticket != oldest[0][3]:
            heapq.heappop(oldest)
        return self._head(self._classes[oldest[0][1]]) if oldest else None

    def take(self, request: Request) -> None:
        """The request that `peek` named is admitted."""
        account = request.account
        assert account is not None
        self._floors[request.priority] = max(self._floors.get(request.priority, 0.0), account.virtual_tokens)
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
        self._oldest = [entry for entry in self._oldest if entry[4].queue_ticket == entry[3]]
        heapq.heapify(self._oldest)
        for priority, group in list(self._classes.items()):
            for key_id, queue in list(group.keys.items()):
                queue.requests = [entry for entry in queue.requests if entry[2].queue_ticket == entry[1]]
                heapq.heapify(queue.requests)
                if not queue.requests:
                    del group.keys[key_id]
            group.order = [entry for entry in group.order if entry[2] in group.keys]
            heapq.heapify(group.order)
            if not group.keys:
                del self._classes[priority]

    def requests(self) -> list[Request]:
        """All who wait, in no particular order (for checks)."""
        return [entry[4] for entry in self._oldest if entry[4].queue_ticket == entry[3]]
