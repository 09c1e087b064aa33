"""The plan of a fit: what its workers need to know, whichever process they run in."""

import hashlib
from pathlib import Path
from typing import NamedTuple

import torch

from blockpilot.policy.dataset import Examples, split_examples
from blockpilot.policy.training import FitSettings, FitTask
from jobs.training.config import TrainConfig
from jobs.training.dataset import Dataset


class FitPlan(NamedTuple):
    """All that a worker needs."""

    folder: Path
    """Of the examples."""
    vocab_size: int
    validation: float
    """Share of the prompts that are held back."""
    task: FitTask
    settings: FitSettings
    checkpoint_every: int

    def examples(self) -> tuple[Examples, Examples]:
        """(training, validation)."""
        return split_examples(self.folder, self.validation, self.settings.seed)


def plan(config: TrainConfig, data: Dataset) -> FitPlan:
    """The plan of a configuration on its dataset."""
    task = FitTask(config.fit.kind, config.objective, tuple(data.candidates), torch.tensor(data.step_costs))
    vocab_size = data.metadata.vocab_size
    return FitPlan(data.folder, vocab_size, config.validation, task, config.fit, config.checkpoint_every)


def run_name(config: TrainConfig, data: Dataset, planned: FitPlan) -> str:
    """The name of a Ray Train run. One of the same name is continued, so it holds all that the result depends on."""
    of_fit = planned.settings, planned.validation, planned.task, config.num_workers
    key = repr((*of_fit, data.id, tuple(data.candidates), config.leave_out))
    return f"policy-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
