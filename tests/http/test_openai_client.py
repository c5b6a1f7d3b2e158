"""The official client's own flows, LangChain's and LlamaIndex's, against the default model or the one of `--base-url`:
their types accept what a server sends."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from langchain_openai import ChatOpenAI
from llama_index.core import PromptTemplate
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, SecretStr

pytestmark = pytest.mark.model

MESSAGES: list[Any] = [{"role": "user", "content": "Say hello in one sentence."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    country: Literal["France", "Italy"]
    is_capital: bool


@pytest.fixture(scope="module")
def client(smollm2_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{smollm2_url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_chat_and_stream(client: openai.OpenAI, model: str) -> None:
    fields: Any = {"model": model, "messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**fields, extra_body={"cache_salt": "a"})
    assert whole.choices[0].message.content
    chunks = list(
        client.chat.completions.create(
            **fields, stream=True, stream_options={"include_usage": True}, extra_body={"cache_salt": "b"}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_a_tools_loop(client: openai.OpenAI, model: str) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    first = client.chat.completions.create(
        model=model, messages=messages, tools=[WEATHER], tool_choice="required", temperature=0, max_tokens=300
    )
    assert first.choices[0].finish_reason == "tool_calls"
    message = first.choices[0].message
    assert message.tool_calls
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls:
        assert call.type == "function"
        assert set(json.loads(call.function.arguments)) == {"city"}
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "4 degrees, rain"})
    last = client.chat.completions.create(
        model=model, messages=messages, tools=[WEATHER], tool_choice="none", temperature=0, max_tokens=30
    )
    assert last.choices[0].message.content
    assert not last.choices[0].message.tool_calls


def test_streamed_calls_through_the_clients_accumulator(client: openai.OpenAI, model: str) -> None:
    with client.chat.completions.stream(
        model=model,
        messages=MESSAGES,
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=100,
        temperature=0,
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        completion = stream.get_final_completion()
    assert [event.name for event in done] == ["get_weather"]
    assert completion.choices[0].finish_reason == "stop"


def test_parsed_structured_output(client: openai.OpenAI, model: str) -> None:
    completion = client.chat.completions.parse(
        model=model, messages=[{"role": "user", "content": "Describe Paris."}], response_format=City, max_tokens=60
    )
    assert isinstance(completion.choices[0].message.parsed, City)


def test_responses(client: openai.OpenAI, model: str) -> None:
    response = client.responses.create(model=model, input="Say hello.", max_output_tokens=20, temperature=0)
    assert response.output_text
    assert response.usage is not None
    with client.responses.stream(model=model, input="Say hello.", max_output_tokens=400, temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert "response.output_text.delta" in kinds
    assert final.output_text
    parsed = client.responses.parse(model=model, input="Describe Rome.", text_format=City, max_output_tokens=60)
    assert isinstance(parsed.output_parsed, City)


def test_embeddings_and_models(client: openai.OpenAI, model: str) -> None:
    answer = client.embeddings.create(model=model, input=["a cat", "a dog"])  # asks for base64 and decodes it
    assert [len(item.embedding) for item in answer.data] == [576, 576]
    assert model in [served.id for served in client.models.list()]


async def test_the_asynchronous_client(smollm2_url: str, model: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{smollm2_url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(model=model, prompt="One two", max_tokens=5, stream=True)
        assert len([chunk async for chunk in stream]) == 5


def test_langchain(smollm2_url: str, model: str) -> None:
    chat = ChatOpenAI(
        model=model, base_url=f"{smollm2_url}/v1", api_key=SecretStr("none"), max_retries=0, temperature=0
    )
    assert chat.invoke("Say hello.", max_tokens=10).content
    assert "".join(str(chunk.content) for chunk in chat.stream("Say hello.", max_tokens=10))
    city = chat.with_structured_output(City).invoke("Describe Paris.", max_tokens=60)
    assert isinstance(city, City)


def test_llama_index(smollm2_url: str, model: str) -> None:
    chat = OpenAILike(
        model=model,
        api_base=f"{smollm2_url}/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        max_retries=0,
        max_tokens=60,
        temperature=0,
    )
    messages = [ChatMessage(role="user", content="Say hello.")]
    assert chat.chat(messages).message.content
    assert "".join(chunk.delta or "" for chunk in chat.stream_chat(messages))
    city = chat.structured_predict(City, PromptTemplate("Describe Paris."))
    assert isinstance(city, City)
