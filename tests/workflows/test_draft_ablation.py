"""The ablation of drafts: every variant is a valid training, and the table is of trainings that really ran."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workflows.draft_ablation import VARIANTS, AblationConfig, run, variant

ROOT = Path(__file__).parents[2]


def test_every_variant_differs_from_the_base_in_what_it_says() -> None:
    base = variant(AblationConfig(), "base").model_dump(exclude={"output"})
    for name, changes in VARIANTS.items():
        found = variant(AblationConfig(), name).model_dump(exclude={"output"})
        assert found == base | changes | {"fit": base["fit"] | changes.get("fit", {})}
        assert (name == "base") == (found == base)


def test_unknown_variants_are_refused() -> None:
    with pytest.raises(ValueError, match="variants 'wider': must be of base, 1 layer"):
        run(AblationConfig(variants=("base", "wider")))


@pytest.mark.ray
def test_a_table_of_two_variants(tiny_pair_dirs: tuple[Path, Path], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"say the number {i}\n" for i in range(24)))
    arguments = f"""--target {tiny_pair_dirs[0]} --prompts {prompts} --held-out 0.3 --max-new-tokens 12
        --mask-token <mask> --target-layer-ids 1 3 --num-sampled 64 --num-anchors 4 --answers {tmp_path / "answers"}
        --temperatures 0 --output {tmp_path / "ablation"} --variants base"""
    command = [sys.executable, str(ROOT / "workflows" / "draft_ablation.py"), *arguments.split(), "1 layer"]
    environment = {k: v for k, v in os.environ.items() if k not in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    table = (tmp_path / "ablation" / "table.md").read_text()
    assert done.stdout.endswith(table)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert rows[0][:3] == ["variant", "parameters", "blocks/s"]
    assert [row[0] for row in rows[2:]] == ["base", "1 layer"]
    assert all(float(cell) >= 1 for row in rows[2:] for cell in row[5:])
