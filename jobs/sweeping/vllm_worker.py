"""Worker of a sweep by vLLM: an actor that decodes every candidate with a vLLM engine, one after the other.

It is for pairs that only vLLM can load, and uses vLLM's public API. An engine has a fixed number of drafted tokens,
so each candidate starts a new one. Every other shard takes the candidates in descending order, which reuses the
running engine. vLLM cannot replay a text, and above temperature 0 its texts depend on the block size.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import ray
from pydantic import Field

from blockpilot.control.cost import COEFFICIENTS, Load, StepPrice, fit, relative_error
from blockpilot.prompts.files import Prompt
from blockpilot.sweep.rows import Metadata, Outcome, candidates_around, check_candidates
from blockpilot.types import Prefill, Sampling
from jobs.common.config import Config, PairConfig
from jobs.sweeping.folder import made_by

# Chains verify every drafted position, so token_s includes both costs; vLLM's matmuls have no tiles of TILE tokens.
NAMES = tuple(name for name in COEFFICIENTS if name not in ("slot_s", "tile_s", "experts_s"))
TIMED_TOKENS = 33  # of every timed answer
NUM_TIMES = 8  # timings of each load; the result is their lower quartile


class VllmSweepOptions(Config):
    """Settings of vLLM's engines in a sweep."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs of each vLLM engine."""
    quantization: str | None = None
    """Format of quantised weights, if vLLM does not detect it."""
    enforce_eager: bool = False
    """Start vLLM without compiled graphs: faster start, slower steps."""
    max_length: int = Field(default=2048, ge=2)
    """Maximum tokens of prompt and answer together."""

    def actor_options(self, accelerator_type: str | None) -> dict[str, object]:
        """Options of the Ray actor that owns the engines; Ray must be running."""
        has_gpus = accelerator_type is not None or ray.cluster_resources().get("GPU", 0) >= 1
        return {"num_gpus": self.tensor_parallel_size} if has_gpus else {}

    @property
    def engine_options(self) -> dict[str, object]:
        """Options of `vllm.LLM`."""
        return self.model_dump(exclude={"max_length"}) | {"max_model_len": self.max_length}


