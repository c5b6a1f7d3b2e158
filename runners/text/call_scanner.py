"""Tool calls written as JSON, read character by character: the name first, then its arguments as they come."""

from __future__ import annotations

import enum
import json
from collections.abc import Collection
from dataclasses import dataclass

_SPACE = " \t\r\n"
_ARGUMENT_KEYS = ("arguments", "parameters")


@dataclass(slots=True)
class CallDelta:
    """News of call number `index`: its name with the first one, then pieces of its arguments' JSON text."""

    index: int
    name: str | None = None
    arguments: str = ""


class _Progress(enum.Enum):
    MORE = enum.auto()
    ENDS_HERE = enum.auto()  # with this character
    ENDED_BEFORE = enum.auto()  # this character is not part of the value


class _Value:
    """One JSON value, without judging what is inside."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_is_literal", "text")

    def __init__(self) -> None:
        self.text = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._is_literal = False

    def feed(self, character: str) -> _Progress:
        if self._in_string:
            self.text += character
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
                return _Progress.MORE if self._depth else _Progress.ENDS_HERE
            return _Progress.MORE
        if self._is_literal and (character in _SPACE or character in ",]}"):
            return _Progress.ENDED_BEFORE
        self.text += character
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return _Progress.MORE if self._depth > 0 else _Progress.ENDS_HERE
        elif not self._depth:
            self._is_literal = True
        return _Progress.MORE

    def decoded(self) -> object:
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError):
            return None


class _State(enum.Enum):
    START = enum.auto()
    ITEM = enum.auto()  # in the list, before a call
    KEY = enum.auto()
    IN_KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    IN_VALUE = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


class CallScanner:
    """One call object `{"name": …, "arguments": {…}}`, or a list of them.

    `names` restricts what counts as a call (None: any name). `name` set: the text is the arguments alone. After `push`,
    `is_done` says that the value is complete, `has_failed` that it is no call; `raw` is all text taken so far.
    """

    def __init__(self, first_index: int, *, names: Collection[str] | None = None, name: str | None = None) -> None:
        self.raw = ""
        self.num_calls = 0
        self._first_index = first_index
        self._names = names
        self._only_arguments = name is not None
        self._state = _State.VALUE if name is not None else _State.START
        self._in_list = False
        self._key = "arguments" if name is not None else ""
        self._value = _Value()
        self._name = name
        self._waiting_arguments = ""
        self._has_arguments = False
        self._deltas: list[CallDelta] = []
        if name is not None:
            self._announce()

    @property
    def is_done(self) -> bool:
        return self._state is _State.DONE

    @property
    def has_failed(self) -> bool:
        return self._state is _State.FAILED

    def push(self, text: str) -> tuple[list[CallDelta], str]:
        """Deltas of the calls in `text`, and what of it lies behind the value."""
        taken = 0
        while taken < len(text) and self._state not in (_State.DONE, _State.FAILED):
            if self._step(text[taken]):
                taken += 1
        self.raw += text[:taken]
        deltas, self._deltas = self._deltas, []
        return _merged(deltas), text[taken:]

    def _step(self, character: str) -> bool:
        """One character; False when it is to be looked at again in the next state."""
        state = self._state
        if state is _State.IN_KEY or state is _State.IN_VALUE:
            return self._in_string_or_value(character)
        if character in _SPACE:
            return True
        if state is _State.VALUE:
            self._value = _Value()
            self._state = _State.IN_VALUE
            return False
        following = {
            (_State.START, "["): _State.ITEM,
            (_State.START, "{"): _State.KEY,
            (_State.ITEM, "{"): _State.KEY,
            (_State.ITEM, ","): _State.ITEM,
            (_State.ITEM, "]"): _State.DONE,
            (_State.KEY, '"'): _State.IN_KEY,
            (_State.KEY, ","): _State.KEY,
            (_State.COLON, ":"): _State.VALUE,
        }.get((state, character), _State.FAILED)
        if state is _State.START and following is _State.ITEM:
            self._in_list = True
        if (state, character) == (_State.KEY, "}"):
            self._end_call()
            return True
        self._state = following
        if following is _State.IN_KEY:
            self._value = _Value()
            return False
        return following is not _State.FAILED

    def _in_string_or_value(self, character: str) -> bool:
        progress = self._value.feed(character)
        if self._state is _State.IN_VALUE and self._key in _ARGUMENT_KEYS and progress is not _Progress.ENDED_BEFORE:
            self._argument_text(character)
        if progress is _Progress.MORE:
            return True
        if self._state is _State.IN_KEY:
            self._key = str(self._value.decoded())
            self._state = _State.COLON
        else:
            self._end_value()
        return progress is _Progress.ENDS_HERE

    def _argument_text(self, character: str) -> None:
        self._has_arguments = True
        if self._value.text[0] == '"':
            return  # JSON text inside a string: decoded when it is whole
        if self._is_announced:
            self._deltas.append(CallDelta(self._index, arguments=character))
        else:
            self._waiting_arguments += character

    def _end_value(self) -> None:
        self._state = _State.KEY
        decoded = self._value.decoded()
        if self._only_arguments:
            self.num_calls += 1
            self._state = _State.DONE
        elif self._key == "name":
            self._name = decoded if isinstance(decoded, str) and decoded else None
            if self._name is None or (self._names is not None and self._name not in self._names):
                self._state = _State.FAILED
                return
            self._announce()
        elif self._key in _ARGUMENT_KEYS and isinstance(decoded, str):
            self._waiting_arguments += decoded
            if self._is_announced:
                self._deltas.append(CallDelta(self._index, arguments=self._take_waiting()))

    @property
    def _index(self) -> int:
        return self._first_index + self.num_calls

    @property
    def _is_announced(self) -> bool:
        return self._name is not None

    def _announce(self) -> None:
        self._deltas.append(CallDelta(self._index, self._name, self._take_waiting()))

    def _take_waiting(self) -> str:
        waiting, self._waiting_arguments = self._waiting_arguments, ""
        return waiting

    def _end_call(self) -> None:
        if self._name is None:
            self._state = _State.FAILED
            return
        if not self._has_arguments:
            self._deltas.append(CallDelta(self._index, arguments="{}"))
        self.num_calls += 1
        self._name, self._has_arguments = None, False
        self._state = _State.ITEM if self._in_list else _State.DONE


def _merged(deltas: list[CallDelta]) -> list[CallDelta]:
    """Consecutive argument pieces of one call as one delta."""
    merged: list[CallDelta] = []
    for delta in deltas:
        if merged and merged[-1].index == delta.index and delta.name is None:
            merged[-1].arguments += delta.arguments
        else:
            merged.append(delta)
    return merged
