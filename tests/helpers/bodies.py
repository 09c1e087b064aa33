"""Bodies of requests to OpenAI's API, and parsing of the answers."""

import json
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUESTION = [{"role": "user", "content": "What is a block?"}]
MODEL = {"model": "target"}
PROMPTS = {CHAT: {"messages": QUESTION}, COMPLETIONS: {"prompt": "Once"}}
LONG = {"prompt": "Once", "max_tokens": 250, "temperature": 0}
JsonObject = dict[str, Any]


def text_of(answer: JsonObject) -> str:
    choice = answer["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def events(text: str) -> list[JsonObject]:
    """JSON objects of a finished event stream."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def shown(choices: list[JsonObject]) -> str:
    """The text of a stream's choices."""
    return "".join(c["delta"].get("content") or "" if "delta" in c else c["text"] for c in choices)


def check_error(answer: JsonObject, *param: str | None) -> JsonObject:
    """Assert OpenAI's error shape, and the field it names."""
    assert set(answer) == {"error"}
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "\n" not in error["message"]
    if param:
        assert (error["param"],) == param
        assert str(param[0]).split(".")[0] in error["message"] or error["code"] == "context_length_exceeded"
    return error
