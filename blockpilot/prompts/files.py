"""Prompts of sweeps, training and evaluation, by set name or from a file.

sets.py lists the named sets. Files: `.jsonl` and `.ndjson`, one row per line; `.json`, a list of rows; `.parquet`;
`.txt`, one prompt per line. conversations.py lists the field names of prompts. A row may also have a `set`, by
default the file's stem, and `follow_ups` (list of the user's later turns).
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

NUM_REASONS = 3  # reasons that a message lists
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
    """Conversation that ends with a turn of the user or a tool, and the name of its prompt set.

    `follow_ups` are later turns of the user, each asked after an answer of the target.
    """

    set: str
    messages: tuple[Message, ...]
    follow_ups: tuple[str, ...] = ()

    def followed_up(self, answer: str) -> "Prompt":
        """The conversation with the target's answer and the next follow-up appended."""
        turns = Message("assistant", answer), Message("user", self.follow_ups[0])
        return Prompt(self.set, (*self.messages, *turns), self.follow_ups[1:])

    @property
    def text(self) -> str:
        """Readable text: the message itself, or `role: content` paragraphs for several messages."""
        if len(self.messages) == 1:
            return self.messages[0].content
        return "\n\n".join(f"{m.role}: {m.content}" for m in self.messages)

    def to_json(self) -> str:
        """One line of JSON, which `load_prompts` can read."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "Prompt":
        """Inverse of `to_json`, unchecked."""
        fields = json.loads(line)
        messages = tuple(Message(**message) for message in fields["messages"])
        return cls(fields["set"], messages, tuple(fields["follow_ups"]))

    def encode(self, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
        """Token ids up to the answer: by the chat template, or of `text` if the tokenizer has no template.

        Control tokens in a message are encoded as text, so they cannot begin or end a turn. Raises ValueError for
        messages that the template refuses, such as for their roles or their order.
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
    """Token ids of messages by the chat template, with optional tools; see `Prompt.encode`.

    Control tokens in the messages, the tools or chat_template_kwargs are encoded as text. TEMPLATE_DEFAULTS apply
    to options that chat_template_kwargs lacks.
    """
    control_tokens = _control_tokens(tokenizer)
    template_inputs = [list(messages), list(tools), dict(chat_template_kwargs)]
    if any(token in text for text in _strings(template_inputs) for token in control_tokens):
        return _encode_separately(tokenizer, template_inputs, control_tokens)
    return tuple(_render(tokenizer, template_inputs, tokenize=True, return_dict=False))


def _encode_separately(
    tokenizer: PreTrainedTokenizerBase,
    template_inputs: list[Any],
    control_tokens: Sequence[str],
) -> tuple[int, ...]:
    """Token ids by the chat template, with the control tokens of its inputs encoded as text.

    Markers replace the control tokens in the inputs. The rendered text is split at the markers and encoded in pieces.
    """
    marker = uuid.uuid4().hex
    longest_first = sorted(control_tokens, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first)))
    numbers = {token: i for i, token in enumerate(longest_first)}

    def marked(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda match: f"{marker}{numbers[match[0]]}.", value)
        if isinstance(value, dict):
            return {marked(key): marked(inside) for key, inside in value.items()}
        return [marked(inside) for inside in value] if isinstance(value, list | tuple) else value

    try:
        template_inputs = marked(template_inputs)
    except RecursionError:
        raise ValueError("messages: nested too deeply") from None
    # Alternately rendered text and the number of a control token.
    pieces = re.split(rf"{marker}(\d+)\.", _render(tokenizer, template_inputs, tokenize=False))
    ids = list[int]()
    for index, piece in enumerate(pieces):
        text = longest_first[int(piece)] if index % 2 else piece
        ids += tokenizer(text, add_special_tokens=False, split_special_tokens=index % 2 == 1)["input_ids"]
    return tuple(ids)


def _strings(value: Any) -> Iterator[str]:
    """All strings in a JSON value, including field names."""
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            pending += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            pending += value


