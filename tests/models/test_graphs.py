"""Passes padded to boxes, as CUDA graphs run them, against the same passes without padding."""

from collections.abc import Sequence
from copy import deepcopy

import pytest
import torch
from torch import Tensor
from transformers import Gemma4ForCausalLM

from blockpilot.drafts.dflash import DraftModel
from blockpilot.drafts.dflash_checkpoint import new_draft_config
from blockpilot.drafts.dflash_prepared import CachedDFlash
from blockpilot.engine.engine import Engine
from blockpilot.models.cache import SlotCache
from blockpilot.models.experts import Mixture
from blockpilot.models.graphs import Box, Graphs
from blockpilot.models.packing import Packing
from blockpilot.models.target import Target
from blockpilot.pairs.loading import Pair, load_pair
from blockpilot.types import Layout, Request, Sampling
from helpers.controllers import Watched
from helpers.engines import run, text_of
from helpers.tiny import (
    MASK_ID,
    tiny_gemma,
    tiny_gemma4_of_all_parts,
    tiny_gpt_oss,
    tiny_mixture,
    tiny_qwen3,
    tiny_sliding,
    tiny_target,
)

CPU = torch.device("cpu")
SLOTS, COLUMNS, LAYER_IDS = 5, 70, (0, 3, 5)
TREE = [0, 0, 1, 1, 2, 5]
# sizes, starts, parents
PASSES = {
    "plain": ([1] * 4, [9, 1, 30, 4], None),
    "chains": ([3, 1, 8, 5], [9, 0, 30, 4], None),
    "trees": ([7, 3, 1, 4], [9, 2, 30, 4], [TREE, [0, 1], [], [0, 0, 0]]),
    "full": ([8] * 5, [1, 2, 3, 4, 61], None),
}


def gemma4() -> Gemma4ForCausalLM:
    return tiny_gemma4_of_all_parts(num_hidden_layers=6, layer_types=["sliding_attention", "full_attention"] * 3)


MODELS = [tiny_target, tiny_qwen3, tiny_gemma, gemma4, tiny_sliding, tiny_mixture, tiny_gpt_oss]


def filled(cache: SlotCache) -> SlotCache:
    """The cache with random contents, as of other tokens, and NaN in the last column, which no pass may read."""
    for group in cache.groups:
        group.normal_(generator=torch.Generator().manual_seed(3))
        group[..., -1, :] = torch.nan
    return cache


def boxed(cache: SlotCache) -> SlotCache:
    """A copy of the cache whose passes are padded to boxes."""
    copy = deepcopy(cache)
    copy.hold(copy.groups)
    copy.graphs = Graphs(CPU, capture=False)
    return copy


