"""Screens that the dashboard is looked at on, as options of a browser context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

DESKTOP: dict[str, Any] = {"viewport": {"width": 1440, "height": 900}}
PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 844},
    "is_mobile": True,
    "has_touch": True,
    "device_scale_factor": 2,
}

OpenPage = Callable[..., Any]
"""Opens a URL in a context with such options; returns a `playwright.sync_api.Page`."""
