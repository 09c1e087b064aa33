"""Prompt lookup in each row's text: the paths, the rows that use it, and learning from the outcomes."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from blockpilot.control import controller as controllers
from blockpilot.control.acceptance import Array, Paths
from blockpilot.engine.engine import Engine
from blockpilot.engine.rows import Row
from blockpilot.engine.trees import MAX_DEPTH, paths_of
from blockpilot.native.library import has_functions
from blockpilot.native.matching import LONGEST
from blockpilot.pairs.loading import Pair
from blockpilot.types import DRAFTED, LOOKED_UP, Request, Step
from helpers.controllers import Watched
from helpers.engines import NEVER, run, text_of
from helpers.texts import slow_match

pytestmark = pytest.mark.skipif(not has_functions(), reason="lookup needs the functions in C")

NUM_TOKENS = 40


@pytest.fixture(scope="module")
def circles(tiny_pair: Pair) -> tuple[int, ...]:
    """A prompt whose greedy answer is a repetition: the target's own text, which has begun to loop."""
    engine = Engine(tiny_pair, num_slots=1, max_length=256)
    for start in range(10, 200, 10):
        [steps] = run(engine, [Request((start,), 250, block_size=1, stop_token_ids=NEVER)])
        text: tuple[int, ...] = (start, *text_of(steps))
        if slow_match(text, 4)[0] == LONGEST:
            return text[:-100] if slow_match(text[:-100], 4)[0] == LONGEST else text
    pytest.fail("the tiny target does not repeat itself")


def looked_up(steps: Sequence[Step]) -> int:
    """Number of accepted tokens that were looked up."""
    return sum(step.tree.sources[node - 1] & LOOKED_UP > 0 for step in steps for node in step.path)


@torch.inference_mode()
def test_paths_are_what_followed_in_every_rows_own_text(tiny_pair: Pair, circles: tuple[int, ...]) -> None:
    """Paths of accepted tokens only, of rows that join, leave and move, with chunked or cached prompts."""
    engine = Engine(tiny_pair, num_slots=3, max_length=400, max_prefill_tokens=50, prefix_tokens=400)
    texts, held, expected = dict[Row, int](), dict[Row, float](), dict[Row, int]()
    lookup_paths, compared = engine._lookup.paths, list[bool]()

    def watched(rows: Sequence[Row], sampled: Array, most: int, follow: Callable[[Paths], Paths]) -> Paths | None:
        row_paths = lookup_paths(rows, sampled, most, lambda paths: paths)
        for r, row in enumerate(rows):
            if (before := texts.get(row)) is not None and len(row.tokens) > before and expected[row] >= 0:
                held[row] = 0.8 * held[row] + 0.2 * (row.tokens[before] == expected[row])
            length, following, agree, _ = slow_match(row.tokens, MAX_DEPTH)
            texts[row], expected[row] = len(row.tokens), following[0] if row.looks_up and following else -1
            held.setdefault(row, 0.5)
            if not row.looks_up:
                assert row_paths is None or not row_paths.sizes[r]
                continue
            size = min(len(following), row.max_depth)
            assert (row_paths.sizes[r] if row_paths is not None else 0) == max(0, size)
            if row_paths is not None and size > 0:
                assert row_paths.tokens[r, :size].tolist() == following[:size]
                assert row_paths.known[r].tolist() == pytest.approx([length, agree, held[row]])
                compared.append(True)
        return row_paths and follow(row_paths)

    engine._lookup.paths = watched  # type: ignore[method-assign]
    lengths, lookups = (25, 9, 40, 14, 33, 5, 21), (None, False, None, True, None, None, None)
    requests = [
        Request(
            circles[i % 3 :], num, block_size=None if lookup is not True else 4, stop_token_ids=NEVER, lookup=lookup
        )
        for i, (num, lookup) in enumerate(zip(lengths, lookups, strict=True))
    ]
    run(engine, requests)
    assert len(compared) >= 8
    assert not engine._lookup._texts
    assert engine._lookup.num_bytes == 3 * 4 * (400 + 400 + 512)


@torch.inference_mode()
def test_only_where_it_is_wanted(tiny_pair: Pair, circles: tuple[int, ...]) -> None:
    """Lookup by default if the controller chooses, never in plain decoding. It saves steps; nodes have sources."""

    def decode(**options: Any) -> list[Step]:
        request = Request(circles, NUM_TOKENS, stop_token_ids=NEVER, **options)
        [steps] = run(Engine(tiny_pair, num_slots=1, max_length=400), [request])
        return steps

    assert looked_up(decode()) > NUM_TOKENS // 3
    assert len(decode()) < NUM_TOKENS // 2
    for without in ({"lookup": False}, {"block_size": 4}, {"block_size": 1, "lookup": True}):
        assert looked_up(decode(**without)) == 0
    tree_steps = decode(block_size=9, lookup=True, layout="tree")
    assert looked_up(tree_steps) > NUM_TOKENS // 3
    sources = {source for step in tree_steps for source in step.tree.sources}
    assert {DRAFTED, LOOKED_UP} <= sources <= {DRAFTED, LOOKED_UP, DRAFTED | LOOKED_UP}


@torch.inference_mode()
def test_what_is_learned_of_paths_is_what_the_texts_say(
    tiny_pair: Pair, circles: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path's token is right if the answer has it; the outcome of tokens below a wrong one is unknown."""
    monkeypatch.setattr(controllers, "UPDATE_EVERY", 2)
    controller = Watched(tiny_pair.block_size - 1)
    engine = Engine(tiny_pair, num_slots=2, max_length=400, controller=controller)
    requests = [Request(circles, 60, stop_token_ids=NEVER), Request(circles[2:], 50, stop_token_ids=NEVER)]
    for request in requests:
        engine.add(request)
    first = controller.model.paths.weights.copy()
    rights = list[bool]()
    while not engine.idle:
        steps = engine.step()
        verified = controller.verified[-1]
        expected = list[bool]()
        for step in steps:
            paths = paths_of(step.tree)
            reached = [path for path in paths if path == step.tokens[: len(path)]]
            for path, source in zip(paths[1:], step.tree.sources, strict=True):
                if source & LOOKED_UP and path[:-1] in reached and len(path) <= len(step.tokens):
                    expected.append(path == step.tokens[: len(path)])
        assert sorted(verified.path_right.tolist()) == sorted(expected)
        assert not verified.path_sampled.any()
        assert (verified.path_inputs[:, 0] == 1).all()
        rights += expected
    assert sum(rights) > 10
    assert not np.array_equal(controller.model.paths.weights[0], first[0])
    assert np.array_equal(controller.model.paths.weights[1], first[1])
