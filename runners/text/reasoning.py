"""Splits what a model thinks, between `<think>` and `</think>`, from what it answers."""

from __future__ import annotations

import enum

from runners.text.tool_formats import THINK_END, THINK_START
from runners.text.tool_parser import longest_prefix_at_end


class _State(enum.Enum):
    START = enum.auto()
    THINKING = enum.auto()
    BEHIND = enum.auto()  # white space between the thought and the answer
    ANSWER = enum.auto()


class ReasoningSplitter:
    """`is_open`: the prompt ends inside the thought, as templates of models that always think have it."""

    def __init__(self, *, is_open: bool) -> None:
        self._state = _State.THINKING if is_open else _State.START
        self._held = ""
        self._has_thought = False

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, answer) that became certain. White space around the thought belongs to neither."""
        if self._state is _State.ANSWER:
            return "", text
        self._held += text
        if self._state is _State.START:
            stripped = self._held.lstrip()
            if stripped.startswith(THINK_START):
                self._held = stripped[len(THINK_START) :]
                self._state = _State.THINKING
            elif not THINK_START.startswith(stripped):
                self._state = _State.ANSWER
                return "", self._take()
            else:
                return "", ""
        reasoning = self._thought() if self._state is _State.THINKING else ""
        if self._state is _State.BEHIND:
            self._held = self._held.lstrip()
            if self._held:
                self._state = _State.ANSWER
                return reasoning, self._take()
        return reasoning, ""

    def finish(self) -> tuple[str, str]:
        """What was held back, once no more can follow."""
        held = self._take()
        if self._state is _State.THINKING:
            return held.rstrip(), ""
        return "", held if self._state is _State.START else ""

    def _thought(self) -> str:
        end = self._held.find(THINK_END)
        if end >= 0:
            thought, self._held = self._held[:end].rstrip(), self._held[end + len(THINK_END) :]
            self._state = _State.BEHIND
        else:
            shown = self._held[: len(self._held) - longest_prefix_at_end(self._held, (THINK_END,))].rstrip()
            thought, self._held = shown, self._held[len(shown) :]
        if not self._has_thought:
            stripped = thought.lstrip()
            self._has_thought = bool(stripped)
            return stripped
        return thought

    def _take(self) -> str:
        held, self._held = self._held, ""
        return held
