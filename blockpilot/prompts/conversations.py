"""Conversation in a row of a prompt file, by the field names that published data sets and clients use.

A row has `messages` (also in the `body` of a request of OpenAI's batch files), a `prompt`, ShareGPT's
`conversations`, the `turns` of a benchmark, or a text named instruction (with its input), question, problem, query,
input or text. Ambiguous rows are refused.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

TURNS = ("messages", "prompt", "conversations", "conversation", "turns")  # the first one present is used
TEXTS = ("instruction", "question", "problem", "query")  # a row may have one of them only
LAST = ("input", "text")  # used only without the others; with one they are a part of the prompt, or the answer
BELOW = {"instruction": ("input", "context"), "question": ("context",)}
"""Fields with texts that the field refers to, as in Alpaca, Dolly and SQuAD."""
PROMPT_FIELDS = (*TURNS, *TEXTS, *LAST)
FIELDS = (*PROMPT_FIELDS, "body", "context", "system", "system_prompt", "set", "follow_ups")
ROLES = ("system", "user", "assistant", "tool")
OTHER_ROLES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "ai", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("function", "observation"), "tool"),
    "developer": "system",
}
TEXT_PARTS = ("text", "input_text", "output_text")


class Turn(NamedTuple):
    """One message; the role is one of ROLES."""

    role: str
    content: str


class Conversation(NamedTuple):
    """Turns before an answer, the user's later turns, and the name of the prompt set if the row has one."""

    turns: tuple[Turn, ...]
    follow_ups: tuple[str, ...]
    set: str | None


def conversation_of(row: object) -> Conversation:
    """The conversation in a row: an object, a text, or a list of messages. Raises ValueError if there is none.

    Trailing turns of the assistant are the answer and are left out.
    """
    if isinstance(row, str | list):
        row = {"prompt" if isinstance(row, str) else "messages": row}
    if not isinstance(row, dict):
        raise ValueError(f"expected an object with a prompt, got {brief(row)}")
    row = {name.lower(): value for name, value in row.items()} | row
    fields = row["body"] if isinstance(row.get("body"), dict) else row
    name = _prompt_field(fields)
    turns, later = _turns(name, fields)
    return Conversation(tuple(turns), (*later, *_follow_ups(row.get("follow_ups"))), _set(row.get("set")))


def has_prompt_field(names: Collection[str]) -> bool:
    """True if one of a row's field names, in upper or lower case, may hold a prompt."""
    return not {name.lower() for name in names}.isdisjoint((*PROMPT_FIELDS, "body"))


def is_message(value: object) -> bool:
    """True for a single message of a conversation, which is not a row by itself."""
    return isinstance(value, dict) and not {"role", "from"}.isdisjoint(value) and set(TURNS).isdisjoint(value)


def brief(value: object) -> str:
    """A value, shortened for an error message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _prompt_field(row: Mapping[str, Any]) -> str:
    present = [name for name in PROMPT_FIELDS if row.get(name) is not None]
    if not present:
        raise ValueError(f"needs one of {', '.join(PROMPT_FIELDS)}, got {brief(row)}")
    texts = [name for name in present if name in TEXTS]
    if present[0] in TEXTS and len(texts) > 1:
        raise ValueError(f"{' and '.join(texts)} could each be the prompt: call one of them prompt")
    return present[0]


def _set(name: object) -> str | None:
    if name is not None and (not isinstance(name, str) or not name):
        raise ValueError(f"set must be a name, got {brief(name)}")
    return name


def _follow_ups(texts: object) -> list[str]:
    if texts is not None and not isinstance(texts, list):
        raise ValueError(f"follow_ups must be a list of texts, got {brief(texts)}")
    return [_text(text) for text in texts or ()]


def _turns(name: str, row: Mapping[str, Any]) -> tuple[list[Turn], list[str]]:
    """Turns before the answer, and later turns of the user."""
    value, later = row[name], list[str]()
    if name in ("prompt", "turns") and (texts := _user_texts(value)):
        turns, later = [Turn("user", _text(texts[0]))], [_text(text) for text in texts[1:]]
    elif isinstance(value, list) or (name in TURNS and name != "prompt"):
        turns = _messages(name, value)
    else:
        extras = [row.get(other) for other in BELOW.get(name, ())]
        below = [_text(extra) for extra in extras if isinstance(extra, str) and extra.strip()]
        turns = [Turn("user", "\n\n".join([_text(value), *below]))]
    # A system prompt next to `messages` or `prompt` is ignored, so that unfinished sweeps of such files can resume.
    system = None if name in ("messages", "prompt") else _first(row, "system", "system_prompt")
    if isinstance(system, str) and system.strip() and turns[0].role != "system":
        turns.insert(0, Turn("system", _text(system)))
    return turns, later


def _user_texts(value: object) -> list[Any]:
    """Texts of a list of user turns only: strings, or objects without a role. Empty for anything else."""
    if not isinstance(value, list):
        return []
    if all(isinstance(turn, str) for turn in value):
        return value
    if all(isinstance(turn, dict) and _first(turn, "role", "from") is None and "content" in turn for turn in value):
        return [turn["content"] for turn in value]
    return []


def _messages(name: str, messages: object) -> list[Turn]:
    if not isinstance(messages, list):
        raise ValueError(f"{name} must be a list of {{role, content}}, got {brief(messages)}")
    with_roles = [(_role(name, message), message) for message in messages]
    while with_roles and with_roles[-1][0] == "assistant":
        with_roles.pop()
    turns = [Turn(role, _content(role, message)) for role, message in with_roles]
    turns = [turn for turn in turns if turn.role != "system" or turn.content.strip()]  # drops empty system prompts
    if not turns or turns[-1].role not in ("user", "tool"):
        raise ValueError(f"{name}: before the answer, the last message must be the user's, got {brief(messages)}")
    return turns


def _role(name: str, message: object) -> str:
    if not isinstance(message, dict):
        raise ValueError(f"{name} must be a list of {{role, content}}, got {brief(message)} in it")
    role = _first(message, "role", "from")
    lower = role.strip().lower() if isinstance(role, str) else ""
    standard = OTHER_ROLES.get(lower, lower)
    if standard not in ROLES:
        raise ValueError(f"role must be one of {', '.join((*ROLES, *OTHER_ROLES))}, got {brief(role)}")
    return standard


def _content(role: str, message: Any) -> str:
    content = _first(message, "content", "value", "text")
    if content is None and (message.get("tool_calls") or message.get("function_call")):
        raise ValueError("an assistant's tool call without text: prompts are text")
    return content if role == "system" and content == "" else _text(content)


def _first(mapping: Mapping[str, Any], *names: str) -> Any:
    """The first value that is present and not None, or None."""
    return next((mapping[name] for name in names if mapping.get(name) is not None), None)


def _text(content: object) -> str:
    """Text of a string or of a list of text parts. Raises ValueError for other types, bad Unicode or blank text."""
    if isinstance(content, list) and content:
        content = "\n".join(map(_part_text, content))
    if not isinstance(content, str):
        raise ValueError(f"a prompt must be text, got {brief(content)}")
    try:
        content.encode()
    except UnicodeEncodeError as error:  # JSON may contain half of a surrogate pair
        raise ValueError(f"a prompt must be Unicode text, got {brief(content)}") from error
    if not content.strip():
        raise ValueError("empty prompt")
    return content


def _part_text(part: object) -> str:
    """Text of one part; the server reads parts in the same way (jobs/serving/messages.py)."""
    if isinstance(part, dict) and part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    raise ValueError(f"a prompt must be text, got the part {brief(part)}")
