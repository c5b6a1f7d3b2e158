"""Stop strings over streamed text: nothing of a match leaks, nothing else is lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache


class StopAutomaton:
    """Aho–Corasick automaton of stop strings: a state is the longest suffix of the text that begins a stop string.

    Never changes once built, so that all choices of a request share one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.following: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.match: list[str | None] = [None]
        for stop in stops:
            if stop:
                self._add(stop)
        self.fallback = self._fallbacks()
        self.first_characters = frozenset(self.following[0])

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self.following[state].get(character)
            if following is None:
                following = len(self.following)
                self.following[state][character] = following
                self.following.append({})
                self.depth.append(self.depth[state] + 1)
                self.match.append(None)
            state = following
        self.match[state] = stop

    def _fallbacks(self) -> list[int]:
        """Per state, the state of its longest proper suffix; matches are inherited along the way, breadth first."""
        fallback = [0] * len(self.following)
        queue = deque(self.following[0].values())
        while queue:
            state = queue.popleft()
            for character, following in self.following[state].items():
                queue.append(following)
                suffix = fallback[state]
                while character not in self.following[suffix] and suffix:
                    suffix = fallback[suffix]
                fallback[following] = self.following[suffix].get(character, 0)
                if self.match[following] is None:
                    self.match[following] = self.match[fallback[following]]
        return fallback


# The choices of a request ask one after the other; few, because long stop strings make large tables.
automaton_of = lru_cache(maxsize=8)(StopAutomaton)


class StopMatcher:
    """Finds the first stop string to be completed, whatever the pieces the text comes in.

    Of stop strings that end at the same character the longest counts. `include` emits the matched string as well.
    Only the suffix of the text that begins a stop string is held back.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._include = include
        self._automaton = automaton_of(tuple(stops))
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that may be shown now, and the stop string that was completed, if any. After a match: ("", match)."""
        if self.matched is not None:
            return "", self.matched
        automaton = self._automaton
        if not self._state and automaton.first_characters.isdisjoint(text):
            return text, None
        state, following, fallback = self._state, automaton.following, automaton.fallback
        for index, character in enumerate(text):
            while character not in following[state] and state:
                state = fallback[state]
            state = following[state].get(character, 0)
            stop = automaton.match[state]
            if stop is not None:
                self.matched = stop
                seen = self._held + text[: index + 1]
                self._held = ""
                return (seen if self._include else seen[: len(seen) - len(stop)]), stop
        self._state = state
        seen = self._held + text
        shown = len(seen) - automaton.depth[state]
        self._held = seen[shown:]
        return seen[:shown], None

    def finish(self) -> str:
        """The held-back text, once no more can follow."""
        held, self._held, self._state = self._held, "", 0
        return held
