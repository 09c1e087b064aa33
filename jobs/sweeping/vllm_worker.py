"""Worker of a sweep by vLLM: an actor that owns an engine of vLLM and decodes with every candidate in turn.

It serves pairs that only vLLM can hold. One engine with the plug-in measures all candidates: while all its requests
ask for one block size, it drafts as wide as an engine that was started for it. vLLM cannot replay a text, and above
temperature 0 its texts depend on the block size.
"""

import json
import platform
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from blockpilot.control.cost import COEFFICIENTS, Load, StepPrice, fit, relative_error
from blockpilot.prompts.files import Prompt
from blockpilot.sweep.rows import Metadata, Outcome
from blockpilot.types import Prefill, Sampling
from jobs.common.config import PairConfig
from jobs.common.vllm_options import VllmOptions

MIN_TIMED = 3  # steps of one load
NAMES = tuple(name for name in COEFFICIENTS if name != "tile_s")
TIMED_TOKENS = 24  # of every answer that is timed
TURNS = 3  # of all mixtures: a slow moment of the machine falls on each of them


class VllmSweepOptions(VllmOptions):
    """Settings of vLLM's engine in a sweep."""

    max_length: int = Field(default=2048, ge=2)
    """Tokens of prompt and answer together."""


class VllmSweepWorker:
    """An actor that starts vLLM once and sweeps shards with it; the methods are SweepWorker's."""

    def __init__(self, pair: PairConfig, options: VllmSweepOptions, num_slots: int, settings: dict[str, Any]) -> None:
        """settings: max_new_tokens, temperature, top_p and seed of the answers."""
        self._pair, self._options, self._num_slots, self._settings = pair, options, num_slots, settings
        self._engine: Any = None
        self._tokenizer: Any = None
        self._metadata: Metadata | None = None
        self._steps = Path(tempfile.mkdtemp(prefix="blockpilot-")) / "steps.jsonl"

    def load(self, identity: dict[str, Any], git_commit: str) -> Metadata:
        """Start the engine; returns what goes into every part file. ValueError for a pair that vLLM cannot run."""
        from blockpilot.sweep.candidates import candidates_around, check_candidates
        from jobs.vllm_plugin.engine import VllmEngine
        from jobs.vllm_plugin.pair import VllmPair
        from jobs.vllm_plugin.policies import PluginSettings

        pair = VllmPair.of(self._pair)
        candidates = identity["candidates"] or candidates_around(pair.block_size)
        check_candidates(candidates, self._options.max_length)
        self._tokenizer = pair.tokenizer
        self._engine = VllmEngine(
            pair.target,
            pair.draft,
            max(candidates[-1] - 1, 1),
            PluginSettings(policy="1", steps=self._steps),
            dtype=pair.dtype,
            max_model_len=self._options.max_length,
            max_num_seqs=self._num_slots,
            # Logits of the whole vocabulary, once a prompt; and each candidate's draft sees the whole prompt.
            max_logprobs=-1,
            enable_prefix_caching=False,
            **self._options.engine_options,
        )
        self._metadata = Metadata(
            config=identity,
            pair=pair.id,
            dtype=pair.dtype,
            vocab_size=pair.vocab_size,
            block_size=pair.block_size,
            candidates=list(candidates),
            versions={"python": platform.python_version()}
            | {name: version(name) for name in ("torch", "transformers")}
            | {"vllm": self._engine.version},
            git_commit=git_commit,
        )
        return self._metadata

    def sweep(self, prompts: list[Prompt]) -> Outcome:
        """Rows and rejects of some prompts."""
        from blockpilot.sweep.sweep import turn_by_turn

        sampling = Sampling(self._settings["temperature"], self._settings["top_p"], seed=self._settings["seed"])
        return turn_by_turn(self._tokenizer, prompts, sampling, self._decode)

    def _decode(self, turns: Sequence[Any]) -> list[Any]:
        """Runs of every candidate on each turn, or why there are none."""
        from blockpilot.sweep.sweep import CandidateRun

        assert self._metadata is not None
        results: list[Any] = [turn.error or [] for turn in turns]
        firsts = self._ask(turns, results, 1, block_size=1, num_logprobs=-1)
        for size in self._metadata.candidates:
            answers = self._ask(turns, results, self._settings["max_new_tokens"], block_size=size)
            for place, answer in answers.items():
                prefill = _prefill(firsts[place], self._metadata.vocab_size, turns[place])
                emitted = emitted_by_step(len(answer.tokens) - 1, answer.accepted)
                run = CandidateRun(size, answer.tokens, emitted, [], answer.finish_reason, prefill)
                results[place].append(run)
        return results

    def _ask(
        self, turns: Sequence[Any], results: list[Any], limit: int, block_size: int, num_logprobs: int | None = None
    ) -> dict[int, Any]:
        """Answers by place; a turn that vLLM refuses has the reason as its result, and is asked no more."""
        from jobs.vllm_plugin.engine import VllmRequest

        places = [place for place, result in enumerate(results) if not isinstance(result, str)]
        asked = [
            (turns[place].prompt_ids, limit, turns[place].sampling, block_size, num_logprobs) for place in places
        ]
        found = dict(zip(places, self._engine.decode([VllmRequest(*each) for each in asked]), strict=True))
        for place, answer in found.items():
            if isinstance(answer, str):
                results[place] = answer
        return {place: answer for place, answer in found.items() if not isinstance(answer, str)}

    def measure_price(self, rows: int, context: int) -> StepPrice:
        """Price of vLLM's own steps, from answers of one row and of `rows`, with block sizes alike and mixed."""
        import torch

        from blockpilot.device import best_device, device_name
        from jobs.vllm_plugin.engine import VllmRequest

        assert self._metadata is not None
        known = self._metadata
        self._steps.write_text("")
        context = min(context, self._options.max_length - TIMED_TOKENS - 1)
        generator = torch.Generator().manual_seed(0)
        for num in sorted({1, rows}):
            prompts = torch.randint(0, known.vocab_size, (num, context), generator=generator).tolist()
            for sizes in TURNS * timed_mixtures(num, known.candidates[-1]):
                of_rows = zip(prompts, sizes, strict=True)
                self._engine.decode([VllmRequest(p, TIMED_TOKENS, block_size=b, stops=False) for p, b in of_rows])
        name = device_name(torch.device(best_device()))
        price = StepPrice(known.pair, known.dtype, name, context, rows, 1.0, 0.0, 0.0, 0.0, 0.0, error=0.0)
        return price_of_steps(self._steps.read_text().splitlines(), price)


