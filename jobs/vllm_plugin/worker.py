"""vLLM's worker with a watch on first logits (`--worker-cls`).

vLLM refuses custom logits processors beside speculative decoding (STR_SPEC_DEC_REJECTS_LOGITSPROCS in
vllm/v1/sample/logits_processor/__init__.py), and its own logprobs would be computed for every token of an answer, not
only for the first. So a hook of torch stands before the sampler, which sees one row of logits a request, that of its
last token, whether or not drafts are verified in the same step. Every worker of a tensor-parallel group does the
same; vLLM takes the answer of one.
"""

from collections.abc import Sequence
from typing import Any

from vllm.platforms import current_platform

from jobs.vllm_plugin.hooks import WORKER_HOOKS, check_hooks
from jobs.vllm_plugin.prefill import PREFILLS, SparseDistribution

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class AdaptiveWorker(PlatformWorker):  # type: ignore[misc]
    """The platform's worker, which also sends the distributions that the scheduler asks for."""

    def load_model(self, **options: Any) -> None:
        check_hooks(WORKER_HOOKS)
        super().load_model(**options)
        self._wanted: Sequence[str] = ()
        self._found: dict[str, SparseDistribution] = {}
        self.model_runner.sampler.register_forward_pre_hook(self._look, with_kwargs=True)

    def execute_model(self, scheduler_output: Any) -> Any:
        self._wanted = getattr(scheduler_output, PREFILLS, ())
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        if self._found:
            setattr(output, PREFILLS, self._found)
            self._found = {}
        return output

    def _look(self, sampler: Any, args: Sequence[Any], named: dict[str, Any]) -> None:
        """Keep the distributions that are wanted of logits [requests, vocab], before the sampler changes them."""
        if self._wanted:
            logits = named["logits"] if "logits" in named else args[0]
            rows = self.model_runner.input_batch.req_id_to_index
            self._found = {key: SparseDistribution.of(logits[rows[key]]) for key in self._wanted}
            self._wanted = ()
