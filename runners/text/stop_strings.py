"""Stop strings over streamed text: nothing of a match leaks, nothing else is lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string to be completed, whatever the pieces the text comes in.

    Of stop strings that end at the same character the longest counts. `include` emits the matched string as well.
    Aho–Corasick automaton: a state is the longest suffix of the text that begins a stop string, and that suffix is
    all that is held back.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._include = include
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match: list[str | None] = [None]
        for stop in stops:
            if stop:
                self._add(stop)
        self._fallback = self._fallbacks()
        self._first_characters = frozenset(self._next[0])
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that may be shown now, and the stop string that was completed, if any. After a match: ("", match)."""
        if self.matched is not None:
            return "", self.matched
        if not self._state and self._first_characters.isdisjoint(text):
            return text, None
        state, following, fallback = self._state, self._next, self._fallback
        for index, character in enumerate(text):
            while character not in following[state] and state:
                state = fallback[state]
            state = following[state].get(character, 0)
            stop = self._match[state]
            if stop is not None:
                self.matched = stop
                seen = self._held + text[: index + 1]
                self._held = ""
                return (seen if self._include else seen[: len(seen) - len(stop)]), stop
        self._state = state
        seen = self._held + text
        shown = len(seen) - self._depth[state]
        self._held = seen[shown:]
        return seen[:shown], None

    def finish(self) -> str:
        """The held-back text, once no more can follow."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._next[state].get(character)
            if following is None:
                following = len(self._next)
                self._next[state][character] = following
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(None)
            state = following
        self._match[state] = stop

    def _fallbacks(self) -> list[int]:
        """Per state, the state of its longest proper suffix; matches are inherited along the way, breadth first."""
        fallback = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, following in self._next[state].items():
                queue.append(following)
                suffix = fallback[state]
                while character not in self._next[suffix] and suffix:
                    suffix = fallback[suffix]
                fallback[following] = self._next[suffix].get(character, 0)
                if self._match[following] is None:
                    self._match[following] = self._match[fallback[following]]
        return fallback
