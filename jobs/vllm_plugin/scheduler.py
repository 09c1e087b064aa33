"""vLLM's scheduler with a choice of its own for every request (`--scheduler-cls`).

It lives in vLLM's engine process, with the policy and all that is learned from steps; workers, one or many, are other
processes. A request's first logits come from AdaptiveWorker with the step's output, so the choice is made before the
first drafts arrive. These are cut as they arrive, and the draft is told to propose no more than any request wants.
Outputs are vLLM's: a verified draft never changes a text.
"""

import json
import time
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds

from jobs.vllm_plugin.choice import BatchChoice, Chooser, VerifiedRow
from jobs.vllm_plugin.hooks import SCHEDULER_HOOKS, check_hooks, check_installed
from jobs.vllm_plugin.override import asked_block_size
from jobs.vllm_plugin.policies import SETTINGS_KEY, PluginSettings, PolicyFile, ServedPair, follow_policy
from jobs.vllm_plugin.prefill import PREFILLS
from jobs.vllm_plugin.process import end_with_parent
from jobs.vllm_plugin.report import StepReport

WORKER_CLASS = "jobs.vllm_plugin.worker.AdaptiveWorker"
SCHEDULER_CLASS = "jobs.vllm_plugin.scheduler.AdaptiveScheduler"


def check_config(config: Any) -> None:
    """Raise ValueError, naming the option, for a vLLM that the plug-in cannot work in."""
    drafts = config.speculative_config
    if drafts is None:
        raise ValueError("speculative_config is missing: without drafts there is nothing to choose")
    if drafts.num_speculative_tokens_per_batch_size:
        raise ValueError("num_speculative_tokens_per_batch_size: the plug-in chooses in its place; leave it out")
    if config.scheduler_config.async_scheduling:
        raise ValueError("async_scheduling: drafts never reach the scheduler; --no-async-scheduling is needed")
    if config.parallel_config.pipeline_parallel_size > 1:
        size = config.parallel_config.pipeline_parallel_size
        raise ValueError(f"pipeline_parallel_size {size}: must be 1, since drafts come before the step's logits")
    if config.use_v2_model_runner:
        raise ValueError("model runner V2 shows first logits in another way: VLLM_USE_V2_MODEL_RUNNER=0 is needed")
    if config.parallel_config.worker_cls != WORKER_CLASS:
        raise ValueError(f"worker_cls {config.parallel_config.worker_cls}: must be {WORKER_CLASS}")


class AdaptiveScheduler(Scheduler):  # type: ignore[misc]
    """The scheduler of vLLM, which verifies as many drafts of each request as its choice says."""

    def __init__(self, *args: Any, **named: Any) -> None:
        check_hooks(SCHEDULER_HOOKS)
        check_installed()
        end_with_parent()
        super().__init__(*args, **named)
        config = self.vllm_config
        check_config(config)
        self._settings = PluginSettings(**config.additional_config.get(SETTINGS_KEY, {}))
        self._vocab_size = config.model_config.get_vocab_size()
        target = self._settings.target or config.model_config.model
        draft = self._settings.draft or config.speculative_config.model
        pair = ServedPair(target, draft, self._vocab_size, self.num_spec_tokens)
        self._choice = BatchChoice(Chooser.of(None, None, self.num_spec_tokens), self.num_spec_tokens)
        self._watch = follow_policy(self._settings, pair, self._use)
        self._steps = None if self._settings.steps is None else self._settings.steps.open("a", buffering=1)
        self._started = 0.0

    def _use(self, chooser: Chooser) -> None:
        self._choice.chooser = chooser

    def add_request(self, request: Any) -> None:
        if isinstance(self._watch, PolicyFile):
            self._watch.look()
        super().add_request(request)
        self._choice.admit(request.request_id, asked_block_size(request.sampling_params))

    def schedule(self, *args: Any, **named: Any) -> Any:
        output = super().schedule(*args, **named)
        self._choice.forget(output.finished_req_ids)
        scheduled = output.num_scheduled_tokens
        output.num_spec_tokens_to_schedule = self._choice.width(scheduled)
        wanted = [key for key in scheduled if self._choice.waits(key) and not self.requests[key].is_prefill_chunk]
        setattr(output, PREFILLS, wanted)
        self._started = time.perf_counter()
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        seconds = time.perf_counter() - self._started
        for key, found in getattr(model_runner_output, PREFILLS, {}).items():
            if (request := self.requests.get(key)) is not None:
                temperature = request.sampling_params.temperature
                prefill = found.prefill(self._vocab_size, request.num_prompt_tokens, temperature)
                self._choice.decide(key, prefill)
        self._learn(scheduler_output, model_runner_output, seconds)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._settings.reports:
            self._report(scheduler_output, outputs)
        return outputs

    def _report(self, scheduled: Any, outputs: Any) -> None:
        """Say in every request's output what the step drafted: vLLM itself tells sums, at the request's end."""
        controller = self._choice.chooser.controller
        speculates = controller is None or controller.speculates
        for output in (each for of_client in outputs.values() for each in of_client.outputs):
            drafts = scheduled.scheduled_spec_decode_tokens.get(output.request_id, ())
            drafted = [token for token in drafts if token >= 0]  # the others are padding
            output.kv_transfer_params = StepReport(drafted, speculates)._asdict()

    def _learn(self, scheduled: Any, output: Any, seconds: float) -> None:
        rows, num_decoding = {}, 0
        for key, num_tokens in scheduled.num_scheduled_tokens.items():
            drafts = scheduled.scheduled_spec_decode_tokens.get(key, ())
            if num_tokens == len(drafts) + 1 and -1 not in drafts:  # no prompt, no padding in place of drafts
                tokens = output.sampled_token_ids[output.req_id_to_index[key]]
                rows[key] = VerifiedRow(len(drafts), len(tokens))
                num_decoding += num_tokens
        num_prompt_tokens = scheduled.total_num_scheduled_tokens - num_decoding
        load = self._choice.learn(rows, scheduled.num_spec_tokens_to_schedule, num_prompt_tokens, seconds)
        if self._steps is not None and rows and not num_prompt_tokens:
            self._steps.write(json.dumps([*load, seconds]) + "\n")

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        keys = draft_token_ids.req_ids
        requests = {key: self.requests.get(key) for key in keys}
        decoding = [k for k, r in requests.items() if r is not None and not (r.is_finished() or r.is_prefill_chunk)]
        depths = self._choice.depths(decoding)
        drafts = zip(keys, draft_token_ids.draft_token_ids, strict=True)
        cut = [tokens[: depths.get(key, 0)] for key, tokens in drafts]
        super().update_draft_token_ids(DraftTokenIds(keys, cut))

    def shutdown(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        if self._steps is not None:
            self._steps.close()
        super().shutdown()
