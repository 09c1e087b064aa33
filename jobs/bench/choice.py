"""Benchmark of the controller: its overhead per step, and its expected speed-up by replay.

Overheads are microseconds of planning, selection and learning in a step, in a tight loop, and with CACHE_BYTES read
in between, as a step reads its weights. With a dense sweep, its steps are replayed by every fixed method and by the
controller at the sweep's step cost (`price.json`). A replay is a diagnostic, not a result: it has no timing noise and
assumes that the step cost is exact; jobs/evaluate.py decodes.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from blockpilot.control.acceptance import UNTRAINED, AcceptanceModel, Paths, Prior
from blockpilot.control.controller import Controller, Planned, StepOutcome
from blockpilot.control.cost import PRICE_FILE, Load, StepPrice, passes, read_price
from blockpilot.engine.growing import GrownTrees, StepCandidates, grow_all, merge_paths, score_candidates, verified
from blockpilot.engine.lookup import Lookup
from blockpilot.engine.rows import Row
from blockpilot.evaluation.tables import markdown
from blockpilot.policy.store import load_step_policy
from blockpilot.storage import join
from blockpilot.sweep.rows import NUM_CHOICES, SweepRow, read_parts
from blockpilot.types import MAX_BLOCK_SIZE, Candidates, Request, Sampling, Step
from jobs.common.config import Config, Place, main

Array = NDArray[Any]

CACHE_BYTES = 256 * 2**20
NUM_SLOTS, NUM_WARM_UP = 7, 20
CONTEXTS = 1_000, 8_000  # tokens
TREES = 3, 7, 15  # nodes


class ChoiceConfig(Config):
    """Batch sizes, and the sweep to replay."""

    rows: tuple[int, ...] = Field(default=(1, 4, 16), min_length=1)
    """Batch sizes: rows that decode together."""
    num_steps: int = Field(default=200, ge=1)
    """Number of timed steps."""
    sweep: Place | None = None
    """A dense sweep with its step cost, to replay."""
    policy: Place | None = None
    """A policy of kind step, to replay in addition to the untrained choice."""


def run(config: ChoiceConfig) -> str:
    """Print and return the tables. Raises ValueError for a sweep that is not dense."""
    torch.set_num_threads(1)
    tables = [
        "Microseconds of the choice in a step:",
        markdown([_cost(num, config.num_steps) for num in config.rows]),
    ]
    if config.sweep is not None:
        texts = [text for part in read_parts(config.sweep) for text in map(ReplayedText.of, part.rows)]
        price = read_price(join(config.sweep, PRICE_FILE))
        priors = {"untrained": UNTRAINED}
        if config.policy is not None:
            priors["policy"] = load_step_policy(config.policy)
        tables += ["", f"Speed-up over plain decoding in a replay of {len(texts)} texts:"]
        tables.append(markdown([_replay(texts, num, price, priors) for num in config.rows]))
    print(report := "\n".join(tables))
    return report


# --- overhead ---


def _cost(num_rows: int, num_steps: int) -> dict[str, str]:
    memory, cells = np.zeros(CACHE_BYTES // 8), {"rows": str(num_rows)}
    for context in (0, *CONTEXTS):
        for name, reads in (("in a loop", False), ("between steps", True)):
            steps = _steps(num_rows, num_steps, context)
            seconds = [step(lambda: memory[::8].sum()) if reads else step(lambda: None) for step in steps]
            suffix = f", lookup in {context:,} tokens" if context else ""
            cells[name + suffix] = f"{1e6 * float(np.mean(sorted(seconds)[: -max(1, num_steps // 10)])):.0f}"
    return cells


def _steps(num_rows: int, num_steps: int, context: int) -> Iterator[Callable[[Callable[[], object]], float]]:
    """Steps whose rows accept their first candidate; each calls its argument between its parts, returns its seconds.

    With a context, rows use prompt lookup in texts of that many repeating tokens, so every row has a match.
    """
    draws = np.random.default_rng(0)
    controller, rows = Controller(AcceptanceModel(NUM_SLOTS)), [_row(i, drawn=True) for i in range(num_rows)]
    log_probs = -np.sort(draws.exponential(2, (NUM_SLOTS * num_rows, NUM_CHOICES))).astype(np.float32)
    sampled, max_depths = np.ones(num_rows, dtype=int), np.full(num_rows, NUM_SLOTS)
    lookup = Lookup(num_rows, context + 2 * (num_steps + NUM_WARM_UP) + 2)
    for row in rows:
        row.tokens = (draws.integers(0, 49_152, 300).tolist() * (1 + context // 300))[: max(1, context)]

    def step(between: Callable[[], object]) -> float:
        started = time.perf_counter()
        paths = lookup.paths(rows, sampled, MAX_BLOCK_SIZE - 1, controller.cut_paths) if context else None
        kinds = controller.kinds(sampled, paths)
        depths = controller.plan(Planned(kinds, max_depths), Load(0)).tolist()
        seconds = time.perf_counter() - started
        between()  # the draft's pass
        depths = [max(1, depth) for depth in depths]
        candidates = _candidates(log_probs[: sum(depths)], log_probs[: sum(depths)], drawn=True)
        started = time.perf_counter()
        grown, offered = _select(controller, rows, depths, candidates, kinds, paths)
        seconds += time.perf_counter() - started
        between()  # the target's
        started = time.perf_counter()
        trees = dict(zip(grown.slots, grown.trees, strict=True))
        first = [trees[slot].tokens[:1] if slot in trees else () for slot in range(num_rows)]
        emitted, accepted = [(*tokens, 0) for tokens in first], [list(range(1 + len(tokens))) for tokens in first]
        steps = [Step(row.request_id, tokens, 1, 0, None) for row, tokens in zip(rows, emitted, strict=True)]
        outcome = partial(verified, rows, grown, accepted, steps, offered)
        controller.learn(StepOutcome(Load(num_rows, sum(depths), int(grown.sizes.sum())), verified=outcome), 0.02)
        for row, tokens in zip(rows, emitted, strict=True):
            row.tokens += tokens
        return seconds + time.perf_counter() - started

    for _ in range(NUM_WARM_UP):
        step(lambda: None)
    yield from (step for _ in range(num_steps))


def _row(request_id: int, *, drawn: bool) -> Row:
    row = Row(request_id, Request((0,), 1, Sampling(float(drawn))), 1 << 30, [0], None)
    row.adapts = True
    return row


def _candidates(scores: Array, log_probs: Array, *, drawn: bool) -> Candidates:
    tokens = torch.arange(scores.shape[1]).expand(scores.shape)  # the token of a candidate is its rank
    return Candidates(
        tokens, torch.from_numpy(scores), torch.from_numpy(log_probs), torch.full((len(scores),), drawn)
    )


def _select(
    controller: Controller,
    rows: Sequence[Row],
    depths: Sequence[int],
    candidates: Candidates,
    kinds: Array,
    paths: Paths | None = None,
) -> tuple[GrownTrees, StepCandidates | None]:
    """Select nodes as the engine does, for rows that drafted these depths."""
    slots = [slot for slot, depth in enumerate(depths) if depth]
    slot_depths = [depths[slot] for slot in slots]
    offered = score_candidates(candidates, slots, [True] * len(slots), slot_depths, controller) if slots else None
    if paths is not None:
        offered = merge_paths(offered, paths, controller.model.paths.weights)
    drafted = Load(len(rows), sum(depths))
    select = partial(controller.select, drafted=drafted)
    return grow_all(rows, offered, kinds, select, MAX_BLOCK_SIZE - 1), offered


# --- expected speed-up by replay ---


@dataclass(frozen=True)
class ReplayedText:
    """A text with the draft's candidates at every anchor: ranks [N, D] of the correct ones, scores, log
    probabilities.
    """

    ranks: Array
    scores: Array
    log_probs: Array
    needed: Array
    """[N, D] nodes of the smallest tree that accepts up to this depth."""
    drawn: bool

    @classmethod
    def of(cls, row: SweepRow) -> "ReplayedText":
        num = len(row.step_places)
        if not num or not row.step_nodes:
            raise ValueError(f"prompt {row.prompt_id}: no steps are recorded; sweep with --method dense")
        shape = num, -1, NUM_CHOICES
        scores, log_probs = (
            np.frombuffer(data, "<f2").astype(np.float32) for data in (row.step_scores, row.step_log_probs)
        )
        ranks = np.frombuffer(row.step_ranks, np.int8).reshape(num, -1)
        needed = np.frombuffer(row.step_nodes, np.uint8).reshape(num, -1)
        return cls(ranks, scores.reshape(shape), log_probs.reshape(shape), needed, row.temperature > 0)

    def __len__(self) -> int:
        return len(self.ranks)

    def tau(self, size: int, *, is_tree: bool) -> float:
        """tau of chains of depth `size`, or of trees of `size` nodes."""
        accepted = self.needed <= size if is_tree else self.ranks[:, :size] == 0
        emitted, position, num_steps = 1 + accepted.cumprod(axis=1).sum(axis=1), 0, 0
        while position < len(self):
            position, num_steps = position + int(emitted[position]), num_steps + 1
        return position / num_steps


class _Cursor(NamedTuple):
    """Position of a row in its replayed text."""

    text: ReplayedText
    position: int
    row: Row


def _replay(
    texts: Sequence[ReplayedText], num_rows: int, price: StepPrice, priors: dict[str, Prior]
) -> dict[str, str]:
    """Speed-ups over plain decoding of the best fixed method and of the controller with each prior."""
    plain, max_depth = num_rows / price.seconds(Load(num_rows)), texts[0].ranks.shape[1]
    speeds = {f"B={n + 1}": _fixed(texts, num_rows, price, n, is_tree=False) for n in range(1, max_depth + 1)}
    speeds |= {f"tree {n}": _fixed(texts, num_rows, price, n, is_tree=True) for n in TREES}
    best = max(speeds, key=speeds.__getitem__)
    cells = {"rows": str(num_rows), "best fixed method": best if speeds[best] > plain else "plain"}
    cells["its speed-up"] = f"{max(speeds[best], plain) / plain:.3f}"
    return cells | {name: f"{_chosen(texts, num_rows, price, prior) / plain:.3f}" for name, prior in priors.items()}


def _fixed(texts: Sequence[ReplayedText], rows: int, price: StepPrice, size: int, *, is_tree: bool) -> float:
    """Tokens per second of chains of depth `size`, or of trees of `size` nodes."""
    num_steps, depth = sum(len(text) / text.tau(size, is_tree=is_tree) for text in texts), min(size, NUM_SLOTS)
    load = Load(rows, rows * depth, rows * size, passes([depth], price.is_sequential))
    return sum(map(len, texts)) / num_steps * rows / price.seconds(load)


def _chosen(texts: Sequence[ReplayedText], num_rows: int, price: StepPrice, prior: Prior) -> float:
    """Tokens per second of the controller; texts queue for the rows, until a row has no text left."""
    controller = Controller(AcceptanceModel(texts[0].ranks.shape[1], prior), price, follows=False)
    ids, queue = count(), iter(texts)
    rows = [_Cursor(text, 0, _row(next(ids), drawn=text.drawn)) for text in islice(queue, num_rows)]
    num_tokens, seconds = 0, 0.0
    while len(rows) == num_rows:
        sampled = np.array([int(row.text.drawn) for row in rows])
        max_depths = np.array([min(row.text.ranks.shape[1], len(row.text) - row.position) for row in rows])
        depths = controller.plan(Planned(sampled, max_depths), Load(0)).tolist()
        drafting = [(row.text, row.position, depth) for row, depth in zip(rows, depths, strict=True) if depth]
        candidates = (
            _candidates_at(drafting) if drafting else _candidates(np.zeros((0, 1)), np.zeros((0, 1)), drawn=False)
        )
        all_rows = [row.row for row in rows]
        grown, offered = _select(controller, all_rows, depths, candidates, sampled)
        paths = [[0] for _ in rows]
        for g, slot in enumerate(grown.slots):
            paths[slot] = _path(grown, g, rows[slot].text.ranks[rows[slot].position])
        load = Load(num_rows, sum(depths), int(grown.sizes.sum()), passes(depths, price.is_sequential))
        steps = list[Step]()
        for row, path in zip(rows, paths, strict=True):
            ranks = row.text.ranks[row.position, : len(path)].tolist()
            steps.append(Step(row.row.request_id, tuple(ranks), len(path), len(path) - 1, None))
        outcome = partial(verified, all_rows, grown, paths, steps, offered)
        controller.learn(StepOutcome(load, verified=outcome), price.seconds(load))
        seconds += price.seconds(load)
        num_tokens += sum(map(len, paths))
        moved = [row._replace(position=row.position + len(path)) for row, path in zip(rows, paths, strict=True)]
        rows = [row for row in moved if row.position < len(row.text)]
        rows += [_Cursor(text, 0, _row(next(ids), drawn=text.drawn)) for text in islice(queue, num_rows - len(rows))]
    return num_tokens / seconds if seconds else num_rows / price.seconds(Load(num_rows))


def _candidates_at(drafting: Sequence[tuple[ReplayedText, int, int]]) -> Candidates:
    scores, log_probs = (
        np.concatenate([getattr(text, name)[position, :depth] for text, position, depth in drafting])
        for name in ("scores", "log_probs")
    )
    drawn = torch.tensor([text.drawn for text, _, depth in drafting for _ in range(depth)])
    return _candidates(scores, log_probs, drawn=False)._replace(drawn=drawn)


def _path(grown: GrownTrees, g: int, correct_ranks: Array) -> list[int]:
    """The accepted path in the tree of row g, whose nodes are candidates of a draft without edges."""
    children, size = dict[tuple[int, int], int](), grown.sizes[g]
    nodes = zip(grown.nodes.parents[g, :size].tolist(), grown.nodes.choice_index[g, :size].tolist(), strict=True)
    for number, (parent, choice) in enumerate(nodes, 1):
        children[parent, choice % NUM_CHOICES] = number
    number, path = 0, [0]
    for rank in correct_ranks.tolist():
        if rank < 0 or (number := children.get((number, rank), -1)) < 0:
            break
        path.append(int(grown.indices[g, number]))
    return path


if __name__ == "__main__":
    main(ChoiceConfig, run)
