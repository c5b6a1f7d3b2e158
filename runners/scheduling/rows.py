"""The decode batch: which request sits in which row.

Rows are dense whenever a step is planned. A request that leaves makes a hole; one that joins takes it, else compaction
fills it with the highest row, so one departure moves at most one request. Only this map changes: KV, position and last
token of a request stay in its slot.

    rows  A B C D E      A ends: . B C D E      one move: E B C D
"""

from __future__ import annotations

from collections.abc import Iterator

from runners.request import Request


class DecodeBatch:
    """Row to request, and each request's `row` back."""

    def __init__(self) -> None:
        self._rows: list[Request | None] = []
        self._holes = 0
        self.num_moves = 0

    def __len__(self) -> int:
        """Requests in the batch, holes not counted."""
        return len(self._rows) - self._holes

    def __iter__(self) -> Iterator[Request]:
        return (request for request in self._rows if request is not None)

    def join(self, request: Request) -> None:
        """Take the lowest hole, or a new highest row."""
        if self._holes:
            row = self._rows.index(None)
            self._rows[row] = request
            self._holes -= 1
        else:
            row = len(self._rows)
            self._rows.append(request)
        request.row = row

    def discard(self, request: Request) -> None:
        """Leave a hole where the request sits, if it sits anywhere."""
        if request.row is not None:
            self._rows[request.row] = None
            request.row = None
            self._holes += 1

    def compact(self) -> list[Request]:
        """Fill the holes; returns the dense rows (not to be changed)."""
        rows = self._rows
        if self._holes:
            low = 0
            while self._holes:
                if rows[-1] is None:
                    rows.pop()
                    self._holes -= 1
                    continue
                while rows[low] is not None:
                    low += 1
                request = rows.pop()
                assert request is not None
                rows[low] = request
                request.row = low
                self.num_moves += 1
                self._holes -= 1
        return rows  # type: ignore[return-value]  # no hole is left