def _render(tokenizer: PreTrainedTokenizerBase, template_inputs: list[Any], **options: Any) -> Any:
    """Text or token ids of the chat template for [messages, tools, chat_template_kwargs]."""
    messages, tools, extra_kwargs = template_inputs
    try:
        return tokenizer.apply_chat_template(
            messages, **{"tools": tools or None} | TEMPLATE_DEFAULTS | extra_kwargs | options
        )
    except Exception as error:  # a template is a program and may raise anything on unusual messages
        raise ValueError(f"chat template: {first_line(error)}") from None


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Texts that the tokenizer encodes as control tokens."""
    return [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]


def load_prompts(name_or_path: str, num: int | None = None, seed: int = 0) -> list[Prompt]:
    """First `num` prompts (by default all) of a named set or file, in a random order.

    The order depends only on the seed and on each prompt's text; repeated prompts are dropped. Unreadable rows of a
    file are set aside, with a warning in the log. Raises ValueError for an unknown name, a set that cannot be
    obtained, or a file without a readable row.
    """
    if num is not None and num < 1:
        raise ValueError(f"number of prompts must be at least 1, got {num}")
    if name_or_path in PROMPT_SETS:
        conversations = read_set(name_or_path)
        prompts = [Prompt(name_or_path, (Message("user", turns[0]),), turns[1:]) for turns in conversations]
    else:
        prompts, set_aside = read_prompts(Path(name_or_path))
        if set_aside:
            num_rows = len(prompts) + len(set_aside)
            log.warning("%s: %d of %d rows set aside: %s", name_or_path, len(set_aside), num_rows, reasons(set_aside))
    in_order = sorted(dict.fromkeys(prompts), key=lambda prompt: _digest("order", seed, prompt.text))
    return in_order[:num]


class SetAside(NamedTuple):
    """An unreadable row: its position, such as "line 7", and the reason."""

    where: str
    reason: str


class PromptFile(NamedTuple):
    """Prompts of a file in the file's order, and the rows set aside."""

    prompts: list[Prompt]
    set_aside: list[SetAside]


def read_prompts(path: Path) -> PromptFile:
    """Read every row of a prompt file. Raises ValueError for a file without a readable row."""
    name = FileName.of(path)
    if name.ending not in ENDINGS:
        raise ValueError(
            f"unknown prompt set {str(path)!r}: choose one of {', '.join(PROMPT_SETS)}, or a file that ends with"
            f" {', '.join(ENDINGS)}, as it is or packed ({', '.join(COMPRESSIONS)})"
        )
    if not path.is_file():
        raise ValueError(f"prompt file not found: {path}")
    prompt_file = PromptFile([], [])
    for where, row in read_rows(path):
        try:
            if isinstance(row, ValueError):
                raise row
            conversation = conversation_of(row)
            turns = tuple(Message(*turn) for turn in conversation.turns)
            prompt_file.prompts.append(Prompt(conversation.set or name.stem, turns, conversation.follow_ups))
        except ValueError as error:
            prompt_file.set_aside.append(SetAside(where, str(error)))
    if not prompt_file.prompts:
        rows = f"no prompt in {len(prompt_file.set_aside)} rows: {reasons(prompt_file.set_aside)}"
        raise ValueError(f"{path}: {rows if prompt_file.set_aside else 'holds no prompts'}")
    return prompt_file


def reasons(set_aside: Sequence[SetAside]) -> str:
    """The first NUM_REASONS reasons and the number of further ones, as text."""
    first = [f"{where}: {reason}" for where, reason in set_aside[:NUM_REASONS]]
    num_more = len(set_aside) - len(first)
    return "; ".join([*first, *[f"and {num_more} more"] * (num_more > 0)])


def save_prompts(path: Place, prompts: Iterable[Prompt]) -> None:
    """Write a .jsonl file that `load_prompts` reads."""
    write_text(path, "".join(f"{prompt.to_json()}\n" for prompt in prompts))


def split(prompts: Iterable[Prompt], held_out: float, seed: int = 0) -> tuple[list[Prompt], list[Prompt]]:
    """(train, held out) prompts; a hash of each prompt's text holds it out with probability `held_out`.

    The decision does not depend on other prompts, so the two sides never share a text.
    """
    if not 0.0 <= held_out <= 1.0:
        raise ValueError(f"held_out must be between 0 and 1, got {held_out}")
    sides: tuple[list[Prompt], list[Prompt]] = ([], [])
    for prompt in prompts:
        sides[_share("split", seed, prompt.text) < held_out].append(prompt)
    return sides


def answer_limit(prompt: Prompt, most: int) -> int:
    """Token limit of an answer in measurements of full batches: from half of `most` to `most`, by prompt.

    With equal limits plain decoding would end all answers of a batch in one step and prefill the next prompts
    together, unlike any real load.
    """
    smallest = max(1, most // 2)
    return smallest + int(_share("limit", 0, prompt.text) * (most - smallest + 1))


def is_in_half(prompt: Prompt) -> bool:
    """True for about half of all prompts: those that are greedy in measurements of mixed traffic."""
    return _share("greedy", 0, prompt.text) < 0.5


def _share(purpose: str, seed: int, text: str) -> float:
    """Hash of the text as a number in [0, 1)."""
    return int.from_bytes(_digest(purpose, seed, text)[:4], "big") / 2**32


def _digest(purpose: str, seed: int, text: str) -> bytes:
    return hashlib.sha256(f"{purpose}\0{seed}\0{text}".encode()).digest()
