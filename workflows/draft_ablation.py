"""Choose a draft's shape and loss by measurement: short trainings that differ from the first in one thing each.

All see the same answers, the same number of blocks in the same order, and are validated on the same held-out answers.
The table also has blocks/s, since a slower draft sees fewer blocks in the same time.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockpilot.draft_training.training import DraftFitSettings
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
    "decay": {"fit": {"weighting": "decay"}},
    "half distillation": {"fit": {"distill": 0.5}},
    "no distillation": {"fit": {"distill": 0.0}},
    "random start": {"start": "random"},
}


class AblationConfig(TrainDraftConfig):
    """Base variant, variants to run and their output."""

    target_layer_ids: tuple[int, ...] | None = (1, 8, 14, 20, 27)
    fit: DraftFitSettings = DraftFitSettings(weighting="dpace", distill=1.0, lr=2e-3, epochs=1, num_anchors=32)
    max_answers: int | None = 800
    variants: tuple[str, ...] = tuple(VARIANTS)
    """Names of the variants to run."""
    output: Path = Path("runs/draft_ablation")


def run(config: AblationConfig) -> str:
    """Train every variant that is not there yet; returns the table. Raises ValueError for unknown variants."""
    if unknown := [name for name in config.variants if name not in VARIANTS]:
        raise ValueError(f"variants {unknown[0]!r}: must be of {', '.join(VARIANTS)}")
    rows = []
    for name in config.variants:
        print(f"\n--- {name} ---", flush=True)
        rows.append(row(name, train_draft.run(variant(config, name))))
    text = markdown(rows)
    write_text(config.output / "table.md", text + "\n")
    print(f"\n{text}")
    return text


def variant(config: AblationConfig, name: str) -> TrainDraftConfig:
    """The base with the changes of a variant, its own output and no measurement of tau at the end."""
    base = config.model_dump(exclude={"variants"})
    changes = VARIANTS[name]
    own = {"fit": base["fit"] | changes.get("fit", {}), "output": config.output / name.replace(" ", "-")}
    return TrainDraftConfig(**base | changes | own | {"num_test_prompts": 0})


def row(name: str, result: TrainDraftResult) -> Mapping[str, str]:
    """Row of the table."""
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
        "first token right": f"{metrics['validation_accuracy_1']:.3f}",
        **taus,
    }


if __name__ == "__main__":
    main(AblationConfig, run)
