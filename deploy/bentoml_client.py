"""Text from the native BentoML endpoint, piece by piece: python deploy/bentoml_client.py "Once upon a time"."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import bentoml


def generate(url: str, prompt: str, max_tokens: int = 64) -> Iterator[str]:
    """Pieces of the continuation of `prompt`, as the server at `url` makes them."""
    with bentoml.SyncHTTPClient(url) as client:
        pieces: Iterator[str] = client.generate(prompt=prompt, max_tokens=max_tokens)
        yield from pieces


if __name__ == "__main__":
    for piece in generate("http://localhost:3000", " ".join(sys.argv[1:]) or "Once upon a time"):
        print(piece, end="", flush=True)
    print()
