"""The sweep by vLLM: its arithmetic anywhere, the job itself where vLLM is installed."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from blockpilot.control.cost import Load, read_price
from helpers.prices import price
from helpers.sweeps import read_sweep
from jobs.sweep import SweepConfig, run
from jobs.sweeping.vllm_worker import emitted_by_step, price_of_steps, timed_mixtures

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("num_tokens", "accepted", "emitted"),
    [
        (10, [3, 0, 4], [4, 1, 5]),
        (7, [3, 0, 4], [4, 1, 2]),
        (4, [3, 0, 4], [4]),
        (6, [2], [3, 1, 1, 1]),
        (3, [], [1, 1, 1]),
        (0, [], []),
    ],
)
def test_tokens_of_steps_add_up_to_the_answer(num_tokens: int, accepted: list[int], emitted: list[int]) -> None:
    assert emitted_by_step(num_tokens, accepted) == emitted


def test_price_is_that_of_the_steps() -> None:
    true = price(base_s=0.01, row_s=0.001, launch_s=0.002, slot_s=0.0002, token_s=0.0005)
    loads = [
        Load(rows, rows * (max(sizes) - 1), sum(sizes) - rows) for rows in (1, 4) for sizes in timed_mixtures(rows, 8)
    ]
    assert len(set(loads)) == len(loads)
    seconds = [true.seconds(load) for load in loads]
    slow = [json.dumps([*load, 5.0]) for load in loads]
    lines = [json.dumps([*load, s]) for load, s in zip(loads, seconds, strict=True) for _ in range(3)] + slow
    found = price_of_steps(lines, price(rows=4))
    for load, s in zip(loads, seconds, strict=True):
        assert found.seconds(load) == pytest.approx(s, rel=1e-3)
    assert found.error < 1e-3
    with pytest.raises(ValueError, match="1 loads with 3 steps: too few"):
        price_of_steps(lines[:3], price())


def test_vllm_cannot_replay(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="method 'replay' with engine 'vllm': must be 'decode'"):
        run(SweepConfig(engine="vllm", output=str(tmp_path / "sweep")))
    assert not (tmp_path / "sweep").exists()


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_sweep_by_vllm_gives_what_this_engine_decodes(tmp_path: Path) -> None:
    """In float32 the same texts, distributions after the prompt, and nearly the same tau; and a price."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "List five colours."}\n{"prompt": "Who was Newton?"}\n')
    shared = ["--prompts", str(tmp_path / "prompts.jsonl"), "--candidates", "1", "4", "8", "--method", "decode"]
    shared += ["--max-new-tokens", "24", "--dtype", "float32"]
    by_vllm = [
        "--engine",
        "vllm",
        "--enforce-eager",
        "--max-length",
        "256",
        "--price-rows",
        "2",
        "--price-context",
        "32",
    ]
    for name, options in {"vllm": by_vllm, "ours": ["--price-rows", "0"]}.items():
        command = [sys.executable, ROOT / "jobs" / "sweep.py", *shared, *options, "--output", tmp_path / name]
        subprocess.run(command, check=True, cwd=tmp_path)
    theirs, ours = (read_sweep(tmp_path / name / "rows") for name in ("vllm", "ours"))
    assert [row.prompt_id for row in theirs.rows] == [row.prompt_id for row in ours.rows]
    for row, own in zip(theirs.rows, ours.rows, strict=True):
        assert (row.output_tokens, row.finish_reason) == (own.output_tokens, own.finish_reason)
        assert row.texts_agree
        assert dict(zip(row.probs_ids, row.probs, strict=True)) == pytest.approx(
            dict(zip(own.probs_ids, own.probs, strict=True)), abs=1e-4
        )
        assert row.taus == pytest.approx(own.taus, rel=0.1)
        assert row.num_steps[0] == len(row.output_tokens) - 1
    assert theirs.metadata.pair == ours.metadata.pair
    assert read_price(tmp_path / "vllm" / "price.json").pair == ours.metadata.pair
