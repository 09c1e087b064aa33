"""Sweep by vLLM: its arithmetic, and the job itself if vLLM is installed."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from blockpilot.control.cost import PRICE_FILE, Load, read_price
from blockpilot.drafts.eagle3_checkpoint import save_eagle3
from blockpilot.pairs.checkpoints import find_target
from blockpilot.pairs.loading import Pair
from blockpilot.prompts.files import Message, Prompt
from blockpilot.sweep.rows import write_rows
from blockpilot.sweep.sweep import sweep_prompts
from helpers.eagle3 import random_eagle3
from helpers.prices import price
from helpers.sweeps import metadata, read_sweep
from helpers.tiny import tiny_target
from jobs.common.config import PairConfig
from jobs.export import ExportConfig
from jobs.export import run as run_export
from jobs.sweep import SweepConfig, run
from jobs.sweeping.vllm_engine import VllmPair
from jobs.sweeping.vllm_worker import VllmSweepOptions, batch_sizes, emitted_by_step, price_of_steps

ROOT = Path(__file__).parents[2]
DECODE = """
import json, sys
from vllm import LLM, SamplingParams

options = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "enforce_eager": True}
with open(sys.argv[2]) as file:
    engine = LLM(sys.argv[1], speculative_config=json.load(file), **options)
sampling = SamplingParams(temperature=0, max_tokens=16, detokenize=False)
(answer,) = engine.generate([{"prompt_token_ids": json.loads(sys.argv[3])}], sampling, use_tqdm=False)
print("\\n" + json.dumps(list(answer.outputs[0].token_ids)))
"""


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
    true_price = price(base_s=0.01, row_s=0.001, launch_s=0.002, token_s=0.0005)
    loads = [Load(rows, rows * num, rows * num) for rows in batch_sizes(6) for num in (0, 3, 7)]
    timed = {load: true_price.seconds(load) for load in loads}
    fitted_price = price_of_steps(timed | {Load(5, 5, 5): -0.1}, price(rows=6))  # negative: only timing noise
    for load, seconds in timed.items():
        assert fitted_price.seconds(load) == pytest.approx(seconds, rel=1e-3)
    assert fitted_price.error < 1e-3
    assert fitted_price.rows == 6
    assert [batch_sizes(most) for most in (1, 6, 8)] == [[1], [1, 2, 4, 6], [1, 2, 4, 8]]
    with pytest.raises(ValueError, match="3 loads: too few for the price of a step"):
        price_of_steps(dict(list(timed.items())[:3]), price())


def test_a_pair_is_known_without_its_weights(tiny_pair_dirs: tuple[Path, Path], tiny_pair: Pair) -> None:
    target, draft = map(str, tiny_pair_dirs)
    pair = VllmPair.of(PairConfig(target=target, draft=draft, dtype="float32"))
    for name in ("id", "vocab_size", "block_size"):
        assert getattr(pair, name) == getattr(tiny_pair, name), name
    assert pair.tokenizer.decode([70, 71]) == tiny_pair.tokenizer.decode([70, 71])


def test_an_accelerator_type_reserves_a_gpu_for_every_part_of_the_model() -> None:
    """Also before the cluster has any GPU, as where the job itself starts the workers."""
    assert VllmSweepOptions(tensor_parallel_size=4).actor_options("H100") == {"num_gpus": 4}


def test_what_vllm_cannot_sweep_is_refused_by_name(tiny_pair_dirs: tuple[Path, Path], tmp_path: Path) -> None:
    draft = random_eagle3(tiny_target().config, torch.arange(5, 105), block_size=6)
    save_eagle3(draft, tmp_path, dtype=torch.float32)
    with pytest.raises(ValueError, match="eagle3; by vLLM only DFlash drafts are swept"):
        VllmPair.of(PairConfig(target=str(tiny_pair_dirs[0]), draft=str(tmp_path)))
    with pytest.raises(ValueError, match="method 'replay' with engine 'vllm': must be 'decode'"):
        run(SweepConfig(engine="vllm", output=str(tmp_path / "sweep")))
    assert not (tmp_path / "sweep").exists()


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_sweep_by_vllm_gives_what_this_engine_decodes(tmp_path: Path) -> None:
    """Same texts and distributions after the prompt in float32, nearly the same tau, and a step price."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "List five colours."}\n{"prompt": "Who was Newton?"}\n')
    shared = ["--prompts", str(tmp_path / "prompts.jsonl"), "--candidates", "1", "4", "8", "--method", "decode"]
    shared += ["--max-new-tokens", "24", "--dtype", "float32"]
    vllm_options = [
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
    for name, options in {"vllm": vllm_options, "ours": ["--price-rows", "0"]}.items():
        command = [sys.executable, ROOT / "jobs" / "sweep.py", *shared, *options, "--output", tmp_path / name]
        subprocess.run(command, check=True, cwd=tmp_path)
    theirs, ours = (read_sweep(tmp_path / name / "rows") for name in ("vllm", "ours"))
    assert [row.prompt_id for row in theirs.rows] == [row.prompt_id for row in ours.rows]
    for row, our_row in zip(theirs.rows, ours.rows, strict=True):
        assert (row.output_tokens, row.finish_reason) == (our_row.output_tokens, our_row.finish_reason)
        assert row.texts_agree
        assert dict(zip(row.probs_ids, row.probs, strict=True)) == pytest.approx(
            dict(zip(our_row.probs_ids, our_row.probs, strict=True)), abs=1e-4
        )
        assert row.taus == pytest.approx(our_row.taus, rel=0.1)
        assert row.num_steps[0] == len(row.output_tokens) - 1
    assert theirs.metadata.pair == ours.metadata.pair
    assert read_price(tmp_path / "vllm" / "price.json").pair == ours.metadata.pair


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_takes_the_exported_file_and_keeps_its_text(embedded_pair: Pair, tmp_path: Path) -> None:
    """Exported schedule of several numbers of drafted tokens, including 0."""
    prompts = [Prompt("questions", (Message("user", text),)) for text in ("List five colours.", "Who was Newton?")]
    swept = sweep_prompts(embedded_pair, prompts, (1, 4, 8), max_new_tokens=16)
    sweep_metadata = metadata(pair=embedded_pair.id, vocab_size=embedded_pair.vocab_size, candidates=[1, 4, 8])
    write_rows(tmp_path / "rows" / "part-0.parquet", swept.rows, sweep_metadata)
    (tmp_path / PRICE_FILE).write_text(price(pair=embedded_pair.id, rows=8, token_s=0.1).to_json())
    file = run_export(ExportConfig(sweep=str(tmp_path), output=tmp_path)).file
    assert len(json.loads(file.read_text())["num_speculative_tokens_per_batch_size"]) > 1
    ids = prompts[0].encode(embedded_pair.tokenizer)
    target = find_target(embedded_pair.id.target).directory
    command = [sys.executable, "-c", DECODE, target, file, json.dumps(ids)]
    output = subprocess.run(command, check=True, cwd=tmp_path, stdout=subprocess.PIPE, text=True).stdout
    assert json.loads(output.splitlines()[-1]) == swept.rows[0].output_tokens
