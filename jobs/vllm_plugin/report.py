"""Report of a step, on its way from vLLM's scheduler to the front end that serves its outputs."""

from typing import NamedTuple


class StepReport(NamedTuple):
    """Report in one request's output of a step, sent by an engine whose setting is `reports`.

    It travels in `kv_transfer_params`, the one field of an output that vLLM hands through as it is.
    """

    drafted: list[int]
    """Tokens that the step verified of the request."""
    speculates: bool
    """False while drafting does not pay."""
