"""Options of vLLM's engine that jobs which start one share (docs/vllm.md)."""

import ray
from pydantic import Field

from jobs.common.config import Config


class VllmOptions(Config):
    """Settings of vLLM's engine."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs of an engine of vLLM."""
    quantization: str | None = None
    """Format of quantised weights, where vLLM does not see it by itself."""
    enforce_eager: bool = False
    """Start vLLM in seconds, without compiled graphs; steps are slower then."""

    @property
    def actor_options(self) -> dict[str, object]:
        """Options of the Ray actor that owns the engine, in a cluster that runs."""
        has_gpus = ray.cluster_resources().get("GPU", 0) >= 1
        return {"num_gpus": self.tensor_parallel_size} if has_gpus else {}

    @property
    def engine_options(self) -> dict[str, object]:
        """Options of `vllm.LLM`."""
        return self.model_dump(include=set(VllmOptions.model_fields))
