"""Whose step comes next when several models share one device.

Each model is charged the device time of its steps, and the one that has had the least goes first. So models that always
have work get equal time, however long the steps of each are, and one that comes back after a pause goes ahead of those
that ran meanwhile, but has saved nothing up (start-time fair queueing, Goyal et al. 1996). Models with a step under way
stand behind those with none: everybody's first step is launched before anybody's second.

Nobody starves. From the moment a model has something to launch until it is launched, each other model gets at most
one of its own steps and the length of one of the waiting model's: `longest step of the one + longest of the other`.
"""

from __future__ import annotations

from collections.abc import Iterable


class Arbiter:
    """Device seconds by model. A model is named by any string."""

    def __init__(self) -> None:
        self._served_s: dict[str, float] = {}
        self._floor_s = 0.0  # what the model launched last had been served then: where one that returns starts

    def join(self, model: str) -> None:
        self._served_s[model] = self._floor_s

    def leave(self, model: str) -> None:
        del self._served_s[model]

    def woke(self, model: str) -> None:
        """It had no work, and has some now."""
        self._served_s[model] = max(self._served_s[model], self._floor_s)

    def order(self, candidates: Iterable[tuple[str, int]]) -> list[str]:
        """Models with work, each with its number of steps under way, the most urgent first."""
        served = self._served_s
        return [name for _, _, name in sorted((under_way, served[name], name) for name, under_way in candidates)]

    def launched(self, model: str) -> None:
        self._floor_s = max(self._floor_s, self._served_s[model])

    def ran(self, model: str, seconds: float) -> None:
        """A step of it has ended after so much time of the device."""
        self._served_s[model] += seconds
