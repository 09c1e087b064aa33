"""Memory of pairs: size of caches, what fits, and the figures of published pairs in docs/your-own-pair.md."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockpilot.engine.engine import Engine
from blockpilot.engine.memory import WORKING_SHARE, CacheSize, check_memory
from blockpilot.pairs.loading import Pair, check_weights, weight_bytes
from blockpilot.pairs.table import NAMED_PAIRS, split_revision
from helpers.published import PUBLISHED, shapes

GUIDE = Path(__file__).parents[2] / "docs" / "your-own-pair.md"
H100 = 79 * 2**30  # bytes of 80 GB that a program can use
SIZES = st.builds(CacheSize, st.integers(0, 2**26), st.integers(1, 2**18), st.sampled_from([0, 2**16]))


def test_sizes_are_those_of_an_engine(
    tiny_pair: Pair, eagle_pair: Pair, hybrid_pair: Pair, gemma4_pair: Pair
) -> None:
    for pair in (tiny_pair, eagle_pair, hybrid_pair, gemma4_pair):
        for prefix_tokens in (0, 50):
            engine = Engine(pair, num_slots=3, max_length=100, prefix_tokens=prefix_tokens)
            assert CacheSize.of(pair).num_bytes(3, 100, prefix_tokens) == engine.cache_bytes


@given(SIZES, st.integers(0, 2**36), st.integers(1, 64), st.integers(1, 2**15))
def test_as_many_slots_and_tokens_as_fit(size: CacheSize, free: int, num_slots: int, length: int) -> None:
    length -= length % -16  # pages
    most = size.most_slots(free, length)
    assert size.num_bytes(most, length, most * length) <= free or not most
    assert size.num_bytes(most + 1, length, (most + 1) * length) > free
    longest = size.longest(free, num_slots)
    assert size.num_bytes(num_slots, longest, num_slots * longest) <= free or not longest
    assert num_slots * (size.slot + (longest + 1) * (size.token + size.kept_token)) > free


def test_caches_that_do_not_fit_are_refused_with_what_does(tiny_pair: Pair) -> None:
    check_memory(tiny_pair, 3, 100, 300)
    complaint = (
        r"num_slots 100000000 of 1000 tokens, prefix_tokens 0: the caches take [\d.]+ GiB, [\d.]+ GiB are free"
    )
    with pytest.raises(ValueError, match=complaint) as caught:
        check_memory(tiny_pair, 100_000_000, 1000, 0)
    fitting = re.search(r"as many prefix_tokens (\d+) slots of 1000 tokens fit, or 100000000 of 0", str(caught.value))
    assert fitting
    check_memory(tiny_pair, int(fitting[1]) // 2, 1000, 0)


def test_weights_that_do_not_fit_are_refused_with_their_size() -> None:
    pair = shapes("qwen3-coder-30b-a3b")
    models = pair.target, pair.draft
    check_weights(pair.id, models, torch.bfloat16, H100)
    complaint = r"the weights take 115\.6 GiB in float32, 79\.0 GiB of the GPU are free; a pair runs on one GPU"
    with pytest.raises(ValueError, match=complaint):
        check_weights(pair.id, models, torch.float32, H100)


@pytest.mark.parametrize(("name", "num_weights"), [("qwen3-8b-dflash2", 1_169_573_120), ("qwen35-4b", 634_425_856)])
def test_shapes_have_as_many_weights_as_the_hub_says(name: str, num_weights: int) -> None:
    assert sum(weight.numel() for weight in shapes(name).draft.parameters()) == num_weights


def test_the_guide_says_what_the_published_pairs_take() -> None:
    """Names of the pairs of every target, and the memory of the largest one."""
    taken = dict[str, list[tuple[str, str, str]]]()
    for name in PUBLISHED:
        pair = shapes(name)
        pair.draft.check_fit(pair.target.config)
        size, weights = CacheSize.of(pair), weight_bytes((pair.target, pair.draft), torch.bfloat16)
        slots = size.most_slots(int((1 - WORKING_SHARE) * H100) - weights, 2048)
        target, draft = (split_revision(str(model))[0] for model in NAMED_PAIRS[name])
        taken.setdefault(target, []).append((f"{weights / 2**30:.1f}", f"{size.token // 1024}", f"{slots}"))
        assert f"`{name}` {draft}" in row_of(target)[1]
    for target, pairs in taken.items():
        assert tuple(row_of(target)[2:]) == max(pairs, key=lambda figures: float(figures[0]))


def row_of(target: str) -> list[str]:
    row = next(line for line in GUIDE.read_text().splitlines() if line.startswith(f"| {target} "))
    return [cell.strip() for cell in row.strip("|").split("|")]
