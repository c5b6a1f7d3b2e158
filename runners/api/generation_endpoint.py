"""What completions and chat completions share: check, tokenise, submit, then stream or collect."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from starlette.datastructures import State

from runners.api import validation
from runners.api.endpoint import Endpoint, Exchange, new_id
from runners.api.generation import Choice, Delta, TextOptions, collect
from runners.api.interfaces import RequestStream
from runners.api.logprobs import TokenTexts
from runners.api.prompts import Prompt, TextThreads, require_text
from runners.api.protocol import GenerationFields, RequestParser
from runners.api.sse import EventWriter, data_event, stream_choices
from runners.api.streams import AwaitedStream
from runners.api.structured import check_grammar, requested_grammar
from runners.api.submission import Plan, Submitter, plan_choices
from runners.messages import ModelInfo
from runners.text.assets import TextAssets

RequestT = TypeVar("RequestT", bound=GenerationFields)


@dataclass(slots=True)
class Generation(Generic[RequestT]):
    """One checked request on its way: what was asked, of which model, and the choices that answer it."""

    id: str
    created: int
    model: str
    info: ModelInfo
    request: RequestT
    assets: TextAssets | None
    token_texts: TokenTexts
    prompts: list[Prompt]
    choices: list[Choice] = field(default_factory=list)
    firsts: list[Choice] = field(default_factory=list)  # one a prompt
    discarded: list[Choice] = field(default_factory=list)

    def keep_best(self, results: list[Delta], plan: Plan) -> list[Delta]:
        """Keep of each prompt's choices the best by mean log-probability; returns their results, best first."""
        kept: list[tuple[Choice, Delta]] = []
        for start in range(0, len(results), plan.num_generated):
            group = range(start, start + plan.num_generated)
            ranked = sorted(group, key=lambda index: -_mean_logprob(results[index]))  # equal ones keep their order
            kept += [(self.choices[index], results[index]) for index in ranked[: plan.num_kept]]
        chosen = [choice for choice, _ in kept]
        self.discarded = [choice for choice in self.choices if choice not in chosen]
        self.choices = chosen
        for index, choice in enumerate(chosen):
            choice.index = index
        return [result for _, result in kept]

    def usage(self) -> dict[str, Any]:
        """Token counts so far; a prompt with several choices counts once."""
        prompt_tokens = sum(len(prompt.ids) for prompt in self.prompts)
        completion_tokens = sum(choice.completion_tokens for choice in [*self.choices, *self.discarded])
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in self.firsts)},
        }

    def facts(self) -> dict[str, Any]:
        """What the request log says about it."""
        usage = self.usage()
        return {
            "id": self.id,
            "model": self.model,
            "stream": bool(self.request.stream),
            "prompt_tokens": usage["prompt_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "finish_reasons": [choice.finish_reason for choice in self.choices],
        }

    @property
    def includes_usage(self) -> bool:
        options = self.request.stream_options
        return options is not None and bool(options.include_usage)

    @property
    def skips_special_tokens(self) -> bool:
        return self.request.skip_special_tokens is not False


class GenerationEndpoint(Endpoint, Generic[RequestT]):
    """Subclasses say how prompts come from the request, how events and answers look, and their names."""

    parser: RequestParser[RequestT]
    id_prefix: ClassVar[str]
    chunk_object: ClassVar[str]
    prompt_field: ClassVar[str]

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._token_texts: dict[str, tuple[TextAssets | None, TokenTexts]] = {}

    @property
    def threads(self) -> TextThreads:
        threads: TextThreads = self._state.threads
        return threads

    # --- what subclasses provide ----------------------------------------------------------------------------------

    @abstractmethod
    async def prompts(self, request: RequestT, info: ModelInfo, assets: TextAssets | None) -> list[Prompt]:
        """What to continue, as token ids inside the vocabulary."""

    @abstractmethod
    def default_max_tokens(self) -> int | None:
        """`max_tokens` of a request that names none; None: what the context leaves."""

    def echo(self, generation: Generation[RequestT], prompt: Prompt) -> str:
        """Text that comes before the generated one."""
        return ""

    def grammar(self, request: RequestT, assets: TextAssets | None, prompts: Sequence[Prompt]) -> tuple[str, str]:
        """What the output is constrained to, and the field that asks for it; empty for free text."""
        return requested_grammar(request)

    def shown_specials(self, request: RequestT, assets: TextAssets | None) -> dict[int, str]:
        """Special tokens whose text is needed although special tokens are skipped."""
        return {}

    def make_choice(
        self,
        generation: Generation[RequestT],
        prompt: Prompt,
        stream: RequestStream,
        options: TextOptions,
    ) -> Choice:
        """The next choice of `generation`."""
        return Choice(len(generation.choices), prompt, stream, options, echo=self.echo(generation, prompt))

    @abstractmethod
    def template(self, generation: Generation[RequestT], choice: Choice) -> EventWriter:
        """How the events of a choice look."""

    @abstractmethod
    def answer(self, generation: Generation[RequestT], results: list[Delta]) -> bytes:
        """The whole answer as JSON; `results` in the order of the choices."""

    # --- the life of a request ------------------------------------------------------------------------------------

    async def handle(self, exchange: Exchange) -> None:
        request = await self.parse_body(exchange, self.parser)
        await exchange.until_disconnect(self._generate(exchange, request))

    async def _generate(self, exchange: Exchange, request: RequestT) -> None:
        async with self.generation(request, exchange.key_id) as (generation, plan):
            try:
                if request.stream:
                    await self.stream(exchange, generation)
                else:
                    results = await collect(generation.choices)
                    if plan.chooses_best:
                        results = generation.keep_best(results, plan)
                    await exchange.reply(self.answer(generation, results))
            finally:
                exchange.facts |= generation.facts()

    @asynccontextmanager
    async def generation(self, request: RequestT, key_id: str) -> AsyncIterator[tuple[Generation[RequestT], Plan]]:
        """A checked and submitted request; at the end of the block nothing of it is left in the engine."""
        model, info = self.model(request.model)
        validation.check_fields(request)
        assets = self.text_assets(info)
        options = self._text_options(request, info, assets)
        # End markers that only the tokenizer's files name reach the engine as stop ids.
        params = validation.sampling_params(request, info, options.eos_token_ids)
        prompts = await self.prompts(request, info, assets)
        grammar, grammar_field = self.grammar(request, assets, prompts)
        if grammar:
            require_text(assets, grammar_field)
            await check_grammar(grammar, grammar_field, self.threads)
            params = msgspec.structs.replace(params, grammar=grammar)
        generation = Generation(
            id=f"{self.id_prefix}-{new_id()}",
            created=int(time.time()),
            model=model,
            info=info,
            request=request,
            assets=assets,
            token_texts=self._texts_of(model, assets),
            prompts=prompts,
        )
        plan = plan_choices(
            request,
            prompts,
            params,
            info,
            self.settings,
            key_id=key_id,
            default_max_tokens=self.default_max_tokens(),
            prompt_field=self.prompt_field,
        )
        try:
            await self._submit(generation, plan, options, key_id)
            yield generation, plan
        finally:
            for choice in [*generation.choices, *generation.discarded]:
                choice.abort()

    async def stream(self, exchange: Exchange, generation: Generation[RequestT]) -> None:
        """Every choice as it is generated."""
        templates = [self.template(generation, choice) for choice in generation.choices]
        await stream_choices(exchange, generation.choices, templates, self._closing(generation))

    def _text_options(self, request: RequestT, info: ModelInfo, assets: TextAssets | None) -> TextOptions:
        stops = validation.stop_strings(request)
        if stops:
            require_text(assets, "stop")
        eos_token_ids = frozenset(info.eos_token_ids)
        return TextOptions(
            tokenizer=None if assets is None else assets.tokenizer,
            eos_token_ids=eos_token_ids if assets is None else eos_token_ids | assets.eos_token_ids,
            stops=stops,
            min_tokens=request.min_tokens or 0,
            skip_special_tokens=request.skip_special_tokens is not False,
            include_stop=bool(request.include_stop_str_in_output),
            ignore_eos=bool(request.ignore_eos),
            shown_specials=self.shown_specials(request, assets) if request.skip_special_tokens is not False else {},
        )

    def _texts_of(self, model: str, assets: TextAssets | None) -> TokenTexts:
        known = self._token_texts.get(model)
        if known is None or known[0] is not assets:
            known = (assets, TokenTexts(None if assets is None else assets.tokenizer))
            self._token_texts[model] = known
        return known[1]

    async def _submit(self, generation: Generation[RequestT], plan: Plan, options: TextOptions, key_id: str) -> None:
        submitter = Submitter(
            self.engine,
            plan,
            generation.info,
            generation.model,
            generation.id,
            key_id=key_id,
            cache_salt=generation.request.cache_salt or "",
            limit_s=self.settings.request_deadline_s,
        )
        for index, planned in enumerate(plan.choices):
            stream = await submitter.submit(index)
            choice = self.make_choice(generation, planned.prompt, stream, options)
            generation.choices.append(choice)
            if planned.number == 0:
                generation.firsts.append(choice)
            if isinstance(stream, AwaitedStream) and generation.request.stream:
                await stream.wait_for_first()

    def _closing(self, generation: Generation[RequestT]) -> Callable[[], bytes]:
        """Makes what stands between the last token's event and `[DONE]`."""
        if not generation.includes_usage:
            return bytes
        return lambda: data_event({**self.envelope(generation), "choices": [], "usage": generation.usage()})

    def envelope(self, generation: Generation[RequestT]) -> dict[str, Any]:
        return {
            "id": generation.id,
            "object": self.chunk_object,
            "created": generation.created,
            "model": generation.model,
        }


def _mean_logprob(result: Delta) -> float:
    logprobs = [entry.logprob for entry in result.logprobs or ()]
    return sum(logprobs) / len(logprobs) if logprobs else float("-inf")