def assert_same(tensor: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.usefixtures("in_c")
@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize(
    "model", [tiny_target, tiny_qwen3, tiny_gemma, gemma4, tiny_sliding, tiny_mixture, tiny_gpt_oss]
)
@torch.inference_mode()
def test_target_in_a_box(model: object, name: str) -> None:
    target = Target(model().eval(), LAYER_IDS)  # type: ignore[operator]
    sizes, starts, parents = PASSES[name]
    plain = filled(target.new_cache(SLOTS, COLUMNS))
    caches = plain, boxed(plain)
    for seed in (0, 1):  # in the second pass the box has the contents of the first
        packing = Packing(sizes, starts, CPU, parents)
        tokens = torch.randint(260, (sum(sizes),), generator=torch.Generator().manual_seed(seed))
        views = [cache.view(packing.rows, packing.columns, slice(0, len(sizes)), packing.length) for cache in caches]
        expected, scored = (target.score(tokens, view, packing, features=True) for view in views)
        assert_same(scored.hidden, expected.hidden)
        assert scored.features is not None
        assert expected.features is not None
        assert_same(scored.features, expected.features)
        for groups in zip(*(cache.groups for cache in caches), strict=True):
            assert_same(*(group[..., :-1, :] for group in groups))
    assert caches[1].graphs is not None
    assert len(caches[1].graphs) == 1


@pytest.mark.usefixtures("without_c")
@torch.inference_mode()
def test_padding_chooses_no_other_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same experts with padding, also in a second pass of fewer tokens in a box that the first one has filled."""
    chosen, by_groups = list[set[int]](), Mixture._by_groups

    def recorded(mixture: Mixture, x: Tensor, ids: Tensor, num_chosen: int) -> Tensor:
        chosen.append(set(ids.tolist()))
        return by_groups(mixture, x, ids, num_chosen)

    monkeypatch.setattr(Mixture, "_by_groups", recorded)
    target = Target(tiny_mixture(num_experts=64).eval(), LAYER_IDS)
    plain = filled(target.new_cache(SLOTS, COLUMNS))
    caches = plain, boxed(plain)
    for sizes in ([8, 8, 8, 8], [1, 5, 2, 3]):
        packing = Packing(sizes, [9, 1, 30, 4], CPU)
        tokens = torch.randint(260, (sum(sizes),), generator=torch.Generator().manual_seed(0))
        chosen_experts = []
        for cache in caches:
            chosen.clear()
            view = cache.view(packing.rows, packing.columns, slice(0, 4), packing.length)
            target.score(tokens, view, packing, features=False)
            chosen_experts.append(list(chosen))
        assert chosen_experts[0] == chosen_experts[1]
        assert len(chosen_experts[0]) == 5  # the first layer is dense


@pytest.mark.usefixtures("in_c")
@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("slots", [[0, 1, 2], [1, 4]])
@torch.inference_mode()
def test_draft_in_a_box(slots: Sequence[int], sliding: bool) -> None:
    config = new_draft_config(tiny_target().config, num_layers=2, block_size=4, mask_token_id=MASK_ID)
    if sliding:
        config.layer_types, config.sliding_window = ["sliding_attention", "full_attention"], 6
    torch.manual_seed(4)
    draft = CachedDFlash(DraftModel(config).eval())
    plain = filled(draft.new_cache(SLOTS, COLUMNS))
    caches = plain, boxed(plain)
    context_slots, columns = torch.tensor([0, 0, 1, 4, 4]), torch.tensor([3, 4, 9, 0, 1])
    features = torch.randn(5, draft.draft.fc.in_features, generator=torch.Generator().manual_seed(5))
    expected, extended = (draft.extend(features, context_slots, columns, cache) for cache in caches)
    assert_same(extended, expected)
    packing = Packing([4, 2, 3][: len(slots)], [20, 7, 1][: len(slots)], CPU)
    embedded = torch.randn(packing.num_tokens, 48, generator=torch.Generator().manual_seed(6))
    index = torch.tensor(slots)
    rows = slice(0, len(slots)) if slots[0] == 0 else index
    views = [cache.view(index[packing.rows], packing.columns, rows, packing.length) for cache in caches]
    expected, proposed = (draft.propose(embedded, packing, view) for view in views)
    assert_same(proposed, expected)
    assert_same(*(cache.layers[..., :-1, :] for cache in caches))
    assert caches[1].graphs is not None
    assert len(caches[1].graphs) == 2


def test_boxes_are_those_of_a_grid() -> None:
    def around(sizes: list[int], starts: list[int]) -> Box | None:
        return Box.around(Packing(sizes, starts, CPU), range(len(sizes)), 20, 2080)

    assert around([1], [0]) == (1, 1, 256)
    assert around([3, 5, 1], [0, 252, 0]) == (4, 8, 512)
    assert around([2] * 17, [1030] * 17) == (20, 2, 1536)
    assert around([2], [2060]) == (1, 2, 2072)
    assert around([2], [2077]) == (1, 2, 2079)
    assert around([2], [2078]) is None  # the last column is for padding
    assert around([33], [0]) is None
    assert around([32] * 17, [0] * 17) is None  # too many tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_engine_with_boxes_emits_the_same_text(tiny_pair: Pair, temperature: float) -> None:
    graphs = Graphs(CPU, capture=False)
    assert texts(tiny_pair, temperature, graphs) == texts(tiny_pair, temperature, None)
    assert len(graphs) > 4


def test_a_controller_hears_of_new_graphs(tiny_pair: Pair) -> None:
    controller = Watched(3)
    engine = Engine(tiny_pair, num_slots=1, max_length=60, controller=controller, graphs=False)
    engine._cache.graphs = engine._drafter.cache.graphs = Graphs(CPU, capture=False)
    captured = list[list[bool]]()
    for _ in range(2):
        controller.outcomes.clear()
        run(engine, [Request((5, 6, 7), 12, block_size=4)])
        captured.append([outcome.has_captured for outcome in controller.outcomes])
    assert captured[0][0]
    assert len(captured[0]) > 2
    assert not any(captured[1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_cuda_graphs_emit_the_same_text(tiny_pair_dirs: tuple[str, str], temperature: float) -> None:
    pair = load_pair(target=str(tiny_pair_dirs[0]), draft=str(tiny_pair_dirs[1]), device="cuda", dtype="float32")
    graphs = Graphs(torch.device("cuda"))
    assert texts(pair, temperature, graphs) == texts(pair, temperature, None)
    assert len(graphs) > 4


def texts(pair: Pair, temperature: float, graphs: Graphs | None) -> list[tuple[int, ...]]:
    """Answers to more requests than slots, of all layouts and several lengths."""
    engine = Engine(pair, num_slots=3, max_length=60, max_prefill_tokens=40, graphs=False)
    engine._cache.graphs = engine._drafter.cache.graphs = graphs
    kinds: list[tuple[int, Layout]] = [(1, "chain"), (4, "chain"), (7, "tree"), (2, "chain"), (12, "tree")]
    requests = [
        Request(tuple(range(5, 12 + 9 * i)), 18, Sampling(temperature, seed=i), size, layout=layout)
        for i, (size, layout) in enumerate(kinds)
    ]
    return [text_of(steps) for steps in run(engine, requests)]
