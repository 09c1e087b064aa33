"""Long prompts: 8,000 tokens on the tiny pair, 1,900 on the embedded one, in chunks while other rows decode trees."""

import resource
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import torch

from blockpilot.engine.engine import Engine
from blockpilot.pairs.loading import Pair
from blockpilot.types import Request, Sampling
from helpers.engines import NEVER, is_own_text, plain_text, run, text_of
from helpers.fuzz import pair_of
from helpers.tiny import tiny_target

NUM_TOKENS, PART = 8000, 256
HOT = Sampling(6.0, seed=5)  # with shared noise a random draft is often right here
ROOT = Path(__file__).parents[2]
MIB = 2**20
WORKSPACE = 64 * MIB  # beyond the caches: masks, scores and hidden states of one chunk, not of a whole prompt


def long_pair() -> Pair:
    """A tiny target with positions for 8,192 tokens, and a random draft."""
    return pair_of(tiny_target(max_position_embeddings=8192), torch.float32)


def long_prompt(seed: int = 0, num: int = NUM_TOKENS, vocab_size: int = 256) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, vocab_size, (num,), generator=generator).tolist())


def test_eight_thousand_tokens_beside_trees_and_again_from_the_prefix_cache() -> None:
    pair, prompt = long_pair(), long_prompt()
    engine = Engine(pair, num_slots=2, max_length=8192, max_prefill_tokens=PART, prefix_tokens=8192)
    neighbour = Request(prompt[-30:], 150, HOT, 6, NEVER, layout="tree")
    long = Request(prompt, 20, HOT, 6, NEVER, layout="tree")
    neighbour_steps, steps = run(engine, [neighbour, long])
    assert text_of(neighbour_steps) == plain_text(pair, neighbour.prompt_ids, 150, HOT)
    assert any(not step.tree.is_chain for step in neighbour_steps)
    text = text_of(steps)
    turn = replace(long, prompt_ids=(*prompt, *text, *prompt[:20]))
    [cached_steps] = run(engine, [turn])
    assert cached_steps[0].num_reused == (len(prompt) + len(text) - 1) // 16 * 16
    assert is_own_text(pair, prompt, text, HOT)
    assert is_own_text(pair, turn.prompt_ids, text_of(cached_steps), HOT)


def test_memory_is_that_of_the_caches_and_of_one_part() -> None:
    """Memory growth of a separate process with both slots full and as many tokens in the prefix cache."""
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    code = "from engine.test_long_prompts import grown; print(*grown())"
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    grown_bytes, cache_bytes = map(int, result.stdout.split())
    assert cache_bytes > 30 * MIB
    assert 0.8 * cache_bytes < grown_bytes < cache_bytes + WORKSPACE


def grown() -> tuple[int, int]:
    """Bytes by which the process grows with two prompts of 8,000 tokens, and bytes of the engine's caches."""
    torch.set_num_threads(1)
    pair = long_pair()
    run(Engine(pair, num_slots=2, max_length=64), [Request(long_prompt(num=40), 4, HOT, 6)] * 2)
    over, most, before = threading.Event(), [0], resident_bytes()

    def watch() -> None:
        while not over.wait(0.001):
            most[0] = max(most[0], resident_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    engine = Engine(pair, num_slots=2, max_length=8192, max_prefill_tokens=PART, prefix_tokens=2 * 8192)
    run(engine, [Request(long_prompt(seed), 20, HOT, 6, layout="tree") for seed in range(2)])
    over.set()
    watcher.join()
    return most[0] - before, engine.cache_bytes


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_two_thousand_tokens_on_the_embedded_pair(bfloat16_pair: Pair) -> None:
    """Exactly the same bfloat16 text in chunks next to another row's trees as whole, alone, one token at a time."""
    pair, manual = bfloat16_pair, (ROOT / "docs" / "decoding.md").read_text()
    prompt = tuple(pair.tokenizer(manual).input_ids[:1900])
    plain = [Request(prompt[:50], 60, HOT, 1), Request(prompt, 24, HOT, 1)]
    alone = Engine(pair, num_slots=1, max_length=2048)
    expected = [text_of(run(alone, [request])[0]) for request in plain]
    engine = Engine(pair, num_slots=2, max_length=2048, max_prefill_tokens=PART, prefix_tokens=4096)
    trees = [replace(request, block_size=8, layout="tree") for request in plain]
    assert [text_of(steps) for steps in run(engine, trees)] == expected
    [cached_steps] = run(engine, trees[1:])
    assert text_of(cached_steps) == expected[1]
    assert cached_steps[0].num_reused == 1888
