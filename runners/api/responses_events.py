"""The output items of a response and the typed events that build them up, in OpenAI's order.

response.created, response.in_progress
  response.output_item.added
    response.content_part.added, response.output_text.delta …, response.output_text.done, response.content_part.done
    or response.reasoning_text.delta …, .done; or response.function_call_arguments.delta …, .done
  response.output_item.done
response.completed or response.incomplete
"""

from __future__ import annotations

from typing import Any

from runners.api.endpoint import new_id
from runners.text.call_scanner import CallDelta
from runners.text.message_parser import MessageDelta

Event = dict[str, Any]


class ResponseBuilder:
    """Turns message deltas into events; `items` are the output as far as it has come.

    `new_call_id` names calls. `take` returns the events since the last call, in order.
    """

    def __init__(self, call_ids: Any) -> None:
        self.items: list[dict[str, Any]] = []
        self.reasoning = ""
        self._new_call_id = call_ids
        self._open: dict[str, Any] | None = None
        self._call_index = -1
        self._events: list[Event] = []
        self._sequence_number = 0

    def event(self, kind: str, **fields: Any) -> None:
        self._events.append({"type": kind, "sequence_number": self._sequence_number, **fields})
        self._sequence_number += 1

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def push(self, delta: MessageDelta, logprobs: list[dict[str, Any]] | None = None) -> None:
        if delta.reasoning:
            self._reasoning(delta.reasoning)
        if delta.content or logprobs:
            self._content(delta.content, logprobs or [])
        for call in delta.calls:
            self._call(call)

    def finish(self, status: str) -> None:
        """Close what is open, "completed" or "incomplete". An answer without anything has one empty message."""
        if not self.items:
            self._message()
        self._close(status)

    # --- items ----------------------------------------------------------------------------------------------------

    def _reasoning(self, text: str) -> None:
        item = self._open
        if item is None or item["type"] != "reasoning":
            item = self._add({"type": "reasoning", "id": f"rs_{new_id()}", "summary": [], "content": []})
            item["content"] = [{"type": "reasoning_text", "text": ""}]
        self.reasoning += text
        item["content"][0]["text"] += text
        self._item_event("response.reasoning_text.delta", content_index=0, delta=text)

    def _content(self, text: str, logprobs: list[dict[str, Any]]) -> None:
        item = self._message()
        part = item["content"][0]
        part["text"] += text
        if logprobs:
            part.setdefault("logprobs", []).extend(logprobs)
        self._item_event("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _message(self) -> dict[str, Any]:
        item = self._open
        if item is not None and item["type"] == "message":
            return item
        item = self._add({"type": "message", "id": f"msg_{new_id()}", "role": "assistant", "content": []})
        part = {"type": "output_text", "text": "", "annotations": []}
        self._item_event("response.content_part.added", content_index=0, part=dict(part))
        item["content"] = [part]
        return item

    def _call(self, delta: CallDelta) -> None:
        item = self._open
        if item is None or item["type"] != "function_call" or delta.index != self._call_index:
            self._call_index = delta.index
            fields = {"call_id": self._new_call_id(), "name": delta.name, "arguments": ""}
            item = self._add({"type": "function_call", "id": f"fc_{new_id()}", **fields})
        if delta.arguments:
            item["arguments"] += delta.arguments
            self._item_event("response.function_call_arguments.delta", delta=delta.arguments)

    def _add(self, item: dict[str, Any]) -> dict[str, Any]:
        self._close("completed")
        item["status"] = "in_progress"
        self.items.append(item)
        self._open = item
        self.event("response.output_item.added", output_index=len(self.items) - 1, item=dict(item))
        return item

    def _close(self, status: str) -> None:
        item = self._open
        if item is None:
            return
        item["status"] = status
        match item["type"]:
            case "reasoning":
                text = item["content"][0]["text"]
                self._item_event("response.reasoning_text.done", content_index=0, text=text)
            case "message":
                part = item["content"][0]
                done = {"text": part["text"], "logprobs": part.get("logprobs", [])}
                self._item_event("response.output_text.done", content_index=0, **done)
                self._item_event("response.content_part.done", content_index=0, part=part)
            case "function_call":
                done = {"name": item["name"], "arguments": item["arguments"]}
                self._item_event("response.function_call_arguments.done", **done)
        self.event("response.output_item.done", output_index=len(self.items) - 1, item=item)
        self._open = None

    def _item_event(self, kind: str, **fields: Any) -> None:
        self.event(kind, item_id=self.items[-1]["id"], output_index=len(self.items) - 1, **fields)
