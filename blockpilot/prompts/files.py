"""Prompts by set name or from a file: what sweeps, training and evaluation run on.

Named sets are listed in sets.py. Files: `.jsonl` and `.ndjson`, one row a line; `.json`, a list of rows; `.parquet`;
`.txt`, one prompt a line. conversations.py has the names that a row's prompt may have. A row may also have a `set`,
by default the file's stem, and `follow_ups` (list of the user's later turns).
"""

import hashlib
import json
import logging
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from blockpilot.prompts.conversations import conversation_of
from blockpilot.prompts.rows import COMPRESSIONS, ENDINGS, FileName, read_rows
from blockpilot.prompts.sets import PROMPT_SETS, read_set
from blockpilot.storage import Place, first_line, write_text

NUM_REASONS = 3  # that a message gives
# The published Qwen3 drafts were trained without thinking; other templates ignore the option.
TEMPLATE_DEFAULTS = {"add_generation_prompt": True, "enable_thinking": False}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True)
class Prompt:
    """Conversation that ends with the user's turn, or a tool's, and the set that it belongs to.

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
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] = (),
    chat_template_kwargs: Mapping[str, Any] = TEMPLATE_DEFAULTS,
) -> tuple[int, ...]:
    """Token ids by the chat template of messages, which may call tools; as `Prompt.encode`.

    A control token is text wherever it stands in the messages, the tools or chat_template_kwargs: what the template
    reads beside, with TEMPLATE_DEFAULTS for what is missing.
    """
    control = _control_tokens(tokenizer)
    given = [list(messages), list(tools), dict(chat_template_kwargs)]
    if any(token in text for text in _strings(given) for token in control):
        return _encode_apart(tokenizer, given, control)
    return tuple(_render(tokenizer, given, tokenize=True, return_dict=False))


def _encode_apart(
    tokenizer: PreTrainedTokenizerBase,
    given: list[Any],
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
        given = marked(given)
    except RecursionError:
        raise ValueError("messages: nested too deeply") from None
    # Template, number of a control token, template, ...
    pieces = re.split(rf"{mark}(\d+)\.", _render(tokenizer, given, tokenize=False))
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


def _render(tokenizer: PreTrainedTokenizerBase, given: list[Any], **how: Any) -> Any:
    """The template's text or tokens of messages, tools and further arguments."""
    messages, tools, more = given
    try:
        return tokenizer.apply_chat_template(messages, **{"tools": tools or None} | TEMPLATE_DEFAULTS | more | how)
    except Exception as error:  # a template is a program: on odd messages it may fail in any way
        raise ValueError(f"chat template: {first_line(error)}") from None


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Texts that a tokenizer reads as control tokens, wherever they stand."""
    return [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]


def load_prompts(name_or_path: str, num: int | None = None, seed: int = 0) -> list[Prompt]:
    """First `num` prompts (by default all) of a named set or file, in an order drawn by `seed`.

    The order depends only on the seed and the prompts' own texts; repeated prompts are dropped. Rows of a file that
    cannot be read are set aside, with a warning in the log. Raises ValueError for an unknown name, a set that cannot
    be obtained, or a file with nothing that can be read.
    """
    if num is not None and num < 1:
        raise ValueError(f"number of prompts must be at least 1, got {num}")
    if name_or_path in PROMPT_SETS:
        sets = read_set(name_or_path)
        prompts = [Prompt(name_or_path, (Message("user", turns[0]),), turns[1:]) for turns in sets]
    else:
        prompts, set_aside = read_prompts(Path(name_or_path))
        if set_aside:
            num_rows = len(prompts) + len(set_aside)
            log.warning("%s: %d of %d rows set aside: %s", name_or_path, len(set_aside), num_rows, reasons(set_aside))
    order = sorted(dict.fromkeys(prompts), key=lambda prompt: _digest("order", seed, prompt.text))
    return order[:num]


class SetAside(NamedTuple):
    """A row that cannot be read: where it is, such as "line 7", and why."""

    where: str
    reason: str


class PromptFile(NamedTuple):
    """Prompts of a file in its order, and the rows set aside."""

    prompts: list[Prompt]
    set_aside: list[SetAside]


def read_prompts(path: Path) -> PromptFile:
    """Every row of a prompt file. Raises ValueError for a file with nothing that can be read."""
    name = FileName.of(path)
    if name.ending not in ENDINGS:
        raise ValueError(
            f"unknown prompt set {str(path)!r}: choose one of {', '.join(PROMPT_SETS)}, or a file that ends with"
            f" {', '.join(ENDINGS)}, as it is or packed ({', '.join(COMPRESSIONS)})"
        )
    if not path.is_file():
        raise ValueError(f"prompt file not found: {path}")
    found = PromptFile([], [])
    for where, row in read_rows(path):
        try:
            if isinstance(row, ValueError):
                raise row
            conversation = conversation_of(row)
            turns = tuple(Message(*turn) for turn in conversation.turns)
            found.prompts.append(Prompt(conversation.set or name.stem, turns, conversation.follow_ups))
        except ValueError as error:
            found.set_aside.append(SetAside(where, str(error)))
    if not found.prompts:
        rows = f"no prompt in {len(found.set_aside)} rows: {reasons(found.set_aside)}"
        raise ValueError(f"{path}: {rows if found.set_aside else 'holds no prompts'}")
    return found


def reasons(set_aside: Sequence[SetAside]) -> str:
    """The first reasons, and how many more there are."""
    first = [f"{where}: {reason}" for where, reason in set_aside[:NUM_REASONS]]
    more = len(set_aside) - len(first)
    return "; ".join([*first, *[f"and {more} more"] * (more > 0)])


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
