"""Requests with a grammar wait here, outside the scheduler, until the grammar is compiled; the loop never compiles."""

from __future__ import annotations

from collections.abc import Callable

from runners.grammar.compiler import GrammarCompiler
from runners.messages import AddRequest


class GrammarGate:
    """`resend` puts a message back into the engine's inbox once its grammar is ready (from the compiling thread)."""

    def __init__(self, compiler: GrammarCompiler | None, resend: Callable[[AddRequest], None]) -> None:
        self._compiler = compiler
        self._resend = resend
        self._waiting: set[str] = set()
        self._aborted: set[str] = set()

    def passes(self, message: AddRequest) -> bool:
        """False when the request has to wait for its grammar, or was aborted while it waited."""
        grammar = message.params.grammar
        if not grammar or self._compiler is None:
            return True
        request_id = message.request_id
        if request_id in self._aborted:
            self._aborted.discard(request_id)
            return False
        if self._compiler.is_compiled(grammar):
            self._waiting.discard(request_id)
            return True
        self._waiting.add(request_id)
        self._compiler.compile_soon(grammar, lambda: self._resend(message))
        return False

    def abort(self, request_id: str) -> None:
        """The client has gone; the message that comes back is to be dropped."""
        if request_id in self._waiting:
            self._waiting.discard(request_id)
            self._aborted.add(request_id)
