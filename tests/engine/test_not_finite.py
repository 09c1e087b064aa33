"""Hidden states that are not finite, as of a damaged embedding, end only the request whose text has them."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from blockpilot.engine.engine import Engine
from blockpilot.pairs.loading import Pair
from blockpilot.types import Request
from helpers.drafts import choices_of, offer_always
from helpers.fuzz import pair_of
from helpers.tiny import tiny_hybrid, tiny_hybrid_mixture, tiny_mixture, tiny_target

BAD = 200
GOOD, LONG = tuple(range(30, 35)), tuple(range(20, 90))
TARGETS = [tiny_target, tiny_mixture, tiny_hybrid, tiny_hybrid_mixture]


def damaged_pair(dtype: torch.dtype, bad: Sequence[int], new_target: Callable[..., Any] = tiny_target) -> Pair:
    target = new_target(num_hidden_layers=4, tie_word_embeddings=False)
    target.model.embed_tokens.weight.data[list(bad)] = float("nan")
    return pair_of(target, dtype)


def decode(engine: Engine, requests: Sequence[Request]) -> tuple[list[tuple[int, ...]], set[int]]:
    """Texts, and the indices of failed requests."""
    lost = set[int]()
    engine.on_failure = lambda request_id, error: lost.add(request_id)
    ids = [engine.add(request) for request in requests]
    texts = dict.fromkeys(ids, ())
    while not engine.idle:
        for step in engine.step():
            texts[step.request_id] += step.tokens
    return [texts[i] for i in ids], {ids.index(i) for i in lost}


@pytest.mark.parametrize("target", TARGETS)
def test_a_slot_keeps_nothing_of_a_request_that_failed(in_c: bool, target: Callable[..., Any]) -> None:
    pair = damaged_pair(torch.float32, [BAD], target)
    (expected,), _ = decode(Engine(pair, num_slots=1, max_length=200), [Request(GOOD, 20, block_size=1)])
    engine = Engine(pair, num_slots=2, max_length=200)
    assert engine.exactness.startswith("bit for bit") == in_c
    assert decode(engine, [Request((*LONG, BAD, *LONG[:40]), 20, block_size=1)]) == ([()], {0})
    texts, lost = decode(engine, [Request(GOOD, 20, block_size=4), Request(LONG, 20, block_size=1)])
    assert texts[0] == expected
    assert not lost


def test_a_prompt_that_is_cancelled_half_way_leaves_nothing(in_c: bool) -> None:
    """Its first part has states that are not finite; a later request decodes beside a longer one."""
    pair = damaged_pair(torch.float32, [BAD])
    (expected,), _ = decode(Engine(pair, num_slots=1, max_length=200), [Request(GOOD, 20, block_size=1)])
    engine = Engine(pair, num_slots=2, max_length=200, max_prefill_tokens=60)
    assert engine.exactness.startswith("bit for bit") == in_c
    cancelled = engine.add(Request((*LONG[:50], BAD, *LONG), 20, block_size=1))
    engine.step()
    engine.cancel(cancelled)
    texts, lost = decode(engine, [Request(GOOD, 20, block_size=4), Request(LONG, 20, block_size=1)])
    assert texts[0] == expected
    assert not lost


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_drafted_token_whose_states_are_not_finite_ends_nothing(
    dtype: torch.dtype, target: Callable[..., Any]
) -> None:
    """Text of plain decoding (layers in C): the target does not choose the drafted token."""
    pair = damaged_pair(dtype, [BAD], target)
    (expected,), _ = decode(Engine(pair, num_slots=1, max_length=200), [Request(GOOD, 20, block_size=1)])
    engine = Engine(pair, num_slots=2, max_length=200)
    offer_always(engine, [BAD, *range(7)], [0.5] + [0.01] * 7)
    for layout in ("chain", "tree"):
        texts, lost = decode(engine, [Request(GOOD, 20, block_size=4, layout=layout), Request(LONG, 20)])
        assert texts[0] == expected
        assert not lost


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_text_ends_as_plainly_where_its_stop_token_has_states_that_are_not_finite(dtype: torch.dtype) -> None:
    """Same end as in plain decoding: the scores after an accepted stop token are ignored."""
    whole, _ = decode(Engine(damaged_pair(dtype, []), num_slots=1, max_length=200), [Request(GOOD, 20, block_size=1)])
    stop = whole[0][3]
    pair = damaged_pair(dtype, [stop])
    for stops in (frozenset({stop}), frozenset[int]()):
        plain = decode(
            Engine(pair, num_slots=1, max_length=200), [Request(GOOD, 20, block_size=1, stop_token_ids=stops)]
        )
        engine = Engine(pair, num_slots=1, max_length=200)
        engine._drafter.propose = lambda rows, slots, depths, num: choices_of(  # type: ignore[method-assign]
            [
                [whole[0][min(19, len(row.tokens) - len(GOOD) + i)]]
                for row, depth in zip(rows, depths, strict=True)
                for i in range(depth)
            ],
            [[0.9]] * sum(depths),
        )
        assert decode(engine, [Request(GOOD, 20, block_size=6, stop_token_ids=stops)]) == plain
