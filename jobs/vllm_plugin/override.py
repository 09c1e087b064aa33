"""Block size that a request asks for by itself, in `SamplingParams.extra_args` (over HTTP: `vllm_xargs`).

The front end lets every installed logits processor validate a request before the engine sees it (entry point
`vllm.logits_processors`), so a wrong value is an error of that request, status 400 over HTTP, and of no other. The
processor changes no logits.
"""

from typing import Any

from vllm.v1.sample.logits_processor import LogitsProcessor as Processor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as ProcessorV2

from blockpilot.types import MAX_BLOCK_SIZE

BLOCK_SIZE_ARG = "blockpilot_block_size"


def asked_block_size(params: Any) -> int | None:
    """Tokens that a step of the request verifies, the anchor included; None where the policy chooses.

    Raises ValueError for anything but an integer from 1 to MAX_BLOCK_SIZE.
    """
    size = ((params and params.extra_args) or {}).get(BLOCK_SIZE_ARG)
    if size is not None and (type(size) is not int or not 1 <= size <= MAX_BLOCK_SIZE):
        raise ValueError(f"{BLOCK_SIZE_ARG} {size!r}: must be an integer from 1 (no drafts) to {MAX_BLOCK_SIZE}")
    return size


class BlockSizeCheck(Processor, ProcessorV2):  # type: ignore[misc]
    """Validation of overrides, for both model runners of vLLM."""

    def __init__(self, *_: Any) -> None:
        pass

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        asked_block_size(sampling_params)

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        pass

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """False: no request's logits are changed."""
        return False

    def apply(self, logits: Any, ctx: Any = None) -> Any:
        return logits
