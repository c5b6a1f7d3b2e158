"""Wait for what another thread or process brings about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def eventually(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    """Until `condition` holds; TimeoutError after `limit_s`."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 -- nothing sets an event for it
            await asyncio.sleep(0.005)
