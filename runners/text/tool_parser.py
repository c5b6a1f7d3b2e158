"""Generated text into content and tool calls, piece by piece; the pieces' borders change nothing."""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence

from runners.text.call_scanner import CallDelta, CallScanner
from runners.text.tool_formats import ToolFormat

_FENCES = ("```json", "```")
_OPENERS = {
    ToolFormat.HERMES: ("<tool_call>",),
    ToolFormat.LLAMA3: ("<|python_tag|>",),
    ToolFormat.MISTRAL: ("[TOOL_CALLS]",),
    ToolFormat.JSON: (),
}
# What may stand behind a call and is no content.
_CLOSERS = {
    ToolFormat.HERMES: ("</tool_call>",),
    ToolFormat.LLAMA3: (";",),
    ToolFormat.MISTRAL: (),
    ToolFormat.JSON: ("```", ";", ","),
}


class _State(enum.Enum):
    START = enum.auto()  # nothing but white space so far
    TEXT = enum.auto()
    NAME = enum.auto()  # mistral: behind the marker, before the arguments
    CALL = enum.auto()
    AFTER = enum.auto()  # behind a call


class ToolParser:
    """`names` are the functions that the model was offered. `max_calls`: later calls are left out."""

    def __init__(self, tool_format: ToolFormat, names: Collection[str], *, max_calls: int | None = None) -> None:
        self.num_calls = 0
        self._format = tool_format
        self._names = names
        self._max_calls = max_calls
        self._openers = _OPENERS[tool_format]
        self._state = _State.START
        self._held = ""
        self._opener = ""
        self._scanner: CallScanner | None = None
        self._announced = False  # the scanner has told of a call

    @property
    def has_calls(self) -> bool:
        return self.num_calls > 0 or self._announced

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        """(content, news of calls) that became certain."""
        return self._run(text, is_last=False)

    def finish(self) -> tuple[str, list[CallDelta]]:
        """What was held back, once no more can follow. A call that was cut off stays as far as it came."""
        content, calls = self._run("", is_last=True)
        if self._state is _State.CALL and self._scanner is not None and not self._announced:
            content += self._opener + self._scanner.raw
        elif self._state is _State.NAME or (self._state in (_State.START, _State.TEXT) and self._held):
            content += (self._opener if self._state is _State.NAME else "") + self._held
        self._held = ""
        return content, calls

    def _run(self, text: str, *, is_last: bool) -> tuple[str, list[CallDelta]]:
        self._held += text
        content: list[str] = []
        calls: list[CallDelta] = []
        while self._held or is_last:
            before = (self._state, len(self._held))
            match self._state:
                case _State.START:
                    self._start(is_last)
                case _State.TEXT:
                    content.append(self._text(is_last))
                case _State.NAME:
                    self._name()
                case _State.CALL:
                    content.append(self._call(calls))
                case _State.AFTER:
                    self._after(is_last)
            if (self._state, len(self._held)) == before:
                break
        kept = [call for call in calls if self._max_calls is None or call.index < self._max_calls]
        return "".join(content), kept

    def _start(self, is_last: bool) -> None:
        """A bare call begins the answer, or it is text."""
        stripped = self._held.lstrip()
        if not stripped and not is_last:
            return
        if self._format.takes_bare_json:
            body = self._without_fence(stripped)
            if body[:1] == "{" or (body[:1] == "[" and self._format is ToolFormat.JSON):
                self._open(self._held[: len(self._held) - len(body)], body)
                return
            may_be_fence = any(fence.startswith(stripped) for fence in _FENCES) or not body
            if self._format is ToolFormat.JSON and may_be_fence and not is_last:
                return
        self._state = _State.TEXT

    def _without_fence(self, text: str) -> str:
        if self._format is ToolFormat.JSON:
            for fence in _FENCES:
                if text.startswith(fence):
                    return text[len(fence) :].lstrip()
        return text

    def _text(self, is_last: bool) -> str:
        """Content up to a marker; the white space in front of it is no content."""
        text = self._held
        places = [(text.index(opener), opener) for opener in self._openers if opener in text]
        if places:
            place, opener = min(places)
            self._open(opener, text[place + len(opener) :])
            return text[:place].rstrip()
        if is_last or not self._openers:
            self._held = ""
            return text
        shown = text[: len(text) - longest_prefix_at_end(text, self._openers)].rstrip()
        self._held = text[len(shown) :]
        return shown

    def _open(self, opener: str, rest: str) -> None:
        self._opener, self._held = opener, rest
        self._announced = False
        if self._format is ToolFormat.MISTRAL:
            self._state = _State.NAME
            return
        self._scanner = CallScanner(self.num_calls, names=self._names if opener not in self._openers else None)
        self._state = _State.CALL

    def _name(self) -> None:
        """Mistral's two forms: a JSON list, or `name[ARGS]{…}`."""
        stripped = self._held.lstrip()
        if not stripped:
            return
        if stripped[0] in "[{" and not stripped.startswith("[ARGS]"):
            self._scanner = CallScanner(self.num_calls)
        elif "{" in stripped:
            name, _, _ = stripped.partition("{")
            stripped = stripped[len(name) :]
            self._scanner = CallScanner(self.num_calls, name=name.partition("[")[0].strip())
        else:
            return
        self._held = stripped
        self._state = _State.CALL

    def _call(self, calls: list[CallDelta]) -> str:
        scanner = self._scanner
        assert scanner is not None
        deltas, rest = scanner.push(self._held)
        self._announced = self._announced or bool(deltas)
        calls += deltas
        self._held = rest
        if scanner.has_failed:
            self._scanner = None
            self._state = _State.TEXT
            if not self._announced:
                return self._opener + scanner.raw  # it was text after all
            self.num_calls += scanner.num_calls + 1
            return ""
        if scanner.is_done:
            self.num_calls += scanner.num_calls
            self._scanner = None
            self._state = _State.AFTER
        return ""

    def _after(self, is_last: bool) -> None:
        """Between calls: closers and white space go; another call or text follows."""
        stripped = self._held.lstrip()
        for closer in _CLOSERS[self._format]:
            if stripped.startswith(closer):
                self._held = stripped[len(closer) :]
                return
        if is_last or not stripped:
            self._held = "" if is_last else self._held
            return
        if longest_prefix_at_end(stripped, (*_CLOSERS[self._format], *self._openers)) == len(stripped):
            return
        if self._format.takes_bare_json and stripped[0] == "{":
            self._open("", stripped)
            return
        self._held = stripped
        self._state = _State.TEXT


def longest_prefix_at_end(text: str, markers: Sequence[str]) -> int:
    """Characters at the end of `text` that may begin one of `markers`, without completing it."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest
