"""From a checked request to engine requests: one a choice, all limits settled before the first is sent."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from runners.api import validation
from runners.api.interfaces import Engine, RequestStream
from runners.api.prompts import Prompt
from runners.api.protocol import CompletionRequest, GenerationFields
from runners.api.settings import ApiSettings
from runners.api.streams import AwaitedStream, FollowingStream, LeadingStream
from runners.messages import ModelInfo
from runners.request import SamplingParams

# Choices of a shorter prompt compute it once each, at once: waiting for the first would take longer.
_SHARE_FROM_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class PlannedChoice:
    """`number` counts the choices of one prompt."""

    prompt: Prompt
    number: int
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Plan:
    """Every choice to generate, prompt by prompt; of each prompt's choices the `num_kept` best are the answer."""

    choices: list[PlannedChoice]
    num_kept: int
    num_generated: int
    priority: int
    session_id: str | None
    appends_to_session: bool

    @property
    def chooses_best(self) -> bool:
        return self.num_generated > self.num_kept


def plan_choices(
    request: GenerationFields,
    prompts: list[Prompt],
    params: SamplingParams,
    info: ModelInfo,
    settings: ApiSettings,
    *,
    key_id: str,
    default_max_tokens: int | None,
    prompt_field: str,
) -> Plan:
    """InvalidRequestError or ContextLengthError for what cannot be."""
    num_kept, num_generated = validation.choices_per_prompt(request, len(prompts))
    field, requested = validation.requested_max_tokens(request, settings)
    if num_generated > num_kept and params.logprobs is None:
        params = msgspec.structs.replace(params, logprobs=0)  # choices are ranked by them
    planned: list[PlannedChoice] = []
    for prompt in prompts:
        max_tokens = validation.max_tokens_for(
            len(prompt.ids),
            requested,
            default_max_tokens,
            info.max_context,
            param=prompt_field if requested is None else field,
        )
        if requested is None and settings.max_tokens is not None:
            max_tokens = min(max_tokens, settings.max_tokens)
        planned += [
            PlannedChoice(prompt, number, validation.with_limits(params, max_tokens, number))
            for number in range(num_generated)
        ]
    return Plan(
        planned,
        num_kept,
        num_generated,
        validation.priority(request, settings.most_urgent_of(key_id)),
        validation.session_id(request),
        appends_to_session=isinstance(request, CompletionRequest),
    )


class Submitter:
    """Sends the choices of one plan. The choices of a long prompt wait for the first one's prefill and share it."""

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        info: ModelInfo,
        model: str,
        request_id: str,
        *,
        key_id: str,
        cache_salt: str,
        limit_s: float | None,
    ) -> None:
        self._engine = engine
        self._plan = plan
        self._info = info
        self._model = model
        self._request_id = request_id
        self._key_id = key_id
        self._cache_salt = cache_salt
        self._limit_s = limit_s
        self._started: asyncio.Event | None = None

    async def submit(self, index: int) -> RequestStream:
        """The stream of choice `index`; call in order."""
        choice = self._plan.choices[index]
        if choice.number == 0:
            stream = await self._send(index)
            if self._plan.session_id is not None:
                return AwaitedStream(stream)
            self._started = asyncio.Event() if self._shares(choice) else None
            return stream if self._started is None else LeadingStream(stream, self._started)
        if self._started is None:
            return await self._send(index)
        return FollowingStream(lambda: self._send(index), self._started)

    def _shares(self, choice: PlannedChoice) -> bool:
        is_long = len(choice.prompt.ids) >= _SHARE_FROM_BLOCKS * self._info.block_tokens
        return is_long and self._plan.num_generated > 1 and choice.params.prompt_logprobs is None

    async def _send(self, index: int) -> RequestStream:
        choice = self._plan.choices[index]
        return await self._engine.submit(
            self._model,
            choice.prompt.ids,
            choice.params,
            request_id=f"{self._request_id}-{index}",
            priority=self._plan.priority,
            key_id=self._key_id,
            deadline_s=self._limit_s,
            session_id=self._plan.session_id,
            append_to_session=self._plan.session_id is not None and self._plan.appends_to_session,
            cache_salt=self._cache_salt,
            # It may be sent when the answer has begun: too late to refuse it.
            follows=choice.number > 0,
        )