def emitted_by_step(num_tokens: int, accepted: Sequence[int]) -> list[int]:
    """Tokens that each verify step emitted, of an answer of so many beyond the prefill's; its end cuts the last ones
    short. vLLM counts no steps without drafts: they emitted a token each.
    """
    emitted, left = [], num_tokens
    for num in accepted:
        if left:
            emitted.append(min(num + 1, left))
            left -= emitted[-1]
    return emitted + [1] * left


def timed_mixtures(rows: int, largest: int) -> list[tuple[int, ...]]:
    """Block sizes of so many rows; the mixed ones tell what drafting costs from what verifying does."""
    sizes = sorted({1, min(2, largest), (largest + 1) // 2, largest})
    alike = [(size,) * rows for size in sizes]
    return alike if rows == 1 else [*alike, (largest, *(1,) * (rows - 1)), (largest, *(2,) * (rows - 1))]


def price_of_steps(lines: Iterable[str], like: StepPrice) -> StepPrice:
    """Price fitted to the seconds that a quarter of the steps of a load stay below: lines of the plug-in's `steps`.

    vLLM's products have no tiles of TILE tokens. Every fifth load is left out of the fit and gives its error. Raises
    ValueError for too few loads.
    """
    by_load = defaultdict[Load, list[float]](list)
    for line in lines:
        *load, seconds = json.loads(line)
        by_load[Load(*load)].append(seconds)
    known = {load: each for load, each in sorted(by_load.items()) if len(each) >= MIN_TIMED}
    timed = [(load, float(np.quantile(each, 0.25))) for load, each in known.items()]
    held_out, fitted = timed[4::5], [each for i, each in enumerate(timed) if i % 5 != 4]
    if len(fitted) < len(NAMES):
        raise ValueError(f"{len(timed)} loads with {MIN_TIMED} steps: too few for the price of a step")
    coefficients = fit([load for load, _ in fitted], [each for _, each in fitted], NAMES)
    error = relative_error(coefficients, *zip(*(held_out or fitted), strict=True))
    return replace(like.with_coefficients(coefficients), error=error)


def _prefill(first: Any, vocab_size: int, turn: Any) -> Prefill:
    import torch

    logits = torch.full((vocab_size,), -torch.inf)
    logits[list(first.first_logprobs)] = torch.tensor(list(first.first_logprobs.values()))
    return Prefill(logits, None, len(turn.prompt_ids), turn.sampling.temperature)
