"""Prompts by set name or from a file: what sweeps, training and evaluation run on.

Named sets are listed in sets.py. Files: `.jsonl`, one object a line with `prompt` (text) or `messages` (list of
{role, content}) and optionally `set` and `follow_ups` (list of the user's later turns); `.parquet`, the same as
columns; `.txt`, one prompt a line. Blank lines are ignored; `set` defaults to the file's stem.
"""

import hashlib
import json
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from blockpilot.prompts.sets import PROMPT_SETS, read_set
from blockpilot.storage import Place, first_line, write_text

ROLES = ("system", "user", "assistant")
FILE_SUFFIXES = (".jsonl", ".parquet", ".txt")


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True)
class Prompt:
    """Conversation that ends with the user's turn, and the set that it belongs to.

    `follow_ups` are later turns of the user, each asked after an answer of the target.
    """

    set: str
    messages: tuple[Message, ...]
    follow_ups: tuple[str, ...] = ()

    def followed_up(self, answer: str) -> "Prompt":
        """Conversation continued by the target's answer and the next follow-up."""
        turns = Message("assistant", answer), Message("user", self.follow_ups[0])
        return Prompt(self.set, (*self.messages, *turns), self.follow_ups[1:])

    @property
    def text(self) -> str:
        """Readable text: the message itself, or `role: content` paragraphs where there are several."""
        if len(self.messages) == 1:
            return self.messages[0].content
        return "\n\n".join(f"{m.role}: {m.content}" for m in self.messages)

    def to_json(self) -> str:
        """One line of JSON, which `load_prompts` reads, too."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "Prompt":
        """Inverse of `to_json`, unchecked."""
        found = json.loads(line)
        messages = tuple(Message(**message) for message in found["messages"])
        return cls(found["set"], messages, tuple(found["follow_ups"]))

    def encode(self, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
        """Token ids before the answer, by the chat template, or of `text` where the tokenizer has none.

        A control token in a message's text is text: it begins and ends no turn. Raises ValueError for messages that
        the template refuses, such as their roles or their order.
        """
        if not tokenizer.chat_template:
            return tuple(tokenizer(self.text)["input_ids"])
        return encode_messages(tokenizer, [asdict(message) for message in self.messages])


def encode_messages(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()
) -> tuple[int, ...]:
    """Token ids by the chat template of messages, which may call tools; as `Prompt.encode`.

    A control token is text wherever it stands in the messages or the tools.
    """
    control = _control_tokens(tokenizer)
    if any(token in text for text in _strings([messages, tools]) for token in control):
        return _encode_apart(tokenizer, messages, tools, control)
    return tuple(_render(tokenizer, messages, tools, tokenize=True, return_dict=False))


def _encode_apart(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]],
    control: Sequence[str],
) -> tuple[int, ...]:
    """Token ids of the template around messages and tools, and of each control token in these by itself, as text."""
    mark = uuid.uuid4().hex
    longest_first = sorted(control, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first)))
    numbers = {token: i for i, token in enumerate(longest_first)}

    def marked(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda found: f"{mark}{numbers[found[0]]}.", value)
        if isinstance(value, dict):
            return {marked(key): marked(inside) for key, inside in value.items()}
        return [marked(inside) for inside in value] if isinstance(value, list | tuple) else value

    try:
        messages, tools = marked(messages), marked(tools)
    except RecursionError:
        raise ValueError("messages: nested too deeply") from None
    # Template, number of a control token, template, ...
    pieces = re.split(rf"{mark}(\d+)\.", _render(tokenizer, messages, tools, tokenize=False))
    ids = list[int]()
    for place, piece in enumerate(pieces):
        text = longest_first[int(piece)] if place % 2 else piece
        ids += tokenizer(text, add_special_tokens=False, split_special_tokens=place % 2 == 1)["input_ids"]
    return tuple(ids)


def _strings(value: Any) -> Iterator[str]:
    """All strings in a JSON value, names of fields among them."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            left += value


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]],
    **how: Any,
) -> Any:
    # The published Qwen3 drafts were trained without thinking; other templates ignore the option.
    how |= {"add_generation_prompt": True, "enable_thinking": False, "tools": list(tools) or None}
    try:
        return tokenizer.apply_chat_template(list(messages), **how)
    except Exception as error:  # a template is a program: on odd messages it may fail in any way
        raise ValueError(f"chat template: {first_line(error)}") from None


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Texts that a tokenizer reads as control tokens, wherever they stand."""
    return [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]


def load_prompts(name_or_path: str, num: int | None = None, seed: int = 0) -> list[Prompt]:
    """First `num` prompts (by default all) of a named set or file, in an order drawn by `seed`.

    The order depends only on the seed and the prompts' own texts; repeated prompts are dropped. Raises ValueError for
    an unknown name, a set that cannot be obtained, or a malformed or empty file.
    """
    if num is not None and num < 1:
        raise ValueError(f"number of prompts must be at least 1, got {num}")
    prompts = dict.fromkeys(_read(name_or_path))
    if not prompts:
        raise ValueError(f"{name_or_path}: holds no prompts")
    return sorted(prompts, key=lambda prompt: _digest("order", seed, prompt.text))[:num]


def save_prompts(path: Place, prompts: Iterable[Prompt]) -> None:
    """Write a .jsonl file that `load_prompts` reads."""
    write_text(path, "".join(f"{prompt.to_json()}\n" for prompt in prompts))


def split(prompts: Iterable[Prompt], held_out: float, seed: int = 0) -> tuple[list[Prompt], list[Prompt]]:
    """(train, held out): a prompt is held out with probability `held_out`, by a hash of its own text.

    Its side does not depend on the other prompts, so the two never share a text.
    """
    if not 0.0 <= held_out <= 1.0:
        raise ValueError(f"held_out must be between 0 and 1, got {held_out}")
    sides: tuple[list[Prompt], list[Prompt]] = ([], [])
    for prompt in prompts:
        sides[_share("split", seed, prompt.text) < held_out].append(prompt)
    return sides


def answer_limit(prompt: Prompt, most: int) -> int:
    """Tokens of an answer at most in a measurement of full batches: from half of `most` to `most`, by prompt.

    With equal limits plain decoding would end all answers of a batch in one step and prefill the next prompts
    together, as no real load does.
    """
    least = max(1, most // 2)
    return least + int(_share("limit", 0, prompt.text) * (most - least + 1))


def _share(purpose: str, seed: int, text: str) -> float:
    """Number in [0, 1) by a hash of the text."""
    return int.from_bytes(_digest(purpose, seed, text)[:4], "big") / 2**32


def _digest(purpose: str, seed: int, text: str) -> bytes:
    return hashlib.sha256(f"{purpose}\0{seed}\0{text}".encode()).digest()


def _read(name_or_path: str) -> Iterator[Prompt]:
    if name_or_path in PROMPT_SETS:
        conversations = read_set(name_or_path)
        return (Prompt(name_or_path, (Message("user", turns[0]),), turns[1:]) for turns in conversations)
    path = Path(name_or_path)
    if path.suffix not in FILE_SUFFIXES:
        raise ValueError(
            f"unknown prompt set {name_or_path!r}: choose one of {', '.join(PROMPT_SETS)}"
            f" or a {', '.join(FILE_SUFFIXES)} file"
        )
    if not path.is_file():
        raise ValueError(f"prompt file not found: {path}")
    rows = _parquet_rows(path) if path.suffix == ".parquet" else _text_rows(path)
    return (_to_prompt(row, where, default_set=path.stem) for where, row in rows)


def _text_rows(path: Path) -> Iterator[tuple[str, object]]:
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        where = f"{path}, line {number}"
        try:
            text = line.decode("utf-8").strip()
            row = json.loads(text) if text and path.suffix == ".jsonl" else {"prompt": text}
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: not UTF-8 text ({error.reason})") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
        if text:
            yield where, row


def _parquet_rows(path: Path) -> Iterator[tuple[str, object]]:
    try:
        names = pq.read_schema(path).names
        columns = [name for name in ("prompt", "messages", "set", "follow_ups") if name in names]
        table = pq.read_table(path, columns=columns)
    except pa.ArrowException as error:
        raise ValueError(f"{path}: not a Parquet file ({first_line(error)})") from error
    if not {"prompt", "messages"} & set(columns):
        raise ValueError(f"{path}: needs a column prompt or messages, has {', '.join(names) or 'none'}")
    for number, row in enumerate(table.to_pylist(), start=1):
        yield f"{path}, row {number}", row


def _to_prompt(row: object, where: str, default_set: str) -> Prompt:
    """Check one row of a file; errors begin with `where`."""
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object with prompt or messages, got {_brief(row)}")
    prompt, messages, prompt_set = row.get("prompt"), row.get("messages"), row.get("set")
    follow_ups = [] if row.get("follow_ups") is None else row["follow_ups"]
    if (prompt is None) == (messages is None):
        raise ValueError(f"{where}: expected either prompt or messages, got {_brief(row)}")
    if messages is None:
        messages = [{"role": "user", "content": prompt}]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where}: messages must be a list of {{role, content}}, got {_brief(messages)}")
    if prompt_set is not None and (not isinstance(prompt_set, str) or not prompt_set):
        raise ValueError(f"{where}: set must be a name, got {_brief(prompt_set)}")
    if not isinstance(follow_ups, list):
        raise ValueError(f"{where}: follow_ups must be a list of texts, got {_brief(follow_ups)}")
    turns = tuple(_to_message(message, where) for message in messages)
    if turns[-1].role != "user":
        raise ValueError(f"{where}: the last message must be the user's, got role {turns[-1].role!r}")
    later = (_to_message({"role": "user", "content": text}, where).content for text in follow_ups)
    return Prompt(prompt_set or default_set, turns, tuple(later))


def _to_message(message: object, where: str) -> Message:
    if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
        raise ValueError(f"{where}: a message needs role and content, got {_brief(message)}")
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise ValueError(f"{where}: role must be one of {', '.join(ROLES)}, got {_brief(role)}")
    if not isinstance(content, str):
        raise ValueError(f"{where}: a prompt must be text, got {_brief(content)}")
    try:
        content.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise ValueError(f"{where}: a prompt must be Unicode text, got {_brief(content)}") from error
    if not content.strip():
        raise ValueError(f"{where}: empty prompt")
    return Message(role, content)


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
