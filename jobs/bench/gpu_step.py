"""Step time on a GPU, with CUDA graphs and eager, relative to the memory-bandwidth bound.

Weights are random, in the shapes of published models, with a DFlash draft of 5 layers (gpu_models.py). A step is
that of an engine: the rows' blocks are drafted, verified and committed. The target's pass with LM head and sampling,
of random tokens, and the draft's pass are also timed separately, back to back. The floor is the time to read weights
and caches once, at the speed of a large copy.

    python -m jobs.bench.gpu_step --models 4b 8b --out gpu_step.json
    python -m jobs.bench.gpu_step --check
    python -m jobs.bench.gpu_step --all

--check: with small random pairs in float32, the texts of batches of chains and trees must equal those of one token at
a time. This job needs neither Ray nor MLflow.
"""

import argparse
import gc
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from blockpilot.device import device_name
from blockpilot.engine.engine import Engine
from blockpilot.engine.sampling import keyed_sample
from blockpilot.models.graphs import Graphs
from blockpilot.models.packing import Packing
from blockpilot.pairs.loading import Pair
from blockpilot.types import Request, Sampling
from jobs.bench.gpu_models import FAMILIES, SHAPES, TINY, Shape, random_pair, step_bytes

WAYS = "graph", "eager"
ROOM = 512  # in tokens, for the answers after the context
NUM_PASSES = 10  # timed back to back


