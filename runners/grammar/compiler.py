"""Compiled grammars inside the engine process: one compilation a grammar, in a thread, one matcher a request."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import llguidance

from runners.grammar.limits import GrammarError
from runners.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_MAX_COMPILED = 256


class _Vocabulary:
    """Our tokenizer as llguidance asks for one: bytes by id, and a way to encode text."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_ids[0]
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = sorted(
            token_id for token_id in {*tokenizer.pieces.special, *eos_token_ids} if token_id < vocab_size
        )

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "ignore")
        return self._tokenizer.encode(text, add_special_tokens=False, parse_special=False)


def grammar_vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> llguidance.LLTokenizer:
    """The trie of all token bytes; 0.3 s for 49,152 tokens. GrammarError without an end token."""
    ends = sorted(token_id for token_id in eos_token_ids if token_id < vocab_size)
    if not ends:
        raise GrammarError("the model has no end token, so that no grammar could ever end")
    wrapper = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, ends))
    return llguidance.LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=ends)


class GrammarCompiler:
    """Compiles grammars for one model. `load_tokenizer` is called once, in the compiling thread, at first use.

    Thread-safe. A grammar that failed to compile is remembered with its reason.
    """

    def __init__(
        self, load_tokenizer: Callable[[], Tokenizer | None], vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self.vocab_size = vocab_size
        self._load_tokenizer = load_tokenizer
        self._eos_token_ids = eos_token_ids
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[str, llguidance.LLMatcher | GrammarError] = OrderedDict()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def is_compiled(self, grammar: str) -> bool:
        """True when `matcher` will not compile."""
        with self._lock:
            return grammar in self._compiled

    def compile_soon(self, grammar: str, then: Callable[[], None]) -> None:
        """Compile in the thread, then call `then` there, whether it worked or not."""

        def compile_it() -> None:
            self._prototype(grammar)
            then()

        self._thread.submit(compile_it)

    def matcher(self, grammar: str) -> llguidance.LLMatcher:
        """A matcher of its own, at the start of the grammar. GrammarError when the grammar does not compile."""
        prototype = self._prototype(grammar)
        if isinstance(prototype, GrammarError):
            raise prototype
        return prototype.deep_copy()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _prototype(self, grammar: str) -> llguidance.LLMatcher | GrammarError:
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
                return known
        try:
            compiled: llguidance.LLMatcher | GrammarError = self._compile(grammar)
        except GrammarError as error:
            compiled = error
        except Exception as error:
            # The tokenizer may be unreadable: that is this request's error, not the end of the thread.
            compiled = GrammarError(f"{type(error).__name__}: {error}")
        with self._lock:
            self._compiled[grammar] = compiled
            while len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        if self._vocabulary is None:
            start = time.monotonic()
            tokenizer = self._load_tokenizer()
            if tokenizer is None:
                raise GrammarError("this model has no tokenizer")
            self._vocabulary = grammar_vocabulary(tokenizer, self.vocab_size, self._eos_token_ids)
            logger.info("vocabulary for grammars made in %.2f s", time.monotonic() - start)
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0)
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        return matcher
