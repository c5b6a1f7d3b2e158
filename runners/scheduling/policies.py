"""The profile's scheduling sections, fitted to what the executor can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from runners.execution.executor import Capabilities
from runners.scheduling.admission import AdmissionLimits
from runners.scheduling.chunk import ChunkPolicy
from runners.scheduling.mix import MixPolicy
from runners.scheduling.seq import SeqPolicy
from runners.scheduling.wave import WavePolicy

if TYPE_CHECKING:
    from configs.schema import Profile

MixMode = Literal["off", "merge", "overlap"]


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What the model and the executor allow. `max_context` in tokens, `slots` requests on the device at once."""

    max_context: int
    slots: int
    eos_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Policies:
    """One policy a section, and one line for each that had to fall back."""

    admission: AdmissionLimits
    wave: WavePolicy
    chunk: ChunkPolicy
    mix: MixPolicy
    seq: SeqPolicy
    width: Literal["exact", "pow2"]
    max_queued_requests: int
    notices: tuple[str, ...]

    @classmethod
    def resolve(cls, profile: Profile, capabilities: Capabilities) -> Policies:
        """Switch off, or replace by the next best, what the executor lacks."""
        notices = []
        waves = profile.wave.enabled and capabilities.wave
        if profile.wave.enabled and not capabilities.wave:
            notices.append("wave.enabled: this executor packs no prompts; each prompt prefills alone")
        mode, notice = _mix_mode(profile.mix.mode, capabilities)
        if notice:
            notices.append(notice)
        seq = profile.seq.enabled and capabilities.seq
        if profile.seq.enabled and not capabilities.seq:
            notices.append("seq.enabled: this executor has no sequential path; one request decodes as a batch of one")
        admission = profile.admission
        max_batch = admission.max_batch if admission.max_batch != "auto" else 64 if waves else 8
        chunk = ChunkPolicy(profile.chunk.tokens, profile.wave.max_rows)
        return cls(
            admission=AdmissionLimits(
                min_batch=admission.min_batch,
                max_hold_steps=admission.max_hold_steps,
                max_batch=max_batch,
                max_long_prompts=admission.max_long_prompts,
                cold_window_us=admission.cold_window_us,
                cold_silence_us=admission.cold_silence_us,
            ),
            wave=WavePolicy(
                waves,
                profile.wave.grouping,
                profile.wave.max_prompt_tokens,
                profile.wave.max_rows,
                profile.wave.sub_wave,
            ),
            chunk=chunk,
            mix=MixPolicy(mode, profile.mix.token_budget, profile.mix_min_prompt_tokens, chunk),
            seq=SeqPolicy(seq),
            width=profile.decode.width,
            max_queued_requests=admission.max_queued_requests,
            notices=tuple(notices),
        )


def _mix_mode(wanted: MixMode, capabilities: Capabilities) -> tuple[MixMode, str | None]:
    if wanted == "overlap" and not capabilities.overlap:
        if capabilities.mix:
            return "merge", "mix.mode overlap: this executor has no second stream; merge is used"
        return (
            "off",
            "mix.mode overlap: this executor has no second stream and no mixed steps; prompts prefill alone",
        )
    if wanted == "merge" and not capabilities.mix:
        return "off", "mix.mode merge: this executor cannot mix prefill and decode; prompts prefill alone"
    return wanted, None
