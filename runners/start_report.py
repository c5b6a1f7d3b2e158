"""What a person wants to know when the server has started."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from runners.kv_cache.sizing import format_bytes
from runners.messages import ModelInfo

DEFAULT_URL = "http://localhost:3000"


def service_url(service_name: str, env: Mapping[str, str] = os.environ) -> str:
    """Where BentoML listens, from the map it gives its workers."""
    try:
        return str(json.loads(env["BENTOML_RUNNER_MAP"])[service_name])
    except (KeyError, ValueError, TypeError):
        return DEFAULT_URL


def start_report(info: ModelInfo, profile_name: str, url: str, version: str) -> str:
    """Model, profile, device, KV budget, and a line to try."""
    name = info.served_names[0]
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello!"}]})
    return "\n".join(
        (
            f"Wavelane {version} is ready at {url}",
            f"  model    {', '.join(info.served_names)} ({info.architecture}, {info.quantization}, "
            f"{info.parameters / 1e6:.0f}M parameters, {format_bytes(info.weight_bytes)}) from {info.source}",
            f"  profile  {profile_name}",
            f"  device   {info.device} ({info.executor} executor, {info.dtype}, {info.slots} slots)",
            f"  KV       {format_bytes(info.kv_bytes)}: {info.total_blocks} blocks of {info.block_tokens} tokens, "
            f"room for {info.peak_concurrency:.1f} requests of {info.max_context} tokens",
            f"  try      curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
        )
    )
