"""Choose a draft's shape and loss by measurement: short trainings that differ from the first in one thing each.

All see the same answers, as many blocks each in the same order, and are validated on the same held-out answers. The
table has what a block costs besides, since a slower draft could have seen fewer blocks in the same time.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockpilot.draft_training.training import Weighting
from blockpilot.drafts.checkpoint import load_draft
from blockpilot.evaluation.tables import markdown
from blockpilot.storage import write_text
from jobs import train_draft
from jobs.common.config import main
from jobs.train_draft import TrainDraftConfig, TrainDraftResult

VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "1 layer": {"num_layers": 1},
    "2 layers": {"num_layers": 2},
    "5 layers": {"num_layers": 5},
    "3 target layers": {"target_layer_ids": (1, 14, 27)},
    "B=10": {"block_size": 10},
    "B=16": {"block_size": 16},
    "decay": {"weighting": "decay"},
    "half distillation": {"distill": 0.5},
    "no distillation": {"distill": 0.0},
    "random start": {"start": "random"},
}


class AblationConfig(TrainDraftConfig):
    """The base variant, and where all are kept."""

    target_layer_ids: tuple[int, ...] | None = (1, 8, 14, 20, 27)
    weighting: Weighting = "dpace"
    distill: float = 1.0
    lr: float = 2e-3
    epochs: int = 1
    num_anchors: int = 32
    max_answers: int | None = 800
    variants: tuple[str, ...] = tuple(VARIANTS)
    """Which of the variants to run, by name."""
    output: Path = Path("runs/draft_ablation")


def run(config: AblationConfig) -> str:
    """Train every variant that is not there yet; returns the table. Raises ValueError for unknown variants."""
    unknown = [name for name in config.variants if name not in VARIANTS]
    if unknown:
        raise ValueError(f"variants {unknown[0]!r}: must be of {', '.join(VARIANTS)}")
    base = config.model_dump(exclude={"variants"})
    rows = []
    for name in config.variants:
        changes = VARIANTS[name] | {"output": config.output / name.replace(" ", "-"), "num_test_prompts": 0}
        print(f"\n--- {name} ---", flush=True)
        rows.append(row(name, train_draft.run(TrainDraftConfig(**base | changes))))
    text = markdown(rows)
    write_text(config.output / "table.md", text + "\n")
    print(f"\n{text}")
    return text


def row(name: str, result: TrainDraftResult) -> Mapping[str, str]:
    """What is told of a variant."""
    metrics = result.metrics
    size = sum(weight.numel() for weight in load_draft(result.draft).parameters())
    taus = {
        f"tau, T={key.removeprefix('validation_tau_T')}": f"{value:.3f}"
        for key, value in metrics.items()
        if key.startswith("validation_tau_T")
    }
    return {
        "variant": name,
        "parameters": f"{size / 1e6:.1f} M",
        "blocks/s": f"{metrics['blocks_per_s']:.0f}",
        "held-out loss": f"{metrics['validation_loss']:.3f}",
        "slot 1 right": f"{metrics['validation_accuracy_1']:.3f}",
        **taus,
    }


if __name__ == "__main__":
    main(AblationConfig, run)
