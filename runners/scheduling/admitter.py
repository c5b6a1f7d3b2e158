"""Carries out an admission: from the queue into slots and blocks, sorted by how each prompt will be computed."""

from __future__ import annotations

from runners.request import Request
from runners.scheduling.admission import AdmissionPolicy
from runners.scheduling.live_set import LiveSet
from runners.scheduling.policies import Policies
from runners.scheduling.stepper import Stepper


class Admitter:
    """Asks the policies, moves the requests."""

    def __init__(self, policies: Policies, admission: AdmissionPolicy, live: LiveSet, stepper: Stepper) -> None:
        self._policies = policies
        self._admission = admission
        self._live = live
        self._stepper = stepper
        self._row_steps_before: int | None = None  # how many steps had carried decode rows at the last admission

    def admit(self, now: float) -> None:
        """Admit what may join now: long prompts become cursors, the others one prefill launch a group."""
        live = self._live
        if not live.waiting or live.flights:  # a flight owns the prefill buffers; arrivals wait until it has landed
            self._admission.reset_hold()
            return
        if live.prefills or self._stepper.cursors_starve:
            return
        if len(live.rows) and self._stepper.num_row_steps == self._row_steps_before:
            return  # between two admissions everyone who decodes gets a token
        if not self._admission.may_admit(len(live.waiting), len(live.rows)):
            return
        batch = self._take(now)
        if batch:
            self._row_steps_before = self._stepper.num_row_steps
        for embeds in (False, True):  # an embedding's pass gives no tokens: it is a launch of its own
            part = [entry for entry in batch if bool(entry[0].params.pooling) is embeds]
            groups = self._policies.wave.group([num_tokens for _, num_tokens in part])
            live.prefills.extend([part[index][0] for index in group] for group in groups)

    def _take(self, now: float) -> list[tuple[Request, int]]:
        """(request, tokens to compute) of those that got slot and blocks; stops at the first that gets none."""
        live, policies = self._live, self._policies
        batch: list[tuple[Request, int]] = []
        num_long = 0
        while len(batch) < policies.admission.max_batch and live.slots.num_free:
            request = live.waiting.peek()
            if request is None or request.num_owed:
                break
            if not live.fits(request, now):
                continue
            waited_s = now - request.arrival_time
            num_tokens = len(request.token_ids) - live.num_cached(request)
            if not request.params.pooling and self._becomes_cursor(num_tokens):
                live.take_slot(request, highest=True, num_tokens=num_tokens, waited_s=waited_s)
                live.cursors.append(request)
                self._admission.reset_hold()
                continue
            is_long = num_tokens > policies.wave.max_prompt_tokens
            if is_long and num_long >= policies.admission.max_long_prompts:
                break
            if not live.take_blocks(request, headroom_blocks=len(live.rows) + len(batch)):
                break
            live.take_slot(request, highest=False, num_tokens=num_tokens, waited_s=waited_s)
            self._admission.reset_hold()
            num_long += is_long
            batch.append((request, num_tokens))
        return batch

    def _becomes_cursor(self, num_tokens: int) -> bool:
        if not self._policies.mix.takes(num_tokens):
            return False
        # With nothing to mix with, a prompt that may join a wave is better off there.
        return bool(self._live.rows) or not self._policies.wave.takes(num_tokens)
