"""States of hybrid targets: drafted tokens do not change them, accepted ones advance them as single tokens do."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from blockpilot.models.delta_net import StatePass
from blockpilot.models.packing import Packing
from blockpilot.models.states import StateCache
from blockpilot.models.target import Target
from blockpilot.pairs.loading import Pair
from helpers.tiny import tiny_hybrid, tiny_hybrid_mixture

CPU = torch.device("cpu")
LENGTH, SPARE = 80, 12
MODELS = [tiny_hybrid, tiny_hybrid_mixture]
Read = dict[tuple[int, ...], tuple[Tensor, StateCache]]


def new_cache(target: Target, num_slots: int = 4) -> StateCache:
    cache = target.new_cache(num_slots, LENGTH, SPARE)
    assert isinstance(cache, StateCache)
    return cache


def states_of(cache: StateCache, slot: int) -> list[Tensor]:
    return [cache.windows[:, slot], cache.matrices[:, slot]]


def one_by_one(target: Target, text: list[int], read: Read) -> tuple[Tensor, StateCache]:
    """Hidden states [n, hidden] of a text's tokens in separate passes, and the cache; `read` holds prefixes."""
    if (key := tuple(text)) not in read:
        hidden, cache = one_by_one(target, text[:-1], read) if text[:-1] else (torch.empty(0), new_cache(target, 1))
        cache = copy.deepcopy(cache)
        last = target.score_rows(torch.tensor([text[-1:]]), len(text) - 1, cache, torch.tensor([0])).hidden[0]
        read[key] = torch.cat([hidden.to(last).view(-1, last.shape[1]), last]), cache
    return read[key]


