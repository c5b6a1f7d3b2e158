"""BPE merges of a SentencePiece-style vocabulary, derived from its piece scores, with a cache on disk.

SentencePiece joins, again and again, the neighbours whose union has the highest score (the leftmost of equals). The
same as ranked merges: every split of a piece into two pieces, ordered by the score of the whole.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

MergeIds = list[tuple[int, int]]


def derive_merges(tokens: Sequence[str], scores: Sequence[float]) -> MergeIds:
    """Pairs (left id, right id), best first, for `tokens` with one score each."""
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    ranked: list[tuple[float, int, int, int]] = []
    for token_id, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left_id = ids.get(token[:cut])
            if left_id is None:
                continue
            right_id = ids.get(token[cut:])
            if right_id is not None:
                # Among equal scores (runs of spaces) the longer left part wins: the leftmost symbol grows first.
                ranked.append((-scores[token_id], -cut, left_id, right_id))
    ranked.sort()
    return [(left_id, right_id) for _, _, left_id, right_id in ranked]


def load_merges(path: Path, vocab_size: int) -> MergeIds | None:
    """Merges stored by `store_merges`, or None if there are none or they do not fit the vocabulary."""
    flat = array("I")
    try:
        flat.frombytes(path.read_bytes())
    except (OSError, ValueError):
        return None
    if len(flat) % 2 or (flat and max(flat) >= vocab_size):
        return None
    return list(zip(flat[::2], flat[1::2], strict=True))


def store_merges(path: Path, merges: MergeIds) -> None:
    """Write `merges` so that a reader sees all of them or none. A folder that cannot be written costs a log line."""
    flat = array("I", (token_id for pair in merges for token_id in pair))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(flat.tobytes())
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        logger.warning("tokenizer cache %s not written: %s", path, error)
