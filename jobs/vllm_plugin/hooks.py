"""Hooks of vLLM that the plug-in stands on, and the check that a version has them.

Nothing of vLLM is patched: every hook is a class that vLLM loads by name from its options, a message between its
processes, or a method that such a class inherits.
"""

import importlib
import logging
from collections.abc import Sequence
from importlib.metadata import entry_points
from inspect import signature
from typing import Any, NamedTuple

TESTED = "0.32.0"
PROCESSORS = "vllm.logits_processors"
log = logging.getLogger("vllm.blockpilot")


class Hook(NamedTuple):
    """A class of vLLM, with the attributes, fields or parameters of its constructor that are used."""

    module: str
    name: str
    parts: tuple[str, ...]


SCHEDULER_HOOKS = (
    Hook("vllm.config", "SchedulerConfig", ("scheduler_cls", "async_scheduling")),
    Hook("vllm.config", "ParallelConfig", ("worker_cls", "pipeline_parallel_size")),
    Hook("vllm.config", "VllmConfig", ("additional_config", "speculative_config", "model_config")),
    Hook("vllm.sampling_params", "SamplingParams", ("extra_args", "temperature")),
    Hook("vllm.v1.request", "Request", ("sampling_params", "num_prompt_tokens", "is_prefill_chunk", "is_finished")),
    Hook("vllm.v1.core.sched.scheduler", "Scheduler", ("add_request", "schedule", "update_from_output", "shutdown")),
    Hook("vllm.v1.core.sched.scheduler", "Scheduler", ("update_draft_token_ids", "requests", "num_spec_tokens")),
    Hook("vllm.v1.core.sched.output", "SchedulerOutput", ("num_spec_tokens_to_schedule", "finished_req_ids")),
    Hook("vllm.v1.core.sched.output", "SchedulerOutput", ("scheduled_spec_decode_tokens", "num_scheduled_tokens")),
    Hook("vllm.v1.engine", "EngineCoreOutput", ("request_id", "kv_transfer_params")),
    Hook("vllm.v1.outputs", "ModelRunnerOutput", ("req_id_to_index", "sampled_token_ids")),
    Hook("vllm.v1.outputs", "DraftTokenIds", ("req_ids", "draft_token_ids")),
    Hook("vllm.v1.sample.logits_processor", "LogitsProcessor", ("validate_params",)),
    Hook("vllm.v1.worker.gpu.sample.logits_processor", "LogitsProcessor", ("validate_params", "add_request")),
)
WORKER_HOOKS = (
    Hook("vllm.v1.worker.gpu_worker", "Worker", ("load_model", "execute_model", "sample_tokens")),
    Hook("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", ("sampler", "input_batch")),
    Hook("vllm.v1.sample.sampler", "Sampler", ("forward", "logits")),
)

SERVING_HOOKS = (
    Hook("vllm", "LLM", ("llm_engine",)),
    Hook("vllm.v1.engine.llm_engine", "LLMEngine", ("add_request", "step", "abort_request", "engine_core")),
    Hook("vllm.v1.engine.core_client", "MPClient", ("resources", "shutdown")),
    Hook("vllm.v1.engine.core_client", "SyncMPClient", ("outputs_queue",)),
    Hook("vllm.v1.engine.core_client", "BackgroundResources", ("engine_manager",)),
    Hook("vllm.v1.engine.utils", "CoreEngineProcManager", ("sentinels",)),
    Hook("vllm.outputs", "RequestOutput", ("outputs", "kv_transfer_params")),
    Hook("vllm.outputs", "CompletionOutput", ("token_ids", "finish_reason", "logprobs")),
    Hook("vllm.sampling_params", "SamplingParams", ("structured_outputs", "output_kind", "stop_token_ids")),
)


def missing(hooks: Sequence[Hook]) -> list[str]:
    """Names of what this version of vLLM lacks, empty where it has every hook."""
    found = []
    for hook in hooks:
        try:
            owner = getattr(importlib.import_module(hook.module), hook.name)
        except (ImportError, AttributeError):
            found.append(f"{hook.module}.{hook.name}")
            continue
        found += [f"{hook.module}.{hook.name}.{part}" for part in hook.parts if not _has(owner, part)]
    return found


def _has(owner: Any, part: str) -> bool:
    """True for a class attribute, a field, a parameter of `forward`, or an attribute that the constructor sets."""
    if hasattr(owner, part) or part in getattr(owner, "__annotations__", {}):
        return True
    named = {name for method in ("forward", "__init__") for name in _names(getattr(owner, method, None))}
    return part in named


def _names(method: Any) -> set[str]:
    code = getattr(getattr(method, "__wrapped__", method), "__code__", None)
    return {*signature(method).parameters, *code.co_names} if code else set()


def check_installed() -> None:
    """Raise ValueError where vLLM's front end would not find the validation of requests."""
    if not any(entry.name == "blockpilot" for entry in entry_points(group=PROCESSORS)):
        raise ValueError(f"entry point {PROCESSORS}: BlockPilot is not installed beside this vLLM (pip install .)")


def check_hooks(hooks: Sequence[Hook]) -> None:
    """Raise ValueError that names every hook this vLLM lacks."""
    if names := missing(hooks):
        raise ValueError(f"this vLLM lacks {', '.join(names)}: BlockPilot's plug-in was tested with {TESTED}")


def register() -> None:
    """Entry point `vllm.general_plugins`: say early, in every process, that this vLLM is none that was tested.

    Nothing else: a vLLM that does not name the plug-in's scheduler works as if the plug-in were not installed.
    """
    import vllm

    if vllm.__version__.split("+")[0] != TESTED:
        log.warning("BlockPilot's plug-in was tested with vLLM %s, this is %s", TESTED, vllm.__version__)