def path_to(node: int, parents: list[int]) -> list[int]:
    return [*path_to(parents[node - 1], parents), node] if node else [0]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_tokens_of_chains_and_trees_are_those_of_their_texts(
    in_c: bool, dtype: torch.dtype, model: Callable[[], Any]
) -> None:
    """Same hidden states, and states after accepted paths, next to a prefill chunk: exact in C, by torch rounded."""
    if not in_c and dtype == torch.bfloat16:
        pytest.skip("rounds too much for a comparison")
    target = Target(model().eval().requires_grad_(False).to(dtype), ())
    assert target.exactness.startswith("bit for bit") == in_c

    def check(actual: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(
            actual, expected, **({"rtol": 0, "atol": 0} if in_c else {"rtol": 0, "atol": 2e-3})
        )

    read: Read = {}
    for seed in range(3):
        choice = random.Random(seed)
        cache = new_cache(target)
        texts = [[choice.randrange(256) for _ in range(choice.randint(1, 30))] for _ in range(3)]
        for slot, text in enumerate(texts):  # in chunks of random sizes
            start = 0
            while start < len(text):
                part = text[start : start + choice.choice([1, 2, 5, 30])]
                target.score_rows(torch.tensor([part]), start, cache, torch.tensor([slot]))
                start += len(part)
        # Three steps: single tokens, chains and trees in the first slots; a prompt's chunk in the last one.
        prompt, num_read = [choice.randrange(256) for _ in range(40)], 0
        for _ in range(3):
            sizes = [choice.choice([0, 1, 4, 9]) for _ in texts]
            parents = [[choice.choice([i, i, choice.randint(0, i)]) for i in range(size)] for size in sizes]
            blocks = [[choice.randrange(256) for _ in range(1 + size)] for size in sizes]
            num = choice.randint(1, 12)
            tokens = [token for block in blocks for token in block] + prompt[num_read : num_read + num]
            starts = [*map(len, texts), num_read]
            is_tree = any(p != list(range(len(p))) for p in parents)
            packing = Packing([*map(len, blocks), num], starts, CPU, parents if is_tree else None, cut=len(blocks))
            view = cache.view(packing.rows, packing.columns, slice(0, 4), packing.length)
            hidden = target.score(torch.tensor(tokens), view, packing, features=False).hidden
            paths = []
            for row, text in enumerate(texts):
                for node in range(1 + sizes[row]):
                    path = [blocks[row][i] for i in path_to(node, parents[row])]
                    check(hidden[packing.firsts[row] + node], one_by_one(target, text + path, read)[0][-1])
                paths.append(path_to(choice.randint(0, sizes[row]), parents[row]))
                text += [blocks[row][i] for i in paths[row]]
            num_read += num
            check(hidden[-num:], one_by_one(target, prompt[:num_read], read)[0][-num:])
            cache.accept(starts, paths)
            for slot, text in enumerate([*texts, prompt[:num_read]]):
                for state, expected in zip(
                    states_of(cache, slot), states_of(one_by_one(target, text, read)[1], 0), strict=True
                ):
                    check(state, expected)
        cache.move(3, 0, num_read)
        assert all(a.equal(b) for a, b in zip(states_of(cache, 0), states_of(cache, 3), strict=True))
        cache.clear(0)
        assert not any(state.any() for state in states_of(cache, 0))


@pytest.mark.parametrize("model", MODELS)
@torch.inference_mode()
def test_threads_and_neighbours_change_no_bit(model: Callable[[], Any]) -> None:
    target = Target(model().eval().requires_grad_(False), ())
    if not target.exactness.startswith("bit for bit"):
        pytest.skip("layers by torch")
    tokens, before, outputs = torch.randint(0, 256, (3, 40)), torch.get_num_threads(), []
    try:
        for threads, rows in ((1, [1]), (2, [1]), (3, [0, 1]), (2, [2, 1, 0])):
            torch.set_num_threads(threads)
            hidden = target.score_rows(tokens[rows], 0, new_cache(target), torch.arange(len(rows))).hidden
            outputs.append(hidden[rows.index(1)])
    finally:
        torch.set_num_threads(before)
    assert all(hidden.equal(outputs[0]) for hidden in outputs)


@pytest.mark.parametrize("new_model", MODELS)
@torch.inference_mode()
def test_recurrent_steps_of_transformers_give_the_same_logits(in_c: bool, new_model: Callable[[], Any]) -> None:
    """Logits of transformers' rule for single tokens, with chunks of 33 tokens; its chunked rule is less precise."""
    model = new_model().eval().requires_grad_(False)
    stock = copy.deepcopy(model)
    target = Target(model, ())
    tokens, cache, slots = torch.randint(0, 256, (2, 70)), new_cache(target), torch.arange(2)
    assert target.exactness.startswith("bit for bit") == in_c
    parts = [target.score_rows(tokens[:, i : i + 33], i, cache, slots).hidden for i in range(0, 70, 33)]
    past, expected = None, []
    for i in range(70):
        outputs = stock(tokens[:, i : i + 1], past_key_values=past, use_cache=True)
        past = outputs.past_key_values
        expected.append(outputs.logits)
    logits = target.logits(torch.cat(parts, dim=1))
    torch.testing.assert_close(logits, torch.cat(expected, dim=1), rtol=1e-4, atol=1e-4)


def test_order_of_a_pass() -> None:
    """Sources of a tree next to a prompt, by hand: windows of two inputs for each of three rows, then tokens."""
    packing = Packing([4, 1, 3], [9, 5, 0], CPU, [[0, 0, 1], []], cut=2)
    order = StatePass(packing.parts, torch.tensor([0, 1, 2]), 3)
    tree = [[0, 1, 6], [1, 6, 7], [1, 6, 8], [6, 7, 9]]
    assert order.sources.tolist() == [*tree, [2, 3, 10], [4, 5, 11], [5, 11, 12], [11, 12, 13]]
    assert (order.new_rows, order.num_block_tokens, order.most_nodes) == ([2], 5, 4)
    assert [level.tokens.tolist() for level in order.levels] == [[0, 4, 5], [1, 2, 6], [3, 7]]
    assert [level.parents.tolist() for level in order.levels] == [[0, 1, 2], [0, 0, 2], [0, 2]]
    assert [None if x is None else x.tolist() for *_, x in order.levels] == [[[0, 1], [0, 1]], None, [[1], [2]]]


def test_memory_of_states_does_not_grow_with_a_text(hybrid_pair: Pair) -> None:
    """Constant size: three layers of four heads of 32 x 64 in float32, and windows of three inputs."""
    target = Target(hybrid_pair.target, ())
    caches = [target.new_cache(2, length) for length in (1, 2, 100)]
    first, second, long = (cache.num_bytes for cache in caches)
    assert long - first == 99 * (second - first)
    states = 3 * (4 * 32 * 64 * 4 + 3 * (2 * 2 * 32 + 4 * 64) * 4)
    assert first - (second - first) == 2 * states
