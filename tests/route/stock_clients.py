"""What unmodified clients of other makers do at a front door: conversation, stream, tools, embeddings. Own environment.

Usage: python stock_clients.py CLIENT MODEL URL KEY [URL KEY ...]

Prints one JSON line per front door, and ends with status 1 at the first thing that is not as it should be. Certificates
come from SSL_CERT_FILE.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

CITIES = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Bern", "Oslo"]}}, "required": ["city"]}
CITIES["additionalProperties"] = False
GREEDY = {"temperature": 0}
QUESTION = "What is the weather in Bern?"


class Place:
    """Where the clients go."""

    def __init__(self, url: str, model: str, key: str) -> None:
        self.url = url
        self.model = model
        self.key = key


def check(condition: object, what: object = "") -> None:
    """Unlike assert, never optimised away."""
    if not condition:
        raise AssertionError(what)


def anthropic_client(place: Place) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=place.url, api_key=place.key, max_retries=0, timeout=60)
    turns: list[Any] = [{"role": "user", "content": "Name a river."}]
    first = client.messages.create(
        model=place.model, system="You are a guide.", messages=turns, max_tokens=16, extra_body=GREEDY
    )
    check(first.content[0].type == "text" and first.content[0].text, first)
    check(first.stop_reason in ("end_turn", "max_tokens") and first.usage.output_tokens > 0, first)
    turns += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "Another one."}]
    with client.messages.stream(model=place.model, messages=turns, max_tokens=16, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    again = client.messages.create(model=place.model, messages=turns, max_tokens=16, extra_body=GREEDY)
    check(text == last.content[0].text == again.content[0].text, (text, again))
    check(last.usage.output_tokens == again.usage.output_tokens, (last, again))
    tools = [{"name": "weather", "description": "The weather of a city.", "input_schema": CITIES}]
    asked: list[Any] = [{"role": "user", "content": QUESTION}]
    with client.messages.stream(
        model=place.model, messages=asked, max_tokens=64, extra_body=GREEDY, tools=tools, tool_choice={"type": "any"}
    ) as stream:
        called = stream.get_final_message()
    [call] = called.content
    check(call.type == "tool_use" and call.input["city"] in ("Bern", "Oslo"), called)
    check(called.stop_reason == "tool_use", called)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    asked += [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    told = client.messages.create(model=place.model, messages=asked, max_tokens=16, extra_body=GREEDY, tools=tools)
    check(told.content, told)
    check(place.model in [model.id for model in client.models.list()])
    check(client.models.retrieve(place.model).display_name == place.model)
    counted = client.messages.count_tokens(model=place.model, messages=turns)
    whole = again.usage.input_tokens + (again.usage.cache_read_input_tokens or 0)
    check(counted.input_tokens == whole, (counted, again.usage))
    try:
        client.messages.create(model="no-such-model", messages=turns, max_tokens=4)
    except anthropic.NotFoundError as err:
        check(err.body["error"]["type"] == "not_found_error", err.body)
    else:
        check(False, "an unknown model was answered")


def ollama_client(place: Place) -> None:
    import ollama

    client = ollama.Client(host=place.url, headers={"authorization": f"Bearer {place.key}"}, timeout=60)
    check(place.model in [model.model for model in client.list().models])
    check("completion" in (client.show(place.model).capabilities or []))
    options = {"temperature": 0, "num_predict": 16}
    turns = [{"role": "user", "content": "Name a river."}]
    whole = client.chat(place.model, messages=turns, options=options)
    chunks = list(client.chat(place.model, messages=turns, options=options, stream=True))
    check("".join(chunk.message.content or "" for chunk in chunks) == whole.message.content, whole)
    check(chunks[-1].done and chunks[-1].eval_count == whole.eval_count, chunks[-1])
    turns += [whole.message, {"role": "user", "content": "Another one."}]
    check(client.chat(place.model, messages=turns, options=options).message.content)
    told = client.generate(place.model, prompt="The sea is", raw=True, options=options)
    check(told.response, told)
    answer = client.chat(place.model, messages=turns, options=options | {"num_predict": 48}, format=CITIES)
    check(json.loads(answer.message.content or "")["city"] in ("Bern", "Oslo"), answer)
    call = ollama.Message.ToolCall(
        function=ollama.Message.ToolCall.Function(name="weather", arguments={"city": "Oslo"})
    )
    tools = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": CITIES}}]
    shown = [
        {"role": "user", "content": "Weather in Oslo?"},
        ollama.Message(role="assistant", content="", tool_calls=[call]),
        {"role": "tool", "tool_name": "weather", "content": "rain"},
    ]
    # Ollama's API cannot force a call; so small a model repeats what it was shown.
    asked: list[Any] = [*shown, *shown, *shown, shown[0]]
    made = [client.chat(place.model, messages=asked, tools=tools, options=options | {"num_predict": 48})]
    made += list(
        client.chat(place.model, messages=asked, tools=tools, options=options | {"num_predict": 48}, stream=True)
    )
    calls = [one for answer in made for one in answer.message.tool_calls or []]
    check(
        [(one.function.name, dict(one.function.arguments)) for one in calls] == [("weather", {"city": "Oslo"})] * 2,
        made,
    )
    vectors = client.embed(place.model, input=["a river", "a mountain"]).embeddings
    check(len(vectors) == 2 and len(vectors[0]) == len(vectors[1]) > 64)
    check(len(client.embeddings(place.model, prompt="a river").embedding) == len(vectors[0]))
    try:
        client.chat("no-such-model", messages=turns)
    except ollama.ResponseError as err:
        check(err.status_code == 404 and "no-such-model" in err.error, err)
    else:
        check(False, "an unknown model was answered")


def langchain_client(place: Place) -> None:
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    @tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"sunny in {city}"

    model = ChatOpenAI(
        base_url=f"{place.url}/v1", api_key=place.key, model=place.model, temperature=0, max_tokens=32, max_retries=0
    )
    turns: list[Any] = [SystemMessage("You are a guide."), HumanMessage("Name a river.")]
    first = model.invoke(turns)
    check(first.content and first.usage_metadata["output_tokens"] > 0, first)
    pieces = list(model.stream(turns))
    check("".join(str(piece.content) for piece in pieces) == first.content, first)
    check(len(pieces) > 2, pieces)
    turns += [AIMessage(first.content), HumanMessage("Another one.")]
    check(model.invoke(turns).content)
    bound = model.bind_tools([weather], tool_choice="weather")
    asked: list[Any] = [HumanMessage(QUESTION)]
    called = bound.invoke(asked)
    check([call["name"] for call in called.tool_calls] == ["weather"], called)
    streamed = None
    for piece in bound.stream(asked):
        streamed = piece if streamed is None else streamed + piece
    check(streamed is not None and streamed.tool_calls[0]["args"] == called.tool_calls[0]["args"], streamed)
    result = weather.invoke(called.tool_calls[0])
    check(isinstance(result, ToolMessage))
    check(model.bind_tools([weather]).invoke([*asked, called, result]) is not None)
    embedder = OpenAIEmbeddings(
        base_url=f"{place.url}/v1", api_key=place.key, model=place.model, check_embedding_ctx_length=False
    )
    vectors = embedder.embed_documents(["a river", "a mountain"])
    check(len(vectors) == 2 and len(vectors[0]) > 64)


def llama_index_client(place: Place) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding
    from llama_index.llms.openai_like import OpenAILike

    def weather(city: str) -> str:
        """The weather of a city."""
        return f"sunny in {city}"

    model = OpenAILike(
        model=place.model, api_base=f"{place.url}/v1", api_key=place.key, is_chat_model=True,
        is_function_calling_model=True, context_window=1024, max_tokens=32, temperature=0.0, max_retries=0,
    )  # fmt: skip
    turns = [ChatMessage(role="system", content="You are a guide."), ChatMessage(role="user", content="Name a river.")]
    first = model.chat(turns)
    check(first.message.content, first)
    pieces = list(model.stream_chat(turns))
    check(pieces[-1].message.content == first.message.content, (pieces[-1], first))
    turns += [first.message, ChatMessage(role="user", content="Another one.")]
    check(model.chat(turns).message.content)
    check(model.complete("The sea is").text)
    tools = [FunctionTool.from_defaults(weather)]
    called = model.chat_with_tools(tools, user_msg=QUESTION, tool_required=True)
    [call] = model.get_tool_calls_from_response(called)
    check((call.tool_name, isinstance(call.tool_kwargs["city"], str)) == ("weather", True), call)
    embedder = OpenAILikeEmbedding(model_name=place.model, api_base=f"{place.url}/v1", api_key=place.key, max_retries=0)
    check(len(embedder.get_text_embedding("a river")) > 64)


CLIENTS: dict[str, Callable[[Place], None]] = {
    "anthropic": anthropic_client,
    "ollama": ollama_client,
    "langchain": langchain_client,
    "llama_index": llama_index_client,
}


def main(arguments: list[str]) -> int:
    client, model, *doors = arguments
    for url, key in zip(doors[::2], doors[1::2], strict=True):
        begun_s = time.monotonic()
        CLIENTS[client](Place(url, model, key))
        print(json.dumps({"client": client, "url": url, "seconds": round(time.monotonic() - begun_s, 1)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
