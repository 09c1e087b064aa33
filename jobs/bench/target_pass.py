"""Time of a target's pass by the tokens that it verifies, compared with transformers, and memory of its states.

Weights are random, in the shape of a published model, or of some of its layers if memory is short. A pass is the
target's alone, with its LM head and the state update of accepted tokens: no draft, no sampling. Half of the drafted
tokens are accepted. All kinds are interleaved; the fastest of each counts. transformers verifies the same number of
tokens after a cached text, as one chain; it cannot roll back rejected tokens.

    python -m jobs.bench.target_pass --shape qwen3.5-0.8b
    python -m jobs.bench.target_pass --shape coder-30b --num-layers 2 --dtype bfloat16
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from pydantic import Field
from transformers import DynamicCache, PreTrainedModel

from blockpilot.device import device_name, to_device, to_dtype
from blockpilot.evaluation.tables import markdown
from blockpilot.models.packing import Packing, depths_of
from blockpilot.models.states import StateCache
from blockpilot.models.target import Target
from jobs.bench.gpu_models import SHAPES, new_weights
from jobs.common.config import Config, main

MIB = 2**20


class TargetPassConfig(Config):
    """Shape of the target, and kinds of passes."""

    shape: Literal["qwen3.5-0.8b", "qwen3.5-4b", "4b", "8b", "coder-30b", "gpt-oss-20b"] = "qwen3.5-0.8b"
    """A published model's shape."""
    num_layers: int | None = Field(default=None, ge=1)
    """Number of its layers; by default all."""
    vocab_size: int | None = Field(default=None, ge=16)
    """Size of the vocabulary; by default the model's."""
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = Field(default=1, ge=1)
    """Number of torch threads."""
    rows: tuple[int, ...] = (1, 4)
    """Batch sizes: rows that decode together."""
    tokens: tuple[int, ...] = (4, 8, 16)
    """Tokens of a row that a pass verifies (anchor and drafted tokens), in addition to plain decoding."""
    context: int = Field(default=64, ge=1)
    """Tokens of context of every row."""
    num_passes: int = Field(default=5, ge=1)
    """Timed passes of each kind; the fastest counts."""


def new_model(config: TargetPassConfig) -> PreTrainedModel:
    """A random model, its weights created on the device in its dtype."""
    shape = SHAPES[config.shape]
    changes = {"num_hidden_layers": config.num_layers, "vocab_size": config.vocab_size}
    sizes = shape.sizes | {name: size for name, size in changes.items() if size is not None}
    with new_weights(to_device(config.device), to_dtype(config.dtype)):
        model = shape._replace(sizes=sizes).new()
    model.eval().requires_grad_(False)
    return model


def parents_of(layout: str, num: int) -> list[int]:
    """Parents [num - 1] of a block of `num` tokens: a chain, or a tree with two children per node."""
    return list(range(num - 1)) if layout == "chain" else [i // 2 for i in range(num - 1)]


def tokens_of(model: PreTrainedModel, rows: int, num: int) -> torch.Tensor:
    """Random tokens [rows, num]: equal ones would be routed to the same experts."""
    return torch.randint(model.config.vocab_size, (rows, num), device=model.device)


class Passes:
    """Passes of a target of `rows` rows at the end of a text."""

    def __init__(self, target: Target, rows: int, context: int, room: int) -> None:
        self._target, self._starts, self._device = target, [context] * rows, target.model.device
        self.cache = target.new_cache(rows, context + room, room)
        text = tokens_of(target.model, rows, context)
        target.score_rows(text, 0, self.cache, torch.arange(rows, device=self._device))

    def run(self, layout: str, num: int) -> None:
        """Verify `num` tokens of every row, and accept the first half of the row's longest path."""
        parents, rows = parents_of(layout, num), len(self._starts)
        trees = None if layout == "chain" else [parents] * rows
        packing = Packing([num] * rows, self._starts, self._device, trees, cut=rows)
        view = self.cache.view(packing.rows, packing.columns, slice(0, rows), packing.length)
        tokens = tokens_of(self._target.model, rows, num).flatten()
        self._target.logits(self._target.score(tokens, view, packing, features=False).hidden)
        path = [num - 1] if num > 1 else []
        while path and path[0]:
            path.insert(0, parents[path[0] - 1])
        accepted = path[: 1 + max(depths_of(parents)) // 2] or [0]
        self.cache.accept(self._starts, [accepted] * rows)


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call."""
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def fastest(kinds: dict[str, Callable[[], object]], num: int, device: torch.device) -> dict[str, float]:
    """Milliseconds of the fastest of `num` calls of every kind, interleaved, after a warm-up."""
    times = dict[str, list[float]]()
    for _ in range(num + 1):
        for name, run in kinds.items():
            times.setdefault(name, []).append(1e3 * seconds(run, device))
    return {name: min(kind_times[1:]) for name, kind_times in times.items()}


def kinds_of(passes: Passes, sizes: Sequence[int]) -> dict[str, Callable[[], object]]:
    """Passes by name: plain decoding, then chains and trees."""
    names = [("chain", 1), *((layout, num) for num in sizes for layout in ("chain", "tree"))]
    return {f"{layout} {num}" if num > 1 else "plain": partial(passes.run, layout, num) for layout, num in names}


def transformers_kinds(
    model: PreTrainedModel, rows: int, config: TargetPassConfig
) -> dict[str, Callable[[], object]]:
    """The passes of transformers for the same numbers of tokens, by name; all of them append to one cache."""
    text, past = tokens_of(model, rows, config.context), DynamicCache(config=model.config)
    model(text, past_key_values=past, use_cache=True, logits_to_keep=1)

    def run(num: int) -> None:
        model(tokens_of(model, rows, num), past_key_values=past, use_cache=True)

    return {f"transformers {num}": partial(run, num) for num in (1, *config.tokens)}


@torch.inference_mode()
def run(config: TargetPassConfig) -> None:
    """Measure, and print the memory of states and a table of milliseconds."""
    torch.set_num_threads(config.threads)
    model = new_model(config)
    device = model.device
    layers = model.config.num_hidden_layers
    print(f"{config.shape}, {layers} layers, {config.dtype} on {device_name(device)}, context {config.context}")
    # transformers first: its weights are packed for C afterwards.
    transformers_passes = [
        fastest(transformers_kinds(model, rows, config), config.num_passes, device) for rows in config.rows
    ]
    target = Target(model, ())
    print(target.exactness)
    table = []
    for rows, beside in zip(config.rows, transformers_passes, strict=True):
        passes = Passes(target, rows, config.context, max(config.tokens))
        times = fastest(kinds_of(passes, config.tokens), config.num_passes, device)
        cache, states = passes.cache, 0
        if isinstance(cache, StateCache):
            states = cache.windows[:, 0].nbytes + cache.matrices[:, 0].nbytes
        table.append({"rows": str(rows)} | {name: f"{ms:.1f}" for name, ms in (times | beside).items()})
        print(f"{rows} rows: states {states / MIB:.1f} MiB a slot, cache {cache.num_bytes / MIB:.1f} MiB")
    print(f"\nmilliseconds of a pass by layout and tokens per row:\n\n{markdown(table)}", flush=True)


if __name__ == "__main__":
    main(TargetPassConfig, run)
