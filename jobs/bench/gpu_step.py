"""A step on a GPU by CUDA graphs and kernel by kernel, against the time in which its bytes can be read.

Weights are random, and made on the device: Qwen3's shapes, with a DFlash draft of 5 layers. A step is an engine's:
the rows' blocks drafted, verified and committed. Beside it the target's pass with its LM head and choice, and the
draft's, back to back. The floor reads every weight and all that the caches hold once, at the speed of a large copy.

    python -m jobs.bench.gpu_step --models 4b 8b --out gpu_step.json
    python -m jobs.bench.gpu_step --check
    python -m jobs.bench.gpu_step --all

--check: with small random pairs in float32, texts of batches of chains and trees are those of one token at a time.
This job needs neither Ray nor MLflow.
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
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from blockpilot.device import device_name
from blockpilot.drafts.dflash import DraftModel
from blockpilot.drafts.dflash_checkpoint import new_draft_config
from blockpilot.engine.engine import Engine
from blockpilot.engine.sampling import keyed_sample
from blockpilot.models.graphs import Graphs
from blockpilot.models.packing import Packing
from blockpilot.pairs.loading import Pair
from blockpilot.types import PairId, Request, Sampling

SHAPES: dict[str, dict[str, Any]] = {
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
}
QWEN3: dict[str, Any] = {
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
}
TINY: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
}
TINY |= {"num_key_value_heads": 2, "vocab_size": 512, "head_dim": 32, "max_position_embeddings": 2048}
WAYS = "graph", "eager"
NewModel = Callable[[], PreTrainedModel]
ROOM = 512  # tokens after the context
NUM_PASSES = 10  # back to back


class Failures:
    """Parts that raised or did not hold; the others run nevertheless."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def attempt(self, name: str, part: Callable[[], Any]) -> None:
        """Run a part, and print what it raises."""
        try:
            part()
        except Exception:  # the machine is lent: what can still be measured is measured
            traceback.print_exc(file=sys.stdout)
            self.add(name)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def add(self, name: str) -> None:
        print(f"FAIL {name}", flush=True)
        self.names.append(name)


# --- pairs ---


def random_pair(target: NewModel, device: torch.device, dtype: torch.dtype, **draft: Any) -> Pair:
    """A target and a draft of random weights, made on the device."""
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = target()
            network = DraftModel(new_draft_config(model.config, mask_token_id=model.config.vocab_size - 1, **draft))
    finally:
        torch.set_default_dtype(default)
    for module in (model, network):
        nn.Module.to(module, device=device, dtype=dtype).eval().requires_grad_(False)
    no_tokenizer: Any = None
    pair = Pair(PairId("random", "0", "random", "0"), model, network, no_tokenizer)
    _ = pair.prepared_draft
    return pair


def qwen3(shape: dict[str, Any]) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**({"head_dim": 128, "max_position_embeddings": 4096} | QWEN3 | shape)))


def with_graphs(pair: Pair, way: str, **options: Any) -> Engine:
    """An engine that runs in one of WAYS."""
    engine = Engine(pair, graphs=False, **options)
    if way != "eager":
        cuda = pair.target.device.type == "cuda"
        graphs = Graphs(pair.target.device, capture=cuda)
        engine._cache.graphs = engine._drafter.cache.graphs = graphs
    return engine


# --- speed ---


class Point(NamedTuple):
    """Milliseconds of one kind of step, beside its floor's."""

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
    """Times that a step's host waits for the device."""
    capture_s: float
    """Seconds of the first step of the kind."""