class VllmSweepWorker:
    """Ray actor that sweeps shards with vLLM; same methods as SweepWorker."""

    def __init__(self, pair: PairConfig, options: VllmSweepOptions, num_slots: int, settings: dict[str, Any]) -> None:
        """settings: max_new_tokens, temperature, top_p and seed of the answers."""
        self._config, self._options, self._num_slots, self._settings = pair, options, num_slots, settings
        self._pair: Any = None  # VllmPair
        self._engine: Any = None  # VllmEngine
        self._metadata: Metadata | None = None

    def load(self, identity: dict[str, Any], git_commit: str) -> Metadata:
        """Start an engine; returns the metadata of part files. Raises ValueError for a pair that vLLM cannot run."""
        from jobs.sweeping.vllm_engine import VllmPair

        self._pair = pair = VllmPair.of(self._config)
        candidates = identity["candidates"] or candidates_around(pair.block_size)
        check_candidates(candidates, self._options.max_length)
        engine = self._engine_of(candidates[0])
        self._metadata = made_by(pair, pair.dtype, candidates, identity, git_commit, vllm=engine.version)
        return self._metadata

    def sweep(self, prompts: list[Prompt]) -> Outcome:
        """Rows and rejects of these prompts."""
        from blockpilot.sweep.sweep import turn_by_turn

        assert self._metadata is not None
        sampling = Sampling(self._settings["temperature"], self._settings["top_p"], seed=self._settings["seed"])
        return turn_by_turn(self._pair.tokenizer, prompts, sampling, self._decode).checked(self._metadata)

    def measure_price(self, rows: int, context: int) -> StepPrice:
        """Step cost of vLLM, fitted to batches of 1, 2, 4 ... `rows` rows with each candidate."""
        import torch

        from blockpilot.device import best_device, device_name

        assert self._metadata is not None
        metadata = self._metadata
        context = min(context, self._options.max_length - TIMED_TOKENS)
        prompt = torch.randint(
            0, metadata.vocab_size, (context,), generator=torch.Generator().manual_seed(0)
        ).tolist()
        rows = min(rows, self._num_slots)
        timed = dict[Load, float]()
        for size in self._sizes():
            self._engine_of(size)
            for num in batch_sizes(rows):
                num_drafted = num * (size - 1)
                timed[Load(num, num_drafted, num_drafted)] = self._step_s(prompt, num)
        name = device_name(torch.device(best_device()))
        price = StepPrice(metadata.pair, metadata.dtype, name, context, rows, 1.0, 0.0, 0.0, 0.0, 0.0, error=0.0)
        return price_of_steps(timed, price)

    def _engine_of(self, block_size: int) -> Any:
        """The engine of this block size; starts it and ends the previous one if necessary."""
        from jobs.sweeping.vllm_engine import VllmEngine

        if self._engine is None or self._engine.block_size != block_size:
            if self._engine is not None:
                self._engine.close()
                self._engine = None
            self._engine = VllmEngine(
                self._pair,
                block_size,
                max_num_seqs=self._num_slots,
                # All logits, once per prompt. Without a prefix cache each candidate's draft gets the whole prompt.
                max_logprobs=-1,
                enable_prefix_caching=False,
                **self._options.engine_options,
            )
        return self._engine

    def _sizes(self) -> list[int]:
        """The candidates, beginning with that of the running engine."""
        assert self._metadata is not None
        sizes = self._metadata.candidates
        return sizes[::-1] if self._engine is not None and self._engine.block_size == sizes[-1] else sizes

    def _decode(self, turns: Sequence[Any]) -> list[Any]:
        """Runs of every candidate on each turn, or the reason as a string if there are none."""
        from blockpilot.sweep.sweep import CandidateRun

        assert self._metadata is not None
        results: list[Any] = [turn.error or [] for turn in turns]
        prefills: dict[int, Prefill] = {}
        for size in self._sizes():
            self._engine_of(size)
            if not prefills:
                firsts = self._ask(turns, results, 1, num_logprobs=-1)
                prefills |= {
                    index: _prefill(answer, self._metadata.vocab_size, turns[index])
                    for index, answer in firsts.items()
                }
            for index, answer in self._ask(turns, results, self._settings["max_new_tokens"]).items():
                emitted = emitted_by_step(len(answer.tokens) - 1, answer.accepted)
                run = CandidateRun(size, answer.tokens, emitted, [], answer.finish_reason, prefills[index])
                results[index].append(run)
        return [runs if isinstance(runs, str) else sorted(runs, key=lambda run: run.block_size) for runs in results]

    def _ask(
        self, turns: Sequence[Any], results: list[Any], limit: int, num_logprobs: int | None = None
    ) -> dict[int, Any]:
        """Answers by index of the turn; for a turn that vLLM refuses, the reason is stored in `results`."""
        from jobs.sweeping.vllm_engine import VllmRequest

        indices = [index for index, result in enumerate(results) if not isinstance(result, str)]
        requests = [
            VllmRequest(turns[index].prompt_ids, limit, turns[index].sampling, num_logprobs) for index in indices
        ]
        answers = dict(zip(indices, self._engine.decode(requests), strict=True))
        for index, answer in answers.items():
            if isinstance(answer, str):
                results[index] = answer
        return {index: answer for index, answer in answers.items() if not isinstance(answer, str)}

    def _step_s(self, prompt: Sequence[int], rows: int) -> float:
        """Seconds of a step with `rows` rows, all of the same prompt, so that they end in the same step."""
        from jobs.sweeping.vllm_engine import VllmRequest

        def timed(num_tokens: int) -> tuple[float, int]:
            started = time.perf_counter()
            answers = self._engine.decode([VllmRequest(prompt, num_tokens, stops=False)] * rows)
            seconds = time.perf_counter() - started
            return seconds, max(len(emitted_by_step(len(answer.tokens) - 1, answer.accepted)) for answer in answers)

        timed(TIMED_TOKENS)  # warm-up
        steps_s = []
        for _ in range(NUM_TIMES):
            prefill_s, _ = timed(1)
            seconds, num_steps = timed(TIMED_TOKENS)
            steps_s.append((seconds - prefill_s) / num_steps)
        return float(np.quantile(steps_s, 0.25))


def emitted_by_step(num_tokens: int, accepted: Sequence[int]) -> list[int]:
    """Tokens emitted by each verify step of an answer with `num_tokens` tokens after the prefill's.

    The limit may cut the last steps short. vLLM omits steps without drafts, which emit one token each.
    """
    emitted, remaining = [], num_tokens
    for num in accepted:
        if remaining:
            emitted.append(min(num + 1, remaining))
            remaining -= emitted[-1]
    return emitted + [1] * remaining


def batch_sizes(largest: int) -> list[int]:
    """1, 2, 4 ... and the largest."""
    return sorted({*(2**i for i in range(largest.bit_length())), largest})


def price_of_steps(timed: Mapping[Load, float], like: StepPrice) -> StepPrice:
    """Step cost fitted to the seconds per step by load; every fifth load is held out to measure the error.

    Raises ValueError for too few loads.
    """
    steps = sorted((load, seconds) for load, seconds in timed.items() if seconds > 0)
    held_out, fitted = steps[4::5], [step for i, step in enumerate(steps) if i % 5 != 4]
    if len(fitted) < len(NAMES):
        raise ValueError(f"{len(steps)} loads: too few for the price of a step; more candidates or rows are needed")
    coefficients = fit([load for load, _ in fitted], [seconds for _, seconds in fitted], NAMES)
    error = relative_error(coefficients, *zip(*(held_out or fitted), strict=True))
    return replace(like.with_coefficients(coefficients), error=error)


def _prefill(answer: Any, vocab_size: int, turn: Any) -> Prefill:
    import torch

    logits = torch.full((vocab_size,), -torch.inf)
    logits[list(answer.first_logprobs)] = torch.tensor(list(answer.first_logprobs.values()))
    return Prefill(logits, None, len(turn.prompt_ids), turn.sampling.temperature)
