"""vLLM by its public API: an engine with a fixed number of drafted tokens, and the accepted tokens of each step."""

import gc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from transformers import AutoConfig, PreTrainedTokenizerBase

from blockpilot.device import best_device
from blockpilot.drafts.families import family, load_any_draft
from blockpilot.native.library import pick_dtype
from blockpilot.pairs.checkpoints import NOT_FOUND, find_draft, find_target, not_found
from blockpilot.pairs.loading import load_tokenizer
from blockpilot.pairs.table import split_revision
from blockpilot.types import PairId, Sampling
from jobs.common.config import PairConfig

KV_SPACE_GB = "2"  # default on a CPU


class VllmPair(NamedTuple):
    """Names, directories and tokenizer of a target and its DFlash draft, whose weights vLLM loads."""

    id: PairId
    target: Path
    draft: Path
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    block_size: int
    """Block size that the draft was trained for."""
    dtype: str

    @classmethod
    def of(cls, config: PairConfig) -> Self:
        """Find the pair of a configuration. Raises ValueError for missing models and for non-DFlash drafts."""
        names = config.models
        target, draft = (find(name) for find, name in zip((find_target, find_draft), names, strict=True))
        network = load_any_draft(draft.directory)
        if (kind := family(network)) != "dflash":
            raise ValueError(f"draft {names[1]}: {kind}; by vLLM only DFlash drafts are swept")
        try:
            tokenizer = load_tokenizer(target.directory)
        except NOT_FOUND as error:
            raise ValueError(not_found("target", names[0], error)) from None
        target_name, draft_name = (split_revision(name)[0] for name in names)
        return cls(
            PairId(target_name, target.revision, draft_name, draft.revision),
            target.directory,
            draft.directory,
            tokenizer,
            int(AutoConfig.from_pretrained(target.directory).get_text_config().vocab_size),
            network.block_size,
            pick_dtype(config.dtype, best_device()),
        )


class VllmRequest(NamedTuple):
    """A request to decode."""

    prompt_ids: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    num_logprobs: int | None = None
    """Number of top log probabilities per token; -1 for the whole vocabulary, None for none."""
    stops: bool = True
    """True: ends at a stop token; False: only at the limit."""


class VllmAnswer(NamedTuple):
    """An answer, and the number of accepted tokens of each step."""

    tokens: list[int]
    finish_reason: str
    accepted: list[int]
    """Accepted tokens by step, without steps that drafted nothing, which vLLM does not count."""
    first_logprobs: dict[int, float]
    """Log probabilities at the first token, by token id; empty if not requested."""


class VllmEngine:
    """`vllm.LLM` with DFlash chains of one block size, until `close`.

    Raises the errors of vLLM if it cannot start.
    """

    def __init__(self, pair: VllmPair, block_size: int, **options: Any) -> None:
        """block_size 1 is plain decoding; options are those of `vllm.LLM`."""
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", KV_SPACE_GB)
        cores = sorted(os.sched_getaffinity(0))
        has_all = int(os.environ.get("OMP_NUM_THREADS", len(cores))) >= len(cores)
        # By default vLLM reserves a core for its front end and binds a thread to each other core, even if Ray has
        # given this process fewer cores.
        bound = ",".join(map(str, cores)) if has_all else "nobind"
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", bound)
        from vllm import LLM

        if block_size > 1:
            drafts = {"method": "dflash", "model": str(pair.draft), "num_speculative_tokens": block_size - 1}
            options |= {"speculative_config": drafts, "per_request_spec_decode_metrics": "detailed"}
        self.block_size = block_size
        self._llm: Any = LLM(str(pair.target), dtype=pair.dtype, **options)

    @property
    def version(self) -> str:
        """Version of vLLM."""
        import vllm

        return str(vllm.__version__)

    def decode(self, requests: Sequence[VllmRequest]) -> list[VllmAnswer | str]:
        """Decode requests together; returns the answers, or the reason as a string if vLLM refuses a request."""
        refused: dict[int, str] = {}
        for index, request in enumerate(requests):
            prompt = {"prompt_token_ids": list(request.prompt_ids)}
            try:
                self._llm.enqueue(prompt, _params(request), use_tqdm=False)
            except ValueError as error:
                refused[index] = str(error)
        outputs = iter(self._llm.wait_for_completion(use_tqdm=False))  # in the order of the requests
        return [refused.get(index) or _answer(next(outputs).outputs[0]) for index in range(len(requests))]

    def close(self) -> None:
        """End vLLM's processes, and free their memory for another engine."""
        self._llm = None
        gc.collect()


def _params(request: VllmRequest) -> Any:
    from vllm import SamplingParams

    sampling = request.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=None if sampling.is_greedy else sampling.seed,
        max_tokens=request.max_new_tokens,
        ignore_eos=not request.stops,
        logprobs=request.num_logprobs,
        detokenize=False,
    )


def _answer(output: Any) -> VllmAnswer:
    steps = output.spec_decode_metrics
    first = output.logprobs[0] if output.logprobs else {}
    return VllmAnswer(
        list(output.token_ids),
        output.finish_reason,
        list(steps.per_step_accepted) if steps else [],
        {token: entry.logprob for token, entry in first.items()},
    )
