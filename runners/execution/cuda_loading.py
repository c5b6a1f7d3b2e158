"""From a decoder on a GPU to a cuda executor that is warm: pool, streams, graphs, account of memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from runners.execution.cuda_executor import CudaExecutor
from runners.execution.device_memory import MemoryAccount, workspace_bytes
from runners.execution.device_sampler import SHARED_NUM_TOP
from runners.execution.device_streams import CudaStreams
from runners.execution.step_graphs import CapturedSteps
from runners.execution.step_keys import (
    MAX_GRAPH_TOKENS,
    MIN_WHOLE_PROMPT,
    WHOLE_PROMPT_STEP,
    DecodeKey,
    PackedKey,
    SampleMode,
    StepKey,
    context_bucket,
    packed_key,
    width_bucket,
)
from runners.grammar.compiler import GrammarCompiler
from runners.kv_cache.device_cache import DeviceCache
from runners.kv_cache.sizing import DeviceMemory, PoolSize
from runners.models.decoder import Decoder

logger = logging.getLogger(__name__)

COMMON_WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)
COMMON_CONTEXTS = (256, 512, 1024, 2048, 4096)
COMMON_PROMPTS = (16, 32, 64, 128, 192, 256, 384, 512, 1024, 1536, 2048)
# Prompts of one wave, and their tokens together.
COMMON_WAVES = ((8, 128), (8, 192), (8, 256), (16, 256), (16, 384), (32, 512), (32, 768), (32, 1024))


def common_keys(slots: int, max_context: int, tells_whole_prompts: bool = False) -> list[StepKey]:
    """Greedy decode steps of common widths and contexts, and single prompts."""
    contexts = sorted({context_bucket(length, max_context) for length in COMMON_CONTEXTS})
    keys: list[StepKey] = [
        DecodeKey(width, context) for width in COMMON_WIDTHS if width <= slots for context in contexts
    ]
    short = context_bucket(1, max_context)
    keys += [
        packed_key(0, [length], length, max_context, is_whole_prompt=tells_whole_prompts)[0]
        for length in COMMON_PROMPTS
        if length <= max_context
    ]
    keys += [PackedKey(tokens, 0, prompts, 32, short) for prompts, tokens in COMMON_WAVES if prompts <= slots]
    return keys


def largest_pass(max_context: int) -> PackedKey:
    """The longest pass that runs from a graph. Captured first, it gives the graphs' pool its blocks: passes that grow
    from one capture to the next would each add some, and none would fit the one after."""
    length = min(max_context, MAX_GRAPH_TOKENS)
    return packed_key(0, [length] * (MAX_GRAPH_TOKENS // length), length, max_context)[0]


def later_keys(slots: int, max_context: int) -> list[StepKey]:
    """Greedy decode steps of every width; those of `common_keys` are among them."""
    contexts = sorted({context_bucket(length, max_context) for length in COMMON_CONTEXTS})
    widths = sorted({width_bucket(width) for width in range(1, slots + 1)})
    return [DecodeKey(width, context) for context in contexts for width in widths]


def uncaptured_passes(slots: int, max_context: int, token_budget: int) -> list[PackedKey]:
    """Long passes, which run eagerly at least once: a prompt alone, short prompts together, each beside decode rows and
    without."""
    longest = min(token_budget, max_context)
    keys = []
    for rows in (0, min(8, slots)):
        for sequences, query in ((1, longest), (8, min(128, longest)), (8, 32)):
            tokens = max(longest, MAX_GRAPH_TOKENS + 1)
            keys.append(PackedKey(rows + tokens, rows, rows + sequences, query, context_bucket(longest, max_context)))
    return keys


def whole_prompts(max_context: int) -> list[StepKey]:
    """A single prompt of each length that the vendor's attention makes a plan for, up to a mixed step's; long ones
    first, like `largest_pass`."""
    lengths = range(MIN_WHOLE_PROMPT, min(MAX_GRAPH_TOKENS, max_context) + 1, WHOLE_PROMPT_STEP)
    return [packed_key(0, [length], length, max_context, is_whole_prompt=True)[0] for length in reversed(lengths)]


def sampling_variants(max_context: int, vocab_size: int) -> list[StepKey]:
    """A decode step with everything that sampling may have to do."""
    everything = SampleMode(True, True, True, is_adjusted=True, num_top=min(SHARED_NUM_TOP, vocab_size))
    return [DecodeKey(1, context_bucket(1, max_context), everything)]


def load_cuda_executor(
    decoder: Decoder,
    size_pool_for: Callable[[DeviceMemory], PoolSize],
    *,
    streams: CudaStreams | None = None,
    make_cache: Callable[[PoolSize], DeviceCache] | None = None,
    slots: int,
    max_context: int,
    max_step_tokens: int,
    eos_token_ids: Sequence[int] = (),
    grammars: GrammarCompiler | None = None,
    capture_at_start: bool = True,
    batch_invariant: bool = False,
) -> tuple[CudaExecutor, PoolSize]:
    """An executor on the decoder's GPU and its KV pool.

    `size_pool_for` gets the device's memory, what steps will need counted as used. Executors of several models share
    `streams`, and pools through `make_cache`; without these it has its own. `capture_at_start` captures the common
    graphs; the others follow in idle time, or as they are needed.
    """
    device, config = decoder.device, decoder.config
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    reserved = workspace_bytes(config, max_step_tokens, slots, decoder.dtype.itemsize)
    pool = size_pool_for(DeviceMemory(total_bytes, total_bytes - free_bytes + reserved))
    if make_cache is not None:
        cache = make_cache(pool)
    else:
        cache = DeviceCache(config, pool.num_blocks, pool.block_tokens, decoder.dtype, device)
    held_before = torch.cuda.memory_reserved(device)
    graphs = CapturedSteps(device)
    executor = CudaExecutor(
        decoder,
        cache,
        streams if streams is not None else CudaStreams(device),
        graphs,
        slots=slots,
        max_context=max_context,
        eos_token_ids=eos_token_ids,
        grammars=grammars,
        batch_invariant=batch_invariant,
    )
    started = time.perf_counter()
    keys = common_keys(slots, max_context, executor.tells_whole_prompts)
    later = [*(whole_prompts(max_context) if executor.tells_whole_prompts else ()), *later_keys(slots, max_context)]
    if batch_invariant:
        keys = [DecodeKey(width_bucket(slots), max_context), *(key for key in keys if isinstance(key, PackedKey))]
        later = [key for key in later if isinstance(key, PackedKey)]
    executor.warm_up([largest_pass(max_context), *keys] if capture_at_start else keys[:1])
    executor.compile(uncaptured_passes(slots, max_context, max_step_tokens))
    executor.compile(sampling_variants(max_context, config.vocab_size))
    if capture_at_start:
        executor.capture_later(later)
    logger.info("captured %d graphs in %.1f s", graphs.num_graphs, time.perf_counter() - started)
    logger.info("%s", MemoryAccount.read(device, decoder.weight_bytes, pool.pool_bytes, held_before))
    return executor, pool
