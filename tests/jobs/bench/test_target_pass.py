"""The benchmark of a target's passes, on a few of its layers."""

import pytest

from jobs.bench.target_pass import TargetPassConfig, parents_of, run


def test_a_tree_has_two_children_a_node() -> None:
    assert parents_of("chain", 4) == [0, 1, 2]
    assert parents_of("tree", 8) == [0, 0, 1, 1, 2, 2, 3]


def test_a_table_of_passes_beside_those_of_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    run(TargetPassConfig(num_layers=4, vocab_size=64, rows=(1, 2), tokens=(3,), context=5, num_passes=1))
    output = capsys.readouterr().out
    # Three layers of 16 heads of 128 x 128, and windows of three inputs.
    megabytes = 3 * (16 * 128 * 128 + 3 * 3 * 16 * 128) * 4 / 2**20
    assert "qwen3.5-0.8b, 4 layers, float32" in output
    assert f"1 rows: states {megabytes:.1f} MiB a slot" in output
    (head,) = [line for line in output.splitlines() if line.startswith("| rows")]
    assert head.replace(" ", "") == "|rows|plain|chain3|tree3|transformers1|transformers3|"