def copy_speed(device: torch.device) -> float:
    """Bytes a second of a large copy, read and written: the best of several."""
    size = 1 << 31 if device.type == "cuda" else 1 << 24
    source, copy = (torch.ones(size // 4, device=device) for _ in range(2))
    best = min(_seconds(lambda: copy.copy_(source), device) for _ in range(8))
    return 2 * size / best


def floors(pair: Pair, rows: int, tokens: int, length: int, speed: float) -> tuple[float, float]:
    """Milliseconds in which a step's, and the target's, weights and caches are read."""
    model: Any = pair.target
    head, embeddings = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    weights = sum(each.nbytes for each in model.parameters())
    weights -= 0 if head.data_ptr() == embeddings.data_ptr() else embeddings.nbytes
    of_head = head.nbytes
    of_draft = sum(each.nbytes for each in pair.draft.parameters()) + of_head if tokens > 1 else 0
    config = pair.target.config
    per_token = 2 * config.num_key_value_heads * config.head_dim * pair.draft.dtype.itemsize * rows * length
    of_target = weights + config.num_hidden_layers * per_token
    num_draft_layers = len(pair.prepared_draft.new_cache(1, 1).layers)
    in_draft = of_draft + (num_draft_layers * per_token if tokens > 1 else 0)
    return 1e3 * (of_target + in_draft) / speed, 1e3 * of_target / speed


@torch.inference_mode()
def measure(pair: Pair, name: str, way: str, rows: int, options: argparse.Namespace, speed: float) -> Iterator[Point]:
    """Points of an engine of `rows` rows, whose blocks take all sizes one after the other."""
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
        assert engine.num_decoding == rows, "a row came to its end: fewer steps or more room are needed"
        length = len(engine._rows[0].tokens)
        target_ms, draft_ms = passes_ms(engine, size, sampling)
        floor_ms, target_floor_ms = floors(pair, rows, size, length, speed)
        num_syncs = count_syncs(engine)
        times = 1e3 * median(seconds), target_ms, draft_ms, floor_ms, target_floor_ms
        yield Point(name, way, rows, size, *times, num_syncs, capture_s)
        for request_id in ids:
            engine.cancel(request_id)


def passes_ms(engine: Engine, size: int, of_all: Sampling) -> tuple[float, float]:
    """Milliseconds of the target's pass, with LM head and choice, and of the draft's, of NUM_PASSES back to back."""
    device, rows = engine.pair.target.device, engine._rows
    starts, slots = [row.anchor_position for row in rows], list(range(len(rows)))
    tokens = torch.zeros(size * len(rows), dtype=torch.int64, device=device)
    sampling, positions, graphs = [of_all] * len(tokens), [0] * len(tokens), engine._cache.graphs

    def target() -> None:
        packing = Packing([size] * len(rows), starts, device)
        view = engine._cache.view(packing.rows, packing.columns, slice(0, len(rows)), packing.length)
        hidden = engine._target.score(tokens, view, packing, features=True).hidden
        keyed_sample(engine._target.logits(hidden), positions, sampling, graphs=graphs)

    def draft() -> None:
        engine._drafter.propose(rows, slots, [size - 1] * len(rows), 1)

    found = []
    for one in (target, draft) if size > 1 else (target,):
        one()
        found.append(1e3 * _seconds(partial(_repeat, one), device) / NUM_PASSES)
    return found[0], found[1] if size > 1 else 0.0


def _repeat(one: Callable[[], None]) -> None:
    for _ in range(NUM_PASSES):
        one()


def count_syncs(engine: Engine) -> int:
    """Times that the host waits for the device in a step; 0 on a CPU."""
    if engine.pair.target.device.type != "cuda":
        return 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(each.message) for each in caught)


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
    """Print a line for every point, and write all of them to the file after each."""
    device, started = torch.device(options.device), time.perf_counter()
    speed = copy_speed(device)
    print(f"{device_name(device)}, torch {torch.__version__}: copies at {speed / 1e9:.0f} GB/s", flush=True)
    print("| model | way | rows | B | step, ms | floor | ratio | target, ms | floor | ratio | draft, ms | syncs |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    points: list[Point] = []

    def one(pair: Pair, name: str, way: str, rows: int) -> None:
        for p in measure(pair, name, way, rows, options, speed):
            points.append(p)
            of_step = f"{p.step_ms:.2f} | {p.floor_ms:.2f} | {p.step_ms / p.floor_ms:.2f}"
            of_target = f"{p.target_ms:.2f} | {p.target_floor_ms:.2f} | {p.target_ms / p.target_floor_ms:.2f}"
            numbers = f"{of_step} | {of_target} | {p.draft_ms:.2f} | {p.num_syncs}"
            print(f"| {p.model} | {p.way} | {p.rows} | {p.tokens} | {numbers} |", flush=True)
            if options.out:
                found = {"device": device_name(device), "copy_bytes_per_s": speed, "torch": torch.__version__}
                text = json.dumps(found | {"points": [each._asdict() for each in points]}, indent=1)
                Path(options.out).write_text(text)

    def model(name: str) -> None:
        shape, dtype = (TINY, torch.float32) if options.tiny else (SHAPES[name], torch.bfloat16)
        pair = random_pair(lambda: qwen3(shape), device, dtype, num_layers=2 if options.tiny else 5, block_size=16)
        print(f"{name}: made after {time.perf_counter() - started:.1f} s", flush=True)
        for rows in options.rows:
            for way in options.ways:
                if time.perf_counter() - started > options.seconds:
                    print(f"skipped, {options.seconds:g} s are over: {name}, {rows} rows, {way}", flush=True)
                    continue
                failures.attempt(f"{name}, {rows} rows, {way}", partial(one, pair, name, way, rows))

    for name in options.models:
        failures.attempt(name, partial(model, name))
    print(f"{time.perf_counter() - started:.1f} s in all", flush=True)


# --- exactness ---

KINDS = [(1, "chain"), (4, "chain"), (7, "tree"), (2, "chain"), (16, "chain"), (20, "tree"), (8, "chain")]
NUM_TOKENS = 40


def requests_of(pair: Pair, temperature: float, *, plain: bool) -> list[Request]:
    """Requests of all KINDS, with prompts of several lengths; or the same one token at a time."""
    found = []
    for i, (size, layout) in enumerate(KINDS):
        prompt = torch.randint(0, pair.vocab_size, (5 + 53 * i,), generator=torch.Generator().manual_seed(i))
        sampling = Sampling(temperature=temperature, seed=i)
        kind: Any = {"block_size": 1} if plain else {"block_size": size, "layout": layout}
        found.append(Request(tuple(prompt.tolist()), NUM_TOKENS, sampling=sampling, **kind))
    return found


def answers(engine: Engine, requests: Sequence[Request]) -> tuple[list[list[int]], int]:
    """Texts, and how many drafted tokens were accepted."""
    ids = [engine.add(request) for request in requests]
    found: dict[int, list[int]] = {request_id: [] for request_id in ids}
    num_accepted = 0
    while not engine.idle:
        for step in engine.step():
            found[step.request_id] += step.tokens
            num_accepted += step.num_accepted
    return [found[request_id] for request_id in ids], num_accepted


def check_texts(pair: Pair, family: str, temperature: float, ways: Sequence[str], failures: Failures) -> None:
    """Every way's texts against those of one request, one token at a time, kernel by kernel."""
    alone, expected = with_graphs(pair, "eager", num_slots=1, max_length=512), []
    for request in requests_of(pair, temperature, plain=True):
        expected += answers(alone, [request])[0]
    for way in ways:
        for plain in (False, True):
            name = f"{family}, T={temperature:g}, {way}, {'one at a time in a batch' if plain else 'blocks'}"
            room: Any = {"num_slots": 4, "max_length": 512, "max_prefill_tokens": 100, "prefix_tokens": 4096}
            engine = with_graphs(pair, way, **room)
            for prompts in ("", ", kept prompts"):  # the second time they are in the engine's prefixes
                found, num_accepted = answers(engine, requests_of(pair, temperature, plain=plain))
                equal = sum(a == b for a, b in zip(found, expected, strict=True))
                told = f"{equal}/{len(found)} texts equal, {num_accepted} accepted, "
                told += f"{len(engine._cache.graphs or ())} graphs, {engine.num_kept_tokens} tokens kept"
                if equal == len(found):
                    print(f"PASS {name}{prompts}: {told}", flush=True)
                else:
                    failures.add(f"{name}{prompts}: {told}")


def check(options: argparse.Namespace, failures: Failures) -> None:
    """PASS or FAIL for llama and qwen3, greedy and drawn."""
    device = torch.device(options.device)
    small = TINY | {"initializer_range": 0.1}
    families: dict[str, NewModel] = {
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**small, tie_word_embeddings=False)),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**small, tie_word_embeddings=True)),
    }
    for family, target in families.items():
        for temperature in (0.0, 1.0):

            def part(
                target: Callable[[], PreTrainedModel] = target, name: str = family, t: float = temperature
            ) -> None:
                pair = random_pair(target, device, torch.float32, num_layers=2, block_size=8)
                check_texts(pair, name, t, options.ways, failures)

            failures.attempt(f"{family}, T={temperature:g}", part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 16], help="B, tokens that a row verifies")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--temperature", type=float, default=0.0, help="of every row; above 0 tokens are drawn")
    parser.add_argument("--context", type=int, default=512, help="tokens of every row at first")
    parser.add_argument("--steps", type=int, default=15, help="of each kind; the median counts")
    parser.add_argument("--seconds", type=float, default=75.0, help="no engine is begun after so many")
    parser.add_argument("--out", help="JSON file")
    parser.add_argument("--check", action="store_true", help="exactness in float32 instead of speed")
    parser.add_argument("--all", action="store_true", help="exactness, and then speed")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small float32 models: to try this job")
    options, failures = parser.parse_args(), Failures()
    gc.freeze()  # captures collect garbage: let it be little
    if options.check or options.all:
        failures.attempt("exactness", lambda: check(options, failures))
    if not options.check:
        failures.attempt("speed", lambda: bench(options, failures))
    print("failed: " + "; ".join(failures.names) if failures.names else "all passed", flush=True)
    sys.exit(bool(failures.names))


if __name__ == "__main__":
    main()
