"""vLLM with the plug-in, for jobs that decode by it: requests with block sizes of their own, and what came of steps.

One engine measures every block size: where all requests of a moment ask for the same, the draft proposes as many
tokens as an engine that was started with that number.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from blockpilot.types import Sampling
from jobs.vllm_plugin.override import BLOCK_SIZE_ARG
from jobs.vllm_plugin.policies import SETTINGS_KEY, PluginSettings
from jobs.vllm_plugin.scheduler import SCHEDULER_CLASS, WORKER_CLASS

KV_SPACE_GB = "2"  # on a CPU, where nothing else is said


class VllmRequest(NamedTuple):
    """A request to decode; block_size None lets the policy of the plug-in choose."""

    prompt_ids: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    block_size: int | None = None
    num_logprobs: int | None = None
    """Of every token; -1 for the whole vocabulary."""
    stops: bool = True
    """At the end of an answer, not only at the limit."""


class VllmAnswer(NamedTuple):
    """An answer, and the drafted tokens of its steps: how many were verified, and how many accepted."""

    tokens: list[int]
    finish_reason: str
    verified: list[int]
    accepted: list[int]
    first_logprobs: dict[int, float]
    """Log probabilities at the first token, by token id; empty where none were asked for."""


class VllmEngine:
    """An engine that lives as long as the process. Raises what vLLM raises where it cannot start."""

    def __init__(
        self, target: str | Path, draft: str | Path | None, num_drafted: int, settings: PluginSettings, **options: Any
    ) -> None:
        """options: of `vllm.LLM`. draft None decodes plainly and has no use for settings."""
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", KV_SPACE_GB)
        cores = sorted(os.sched_getaffinity(0))
        has_all = int(os.environ.get("OMP_NUM_THREADS", len(cores))) >= len(cores)
        # By itself vLLM leaves a core to its own front end, and binds a thread to each other one, also where Ray has
        # given this process fewer.
        bound = ",".join(map(str, cores)) if has_all else "nobind"
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", bound)
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
        from vllm import LLM

        if draft is not None:
            options |= plugin_options(settings)
            drafts = {"method": "dflash", "model": str(draft), "num_speculative_tokens": num_drafted}
            options["speculative_config"] = drafts
        self._llm = LLM(str(target), **options)

    @property
    def core(self) -> Any:
        """vLLM's `LLMEngine`, which takes requests and gives outputs step by step."""
        return self._llm.llm_engine

    @property
    def version(self) -> str:
        """vLLM's."""
        import vllm

        return str(vllm.__version__)

    def decode(self, requests: Sequence[VllmRequest]) -> list[VllmAnswer | str]:
        """Decode together; in place of the answer of a request that vLLM refuses stands why."""
        from vllm.exceptions import VLLMValidationError

        refused: dict[int, str] = {}
        for place, request in enumerate(requests):
            prompt = {"prompt_token_ids": list(request.prompt_ids)}
            try:
                self._llm.enqueue(prompt, _params(request), use_tqdm=False)
            except VLLMValidationError as error:
                refused[place] = str(error)
        outputs = iter(self._llm.wait_for_completion(use_tqdm=False))  # in the order of the requests
        return [refused.get(place) or _answer(next(outputs).outputs[0]) for place in range(len(requests))]


def plugin_options(settings: PluginSettings) -> dict[str, Any]:
    """Options of `vllm.LLM` that install the plug-in, with detailed figures of every request's steps."""
    return {
        "scheduler_cls": SCHEDULER_CLASS,
        "worker_cls": WORKER_CLASS,
        "async_scheduling": False,
        "additional_config": {SETTINGS_KEY: settings.model_dump(mode="json", exclude_defaults=True)},
        "per_request_spec_decode_metrics": "detailed",
    }


def sampling_params(sampling: Sampling, block_size: int | None, **options: Any) -> Any:
    """vLLM's SamplingParams, with more of its options; no text is made of tokens."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=None if sampling.is_greedy else sampling.seed,
        detokenize=False,
        extra_args=None if block_size is None else {BLOCK_SIZE_ARG: block_size},
        **options,
    )


def _params(request: VllmRequest) -> Any:
    return sampling_params(
        request.sampling,
        request.block_size,
        max_tokens=request.max_new_tokens,
        ignore_eos=not request.stops,
        logprobs=request.num_logprobs,
    )


def _answer(output: Any) -> VllmAnswer:
    steps = output.spec_decode_metrics
    first = output.logprobs[0] if output.logprobs else {}
    return VllmAnswer(
        list(output.token_ids),
        output.finish_reason,
        list(steps.per_step_drafted) if steps else [],
        list(steps.per_step_accepted) if steps else [],
        {token: entry.logprob for token, entry in first.items()},
    )
