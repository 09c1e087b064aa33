"""Training data of a draft: the target's own answers, as Parquet files with ANSWER_SCHEMA.

DFlash trains on the target's own answers (arXiv 2602.06036, section 4). The target can write the prompts, too
(Magpie, arXiv 2406.08464).
"""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from blockpilot.engine.engine import Engine
from blockpilot.pairs.loading import Pair
from blockpilot.prompts.files import Prompt, SetAside, reasons
from blockpilot.storage import first_line, whole
from blockpilot.types import Request, Sampling

log = logging.getLogger(__name__)

ANSWER_SCHEMA = pa.schema(
    [
        ("prompt_set", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("num_prompt_tokens", pa.int32()),
        ("temperature", pa.float32()),
        ("seed", pa.int64()),
    ]
)


class Answer(NamedTuple):
    """A row of ANSWER_SCHEMA; `tokens` are those of prompt and answer."""

    prompt_set: str
    tokens: list[int]
    num_prompt_tokens: int
    temperature: float
    seed: int


def generate_answers(
    pair: Pair,
    prompts: Sequence[Prompt],
    sampling: Sequence[Sampling],
    *,
    max_new_tokens: int,
    max_prompt_tokens: int,
    num_slots: int = 32,
) -> list[Answer]:
    """Answers of the target in the order of the prompts; `sampling` has one entry per prompt.

    Prompts longer than `max_prompt_tokens` or the model's own limit, and prompts that the chat template refuses, are
    left out, with a warning in the log.
    """
    answers, skipped = [], list[SetAside]()
    for number, (prompt, prompt_sampling) in enumerate(zip(prompts, sampling, strict=True), start=1):
        try:
            ids = prompt.encode(pair.tokenizer)
            _check_length(len(ids), max_prompt_tokens, pair.max_length)
        except ValueError as error:
            skipped.append(SetAside(f"prompt {number} ({prompt.set})", str(error)))
        else:
            answers.append(Answer(prompt.set, list(ids), len(ids), prompt_sampling.temperature, prompt_sampling.seed))
    if skipped:
        log.warning("%d of %d prompts left out: %s", len(skipped), len(prompts), reasons(skipped))
    # Sorted by length: less padding in prefill and attention.
    by_length = sorted(answers, key=lambda answer: answer.num_prompt_tokens)
    requests = [(answer.tokens, Sampling(answer.temperature, seed=answer.seed)) for answer in by_length]
    written = _generate(pair, requests, max_new_tokens, num_slots)
    for answer, tokens in zip(by_length, written, strict=True):
        answer.tokens.extend(tokens)
    return answers


def _check_length(num_tokens: int, max_prompt_tokens: int, model_length: int) -> None:
    if num_tokens >= model_length:
        raise ValueError(f"{num_tokens} tokens, the model's limit is {model_length} with the answer")
    if num_tokens > max_prompt_tokens:
        raise ValueError(f"{num_tokens} tokens, max_prompt_tokens is {max_prompt_tokens}")


def write_prompts(
    pair: Pair,
    seeds: Sequence[int],
    openings: Sequence[str] = ("",),
    *,
    max_new_tokens: int = 96,
    num_slots: int = 32,
) -> list[str]:
    """User turns written by the target, at most one per seed (Magpie, arXiv 2406.08464).

    A chat model continues its template from the beginning of the user's turn; the turns begin with the `openings`,
    used cyclically. Turns that do not end within `max_new_tokens`, contain special tokens or have fewer than three
    words are left out. Raises ValueError for a target without a chat template.
    """
    if not pair.tokenizer.chat_template:
        raise ValueError("a target without a chat template cannot write prompts")
    marker = "\x00"
    template = pair.tokenizer.apply_chat_template([{"role": "user", "content": marker}], tokenize=False)
    template_start, marker_found, _ = str(template).partition(marker)
    if not marker_found:
        raise ValueError("the chat template does not show the user's text")
    chosen_openings = [openings[i % len(openings)] for i in range(len(seeds))]
    requests = []
    for opening, seed in zip(chosen_openings, seeds, strict=True):
        ids: list[int] = pair.tokenizer(template_start + opening, add_special_tokens=False)["input_ids"]
        requests.append((ids, Sampling(1.0, top_p=0.9, seed=seed)))
    answers = _generate(pair, requests, max_new_tokens, num_slots)
    texts, special = [], set(pair.tokenizer.all_special_ids)
    for opening, tokens in zip(chosen_openings, answers, strict=True):
        if tokens[-1] in pair.stop_token_ids and special.isdisjoint(tokens[:-1]):
            texts.append((opening + str(pair.tokenizer.decode(tokens[:-1]))).strip())
    return [text for text in texts if len(text.split()) >= 3]


def _generate(
    pair: Pair, requests: Sequence[tuple[list[int], Sampling]], max_new_tokens: int, num_slots: int
) -> list[list[int]]:
    """Tokens that the target generates for each (prompt ids, sampling), in order, by plain decoding."""
    longest = max((len(ids) for ids, _ in requests), default=1)
    engine = Engine(pair, num_slots=num_slots, max_length=min(longest + max_new_tokens, pair.max_length))
    written: dict[int, list[int]] = {}
    for ids, sampling in requests:
        request = Request(tuple(ids), max_new_tokens, sampling, block_size=1, stop_token_ids=pair.stop_token_ids)
        written[engine.add(request)] = []
    while not engine.idle:
        for step in engine.step():
            written[step.request_id].extend(step.tokens)
    return list(written.values())


class AnswerSource(NamedTuple):
    """Name and revision of the target that wrote a file's answers."""

    target: str
    target_revision: str


def write_answers(path: Path, answers: Sequence[Answer], source: AnswerSource) -> None:
    """Write answers as Parquet with ANSWER_SCHEMA, atomically, with the source in the file's metadata."""
    schema = ANSWER_SCHEMA.with_metadata({"source": json.dumps(source._asdict())})
    table = pa.Table.from_pylist([answer._asdict() for answer in answers], schema=schema)
    with whole(path) as unfinished:
        pq.write_table(table, unfinished, compression="zstd")


def answer_source(path: Path) -> AnswerSource:
    """Source in the metadata of a Parquet file of answers; raises ValueError if there is none."""
    with _named(path):
        metadata = pq.read_schema(path).metadata or {}
        if b"source" not in metadata:
            raise ValueError("does not say which target wrote these answers")
        return AnswerSource(**json.loads(metadata[b"source"]))


def read_answers(path: Path) -> list[Answer]:
    """Answers of a Parquet file; raises ValueError if it is not a file of answers."""
    with _named(path):
        table = pq.read_table(path)
        if not table.schema.equals(ANSWER_SCHEMA):
            raise ValueError(f"columns {table.column_names}, expected {ANSWER_SCHEMA.names}")
        return [Answer(**row) for row in table.to_pylist()]


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn read errors into one-line ValueErrors that name the file."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: {first_line(error)}") from None