class Failures:
    """Names of failed parts; the other parts still run."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def attempt(self, name: str, part: Callable[[], Any]) -> None:
        """Run a part, and print its exception."""
        try:
            part()
        except Exception:  # continue: the other parts can still be measured
            traceback.print_exc(file=sys.stdout)
            self.add(name)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def add(self, name: str) -> None:
        print(f"FAIL {name}", flush=True)
        self.names.append(name)


# --- speed ---


def with_graphs(pair: Pair, way: str, **options: Any) -> Engine:
    """An engine with CUDA graphs or eager (WAYS)."""
    engine = Engine(pair, graphs=False, **options)
    if way != "eager":
        cuda = pair.target.device.type == "cuda"
        graphs = Graphs(pair.target.device, capture=cuda)
        engine._cache.graphs = engine._drafter.cache.graphs = graphs
    return engine


class Point(NamedTuple):
    """Milliseconds of one kind of step, and of its floor."""

    model: str
    way: str
    rows: int
    tokens: int
    step_ms: float
    target_ms: float
    draft_ms: float
    floor_ms: float
    target_floor_ms: float
    num_syncs: int
    """Number of times per step that the host waits for the device."""
    capture_s: float
    """Seconds of the first step of the kind, which captures graphs."""


def copy_speed(device: torch.device) -> float:
    """Bytes per second of a large copy, read plus written: the best of several."""
    size = 1 << 31 if device.type == "cuda" else 1 << 24
    source, copy = (torch.ones(size // 4, device=device) for _ in range(2))
    best = min(_seconds(lambda: copy.copy_(source), device) for _ in range(8))
    return 2 * size / best


@torch.inference_mode()
def measure(pair: Pair, name: str, way: str, rows: int, options: argparse.Namespace, speed: float) -> Iterator[Point]:
    """Points of an engine with `rows` rows, for one block size after the other."""
    context, sampling = options.context, Sampling(options.temperature)
    device = pair.target.device
    engine = with_graphs(pair, way, num_slots=rows, max_length=context + ROOM)
    prompts = torch.randint(0, pair.vocab_size, (rows, context), generator=torch.Generator().manual_seed(0))
    for size in options.tokens:
        ids = [engine.add(Request(tuple(p), ROOM, sampling, size, layout="chain")) for p in prompts.tolist()]
        while engine.num_decoding < rows:
            engine.step()
        started = time.perf_counter()
        engine.step()
        _wait(device)
        capture_s = time.perf_counter() - started
        engine.step()
        seconds = []
        for _ in range(options.steps):
            started = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - started)
        assert engine.num_decoding == rows, "a row has ended: fewer steps or more room are needed"
        length = len(engine._rows[0].tokens)
        target_ms, draft_ms = passes_ms(engine, size, sampling)
        floor_ms, target_floor_ms = (1e3 * num_bytes / speed for num_bytes in step_bytes(engine, size, length))
        num_syncs = count_syncs(engine)
        times = 1e3 * median(seconds), target_ms, draft_ms, floor_ms, target_floor_ms
        yield Point(name, way, rows, size, *times, num_syncs, capture_s)
        for request_id in ids:
            engine.cancel(request_id)


def passes_ms(engine: Engine, size: int, row_sampling: Sampling) -> tuple[float, float]:
    """Milliseconds of the target's pass, with LM head and sampling, and of the draft's, averaged over NUM_PASSES."""
    device, rows = engine.pair.target.device, engine._rows
    starts, slots = [row.anchor_position for row in rows], list(range(len(rows)))
    # Random: a mixture of experts reads different experts for different tokens.
    tokens = torch.randint(0, engine.pair.vocab_size, (size * len(rows),), device=device)
    sampling, positions, graphs = [row_sampling] * len(tokens), [0] * len(tokens), engine._cache.graphs

    def target() -> None:
        packing = Packing([size] * len(rows), starts, device, cut=len(rows))
        view = engine._cache.view(packing.rows, packing.columns, slice(0, len(rows)), packing.length)
        hidden = engine._target.score(tokens, view, packing, features=True).hidden
        keyed_sample(engine._target.logits(hidden), positions, sampling, graphs=graphs)

    def draft() -> None:
        engine._drafter.propose(rows, slots, [size - 1] * len(rows), 1)

    times_ms = []
    for run_pass in (target, draft) if size > 1 else (target,):
        run_pass()
        times_ms.append(1e3 * _seconds(partial(_repeat, run_pass), device) / NUM_PASSES)
    return times_ms[0], times_ms[1] if size > 1 else 0.0


def _repeat(run_pass: Callable[[], None]) -> None:
    for _ in range(NUM_PASSES):
        run_pass()


def count_syncs(engine: Engine) -> int:
    """Number of times that the host waits for the device in a step; 0 on a CPU."""
    if engine.pair.target.device.type != "cuda":
        return 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(part: Callable[[], Any], device: torch.device) -> float:
    _wait(device)
    started = time.perf_counter()
    part()
    _wait(device)
    return time.perf_counter() - started


def bench(options: argparse.Namespace, failures: Failures) -> None:
    """Print a line for every point, and write all points so far to the file."""
    device, started = torch.device(options.device), time.perf_counter()
    speed = copy_speed(device)
    print(f"{device_name(device)}, torch {torch.__version__}: copies at {speed / 1e9:.0f} GB/s", flush=True)
    print("| model | way | rows | B | step, ms | floor | ratio | target, ms | floor | ratio | draft, ms | syncs |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    points: list[Point] = []

    def bench_engine(pair: Pair, name: str, way: str, rows: int) -> None:
        for p in measure(pair, name, way, rows, options, speed):
            points.append(p)
            step_cells = f"{p.step_ms:.2f} | {p.floor_ms:.2f} | {p.step_ms / p.floor_ms:.2f}"
            target_cells = f"{p.target_ms:.2f} | {p.target_floor_ms:.2f} | {p.target_ms / p.target_floor_ms:.2f}"
            numbers = f"{step_cells} | {target_cells} | {p.draft_ms:.2f} | {p.num_syncs}"
            print(f"| {p.model} | {p.way} | {p.rows} | {p.tokens} | {numbers} |", flush=True)
            if options.out:
                conditions = {"device": device_name(device), "copy_bytes_per_s": speed, "torch": torch.__version__}
                text = json.dumps(conditions | {"points": [point._asdict() for point in points]}, indent=1)
                Path(options.out).write_text(text)

    def bench_model(name: str) -> None:
        shape, dtype = SHAPES[name], torch.float32 if options.tiny else torch.bfloat16
        shape = shape._replace(sizes=shape.sizes | TINY) if options.tiny else shape
        pair = random_pair(shape.new, device, dtype, num_layers=2 if options.tiny else 5, block_size=16)
        print(f"{name}: created after {time.perf_counter() - started:.1f} s", flush=True)
        for rows in options.rows:
            for way in options.ways:
                if time.perf_counter() - started > options.seconds:
                    print(f"skipped, {options.seconds:g} s have passed: {name}, {rows} rows, {way}", flush=True)
                    continue
                failures.attempt(f"{name}, {rows} rows, {way}", partial(bench_engine, pair, name, way, rows))

    for name in options.models:
        failures.attempt(name, partial(bench_model, name))
    print(f"{time.perf_counter() - started:.1f} s in all", flush=True)


# --- exactness ---

KINDS = [(1, "chain"), (4, "chain"), (7, "tree"), (2, "chain"), (16, "chain"), (20, "tree"), (8, "chain")]
NUM_TOKENS = 40


def requests_of(pair: Pair, temperature: float, *, plain: bool) -> list[Request]:
    """A request of each of KINDS, with prompts of several lengths; plain: one token at a time."""
    requests = []
    for i, (size, layout) in enumerate(KINDS):
        prompt = torch.randint(0, pair.vocab_size, (5 + 53 * i,), generator=torch.Generator().manual_seed(i))
        sampling = Sampling(temperature=temperature, seed=i)
        kind: Any = {"block_size": 1} if plain else {"block_size": size, "layout": layout}
        requests.append(Request(tuple(prompt.tolist()), NUM_TOKENS, sampling=sampling, **kind))
    return requests


def answers(engine: Engine, requests: Sequence[Request]) -> tuple[list[list[int]], int]:
    """Texts, and the number of accepted drafted tokens."""
    ids = [engine.add(request) for request in requests]
    texts: dict[int, list[int]] = {request_id: [] for request_id in ids}
    num_accepted = 0
    while not engine.idle:
        for step in engine.step():
            texts[step.request_id] += step.tokens
            num_accepted += step.num_accepted
    return [texts[request_id] for request_id in ids], num_accepted


def check_texts(pair: Pair, family: str, temperature: float, ways: Sequence[str], failures: Failures) -> None:
    """Compare the texts in every way with eager plain decoding of one request at a time."""
    alone, expected = with_graphs(pair, "eager", num_slots=1, max_length=512), []
    for request in requests_of(pair, temperature, plain=True):
        expected += answers(alone, [request])[0]
    for way in ways:
        for plain in (False, True):
            name = f"{family}, T={temperature:g}, {way}, {'one at a time in a batch' if plain else 'blocks'}"
            room: Any = {"num_slots": 4, "max_length": 512, "max_prefill_tokens": 100, "prefix_tokens": 4096}
            engine = with_graphs(pair, way, **room)
            for prompts in ("", ", kept prompts"):  # the second time from the prefix cache
                texts, num_accepted = answers(engine, requests_of(pair, temperature, plain=plain))
                equal = sum(a == b for a, b in zip(texts, expected, strict=True))
                summary = f"{equal}/{len(texts)} texts equal, {num_accepted} accepted, "
                summary += f"{len(engine._cache.graphs or ())} graphs, {engine.num_kept_tokens} tokens kept"
                if equal == len(texts):
                    print(f"PASS {name}{prompts}: {summary}", flush=True)
                else:
                    failures.add(f"{name}{prompts}: {summary}")


def check(options: argparse.Namespace, failures: Failures) -> None:
    """Print PASS or FAIL for every family, greedy and sampled."""
    device = torch.device(options.device)
    for family, shape in FAMILIES.items():
        for temperature in (0.0, 1.0):

            def part(shape: Shape = shape, name: str = family, t: float = temperature) -> None:
                pair = random_pair(shape.new, device, torch.float32, num_layers=2, block_size=8)
                check_texts(pair, name, t, options.ways, failures)

            failures.attempt(f"{family}, T={temperature:g}", part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=["4b", "8b"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=[1, 8, 16], help="block sizes: tokens that a row verifies"
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--temperature", type=float, default=0.0, help="sampling temperature; 0 is greedy")
    parser.add_argument("--context", type=int, default=512, help="tokens of context of every row")
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each kind; the result is their median")
    parser.add_argument("--seconds", type=float, default=75.0, help="start no engine after this many seconds")
    parser.add_argument("--out", help="JSON file of all points")
    parser.add_argument("--check", action="store_true", help="check exactness in float32 instead of measuring speed")
    parser.add_argument("--all", action="store_true", help="check exactness, then measure speed")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small float32 models, to try this job")
    options, failures = parser.parse_args(), Failures()
    gc.freeze()  # captures collect garbage; keep it small
    if options.check or options.all:
        failures.attempt("exactness", lambda: check(options, failures))
    if not options.check:
        failures.attempt("speed", lambda: bench(options, failures))
    print("failed: " + "; ".join(failures.names) if failures.names else "all passed", flush=True)
    sys.exit(bool(failures.names))


if __name__ == "__main__":
    main()
