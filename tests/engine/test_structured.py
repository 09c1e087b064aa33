"""Structured outputs of random schemas: drafts change no text, and every complete text validates."""

import json
import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from blockpilot.constraints.automaton import GrammarCompiler
from blockpilot.constraints.grammar import schema_grammar
from blockpilot.engine.engine import Engine
from blockpilot.pairs.loading import Pair
from blockpilot.prompts.files import Message, Prompt
from blockpilot.types import Request, Sampling
from helpers.engines import run, text_of

NAMES = ("name", "age", "city", "color", "items", "price", "is_open", "tags", "owner", "size", "notes", "kind")
WORDS = ("red", "green", "small", "large", "north", "south", "cat", "dog", "open", "closed")


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A JSON Schema: an object of one to four properties at the top, anything below it."""
    kinds = ["string", "enum", "integer", "number", "boolean", "null or"] + ["array", "object"] * (depth < 2)
    kind = "object" if depth == 0 else rng.choice(kinds)
    if kind == "object":
        names = rng.sample(NAMES, rng.randint(1, 4))
        required = [name for name in names if depth == 0 or rng.random() < 0.7]
        properties = {name: random_schema(rng, depth + 1) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": 1, "maxItems": rng.randint(1, 3)}
    if kind == "enum":
        return {"enum": rng.sample(WORDS, rng.randint(2, 5))}
    if kind == "integer":
        return {"type": "integer", "minimum": rng.randint(-9, 9), "maximum": rng.randint(10, 2000)}
    if kind == "number":
        return {"type": "number", "minimum": 0, "maximum": rng.randint(1, 100)}
    if kind == "null or":
        return {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": rng.randint(4, 24)}]}
    return {"type": "boolean"} if kind == "boolean" else {"type": "string", "maxLength": rng.randint(4, 40)}


@pytest.mark.parametrize("num", [8, pytest.param(500, marks=pytest.mark.soak)])
def test_drafts_change_no_text_and_texts_validate(embedded_pair: Pair, num: int) -> None:
    """Requests at temperatures 0 and 1, each with and without drafts, all in one batch."""
    pair, rng, num_valid, num_accepted = embedded_pair, random.Random(0), 0, 0
    compiler = GrammarCompiler(pair.tokenizer, pair.vocab_size, pair.stop_token_ids)
    schemas, requests = list[dict[str, Any]](), list[Request]()
    for number in range(num):
        schemas.append(random_schema(rng))
        wanted = f"Describe a {rng.choice(WORDS)} shop as JSON with {', '.join(schemas[-1]['properties'])}."
        prompt_ids = Prompt("structured", (Message("user", wanted),)).encode(pair.tokenizer)
        options = {"stop_token_ids": pair.stop_token_ids, "constraint": compiler.compile(schema_grammar(schemas[-1]))}
        sampling = Sampling(float(number % 2), seed=number)
        requests += [Request(prompt_ids, 160, sampling, size, **options) for size in (1, None)]
    answers = run(Engine(pair, num_slots=16, max_length=320), requests)
    for schema, plain, drafted in zip(schemas, answers[::2], answers[1::2], strict=True):
        assert text_of(plain) == text_of(drafted), schema
        num_accepted += sum(step.num_accepted for step in drafted)
        if plain[-1].finish_reason != "length":
            text = str(pair.tokenizer.decode(text_of(plain), skip_special_tokens=True))
            Draft202012Validator(schema).validate(json.loads(text))
            num_valid += 1
    assert num_valid > 0.9 * num
    assert num_accepted > 5 * num
