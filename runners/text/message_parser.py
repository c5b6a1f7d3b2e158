"""An assistant's message out of generated text: reasoning, content, tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field

from runners.text.call_scanner import CallDelta
from runners.text.reasoning import ReasoningSplitter
from runners.text.tool_parser import ToolParser


@dataclass(slots=True)
class MessageDelta:
    """What one piece of text adds to the message."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def add(self, more: MessageDelta) -> None:
        """Append `more`; pieces of one call become one."""
        self.content += more.content
        self.reasoning += more.reasoning
        for call in more.calls:
            if self.calls and self.calls[-1].index == call.index:
                self.calls[-1].arguments += call.arguments
            else:
                self.calls.append(call)


class MessageParser:
    """Reasoning first, then tool calls in what is left. Either may be absent."""

    def __init__(self, reasoning: ReasoningSplitter | None, tools: ToolParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def has_calls(self) -> bool:
        return self._tools is not None and self._tools.has_calls

    def push(self, text: str) -> MessageDelta:
        delta = MessageDelta(content=text)
        if self._reasoning is not None:
            delta.reasoning, delta.content = self._reasoning.push(text)
        if self._tools is not None and delta.content:
            delta.content, delta.calls = self._tools.push(delta.content)
        return delta

    def finish(self) -> MessageDelta:
        """The rest, once no more text follows."""
        delta = MessageDelta()
        if self._reasoning is not None:
            delta.reasoning, delta.content = self._reasoning.finish()
        if self._tools is not None:
            content, calls = self._tools.push(delta.content)
            rest, last_calls = self._tools.finish()
            delta.content, delta.calls = content + rest, calls + last_calls
        return delta
