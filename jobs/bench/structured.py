"""Structured outputs: generated schemas, each decoded plainly and with drafts in turns, checked and timed.

Every text must be the same both ways and validate, unless the limit cut it. Figures are sums divided once at the end.

    python jobs/bench/structured.py --num 500
"""

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jsonschema import Draft202012Validator
from pydantic import Field
from rich.console import Console

from blockpilot.constraints.automaton import CompiledGrammar, GrammarAutomaton, GrammarCompiler
from blockpilot.constraints.grammar import of_schema
from blockpilot.control.acceptance import AcceptanceModel
from blockpilot.control.controller import Controller
from blockpilot.engine.engine import Engine
from blockpilot.evaluation.pricing import measure_price
from blockpilot.pairs.loading import Pair
from blockpilot.prompts.files import Message, Prompt
from blockpilot.storage import write_text
from blockpilot.types import Request, Sampling
from jobs.common.config import Config, PairConfig, main

NAMES = ("name", "age", "city", "color", "items", "price", "is_open", "tags", "owner", "size", "notes", "kind")
WORDS = ("red", "green", "small", "large", "north", "south", "cat", "dog", "open", "closed")
LENGTH = 512


class StructuredConfig(Config):
    """Settings of the measurement."""

    pair: PairConfig = PairConfig()
    num: int = Field(default=500, ge=1)
    """Schemas; temperatures 0 and 1 in turns."""
    max_new_tokens: int = Field(default=160, ge=1)
    seed: int = 0
    output: Path = Path("runs/structured.json")


class Timed:
    """Constraint whose automata add up their seconds; it has the methods that an engine calls."""

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar, self.seconds, self.num_masks = grammar, 0.0, 0

    def start(self) -> "TimedAutomaton":
        """A state before the first token."""
        return TimedAutomaton(self._grammar.start(), self)


class TimedAutomaton:
    """An automaton that tells its constraint how long it took."""

    def __init__(self, automaton: GrammarAutomaton, owner: Timed) -> None:
        self._automaton, self._owner = automaton, owner

    @property
    def error(self) -> Exception | None:
        """As of the automaton, like the rest."""
        return self._automaton.error

    def take(self, token: int) -> None:
        self._timed("take", token)

    def ends(self, path: Sequence[int] = ()) -> bool:
        return bool(self._timed("ends", path))

    def allowed(self, path: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        found: list[bool] = self._timed("allowed", path, tokens)
        return found

    def forced(self, path: Sequence[int] = ()) -> list[int]:
        found: list[int] = self._timed("forced", path)
        return found

    def mask(self, path: Sequence[int] = ()) -> torch.Tensor:
        self._owner.num_masks += 1
        found: torch.Tensor = self._timed("mask", path)
        return found

    def _timed(self, name: str, *arguments: Any) -> Any:
        started = time.perf_counter()
        found = getattr(self._automaton, name)(*arguments)
        self._owner.seconds += time.perf_counter() - started
        return found


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


def run(config: StructuredConfig) -> dict[str, float]:
    """Figures by name; raises RuntimeError or ValidationError for a text that differs or does not validate."""
    pair: Pair = config.pair.load()
    compiler = GrammarCompiler(pair.tokenizer, pair.vocab_size, pair.stop_token_ids)
    controller = Controller(AcceptanceModel(pair.block_size - 1), measure_price(pair, 1, LENGTH // 4))
    engine = Engine(pair, num_slots=1, max_length=LENGTH, controller=controller)
    rng, totals = random.Random(config.seed), dict[str, float]()

    def add(**values: float) -> None:
        for name, value in values.items():
            totals[name] = totals.get(name, 0.0) + value

    for number in range(config.num):
        schema = random_schema(rng)
        started = time.perf_counter()
        constraint = Timed(compiler.compile(of_schema(schema)))
        add(compile_s=time.perf_counter() - started)
        wanted = ", ".join(schema["properties"])
        prompt = Prompt(
            "structured", (Message("user", f"Describe a {rng.choice(WORDS)} shop as JSON with {wanted}."),)
        )
        asked = Request(
            prompt.encode(pair.tokenizer),
            config.max_new_tokens,
            Sampling(float(number % 2), seed=number),
            stop_token_ids=pair.stop_token_ids,
            constraint=constraint,
        )
        texts = {}
        for way, size in (("plain", 1), ("drafted", None)) if number % 4 < 2 else (("drafted", None), ("plain", 1)):
            before = constraint.seconds, constraint.num_masks
            texts[way], seconds, steps, reason = _decode(engine, asked, size)
            counts = {"tokens": len(texts[way]), "s": seconds, "steps": steps}
            counts |= {"automaton_s": constraint.seconds - before[0], "masks": constraint.num_masks - before[1]}
            add(**{f"{way}_{name}": value for name, value in counts.items()})
        if texts["plain"] != texts["drafted"]:
            raise RuntimeError(f"schema {number}: drafting changed the text\n{texts}\n{schema}")
        add(cut=reason == "length")
        if reason != "length":
            shown = str(pair.tokenizer.decode(texts["plain"], skip_special_tokens=True))
            Draft202012Validator(schema).validate(json.loads(shown))
            add(valid=1)
        if number % 50 == 49:
            Console().print(f"{number + 1}: {totals}", soft_wrap=True)
    figures = {name: totals[f"{name}_tokens"] / totals[f"{name}_s"] for name in ("plain", "drafted")}
    found = {f"{name}_tokens_per_s": value for name, value in figures.items()} | totals
    for way in figures:
        found[f"{way}_automaton_us_per_token"] = 1e6 * totals[f"{way}_automaton_s"] / totals[f"{way}_tokens"]
    found["acceptance_length"] = totals["drafted_tokens"] / totals["drafted_steps"]
    write_text(config.output, json.dumps(found, indent=1))
    Console().print(found)
    return found


def _decode(engine: Engine, asked: Request, size: int | None) -> tuple[list[int], float, int, str]:
    """Tokens, seconds after the prefill, steps that verified, and why it ended."""
    request = Request(**{**vars(asked), "block_size": size})
    engine.add(request)
    tokens, num_steps, reason, started = list[int](), 0, "", 0.0
    while not engine.idle:
        for step in engine.step():
            started = started or time.perf_counter()
            tokens += step.tokens
            num_steps += step.block_size > 0
            reason = step.finish_reason or reason
    return tokens, time.perf_counter() - started, num_steps, reason


if __name__ == "__main__":
    main(StructuredConfig, run)
