"""Passes laid out in boxes, as CUDA graphs run them, against the same passes without padding."""

from collections.abc import Sequence
from copy import deepcopy

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import blockpilot.models.kernels as kernels
from blockpilot.drafts.checkpoint import new_draft_config
from blockpilot.drafts.decoder import DraftDecoder
from blockpilot.drafts.dflash import DraftModel
from blockpilot.engine.engine import Engine
from blockpilot.models.cache import SlotCache
from blockpilot.models.graphs import Box, Graphs
from blockpilot.models.packing import Packing
from blockpilot.models.target import Target
from blockpilot.pairs.loading import Pair, load_pair
from blockpilot.types import Request, Sampling
from helpers.controllers import Watched
from helpers.tiny import MASK_ID, tiny_target

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


def qwen3() -> PreTrainedModel:
    torch.manual_seed(2)
    shape = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 6, "head_dim": 16, "vocab_size": 260}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen3ForCausalLM(Qwen3Config(**shape, **heads, max_position_embeddings=128, initializer_range=0.2))


def filled(cache: SlotCache) -> SlotCache:
    """The cache with what other tokens have left in it, and no numbers where no pass may read."""
    cache.layers.normal_(generator=torch.Generator().manual_seed(3))
    cache.layers[..., -1, :] = torch.nan
    return cache


@pytest.fixture(params=["torch", "native"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(kernels, "native_product", lambda *_, **__: None)


def boxed(cache: SlotCache) -> SlotCache:
    """A copy of the cache whose passes are laid out in boxes."""
    copy = deepcopy(cache)
    copy.by_token = [copy.layers[i].permute(1, 3, 0, 2, 4) for i in range(len(copy.layers))]
    copy.graphs = Graphs(CPU, capture=False)
    return copy


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("model", [tiny_target, qwen3])
@torch.inference_mode()
def test_target_in_a_box(model: object, name: str) -> None:
    target = Target(model().eval(), LAYER_IDS)  # type: ignore[operator]
    sizes, starts, parents = PASSES[name]
    plain = filled(target.new_cache(SLOTS, COLUMNS))
    caches = plain, boxed(plain)
    for seed in (0, 1):  # again with what the first pass has left in the box
        packing = Packing(sizes, starts, CPU, parents)
        tokens = torch.randint(260, (sum(sizes),), generator=torch.Generator().manual_seed(seed))
        expected, found = (
            target.score(
                tokens,
                cache.view(packing.rows, packing.columns, slice(0, len(sizes)), packing.length),
                packing,
                features=True,
            )
            for cache in caches
        )
        assert_same(found.hidden, expected.hidden)
        assert found.features is not None
        assert expected.features is not None
        assert_same(found.features, expected.features)
        assert_same(*(cache.layers[..., :-1, :] for cache in caches))
    graphs = caches[1].graphs
    assert graphs is not None
    assert len(graphs) == 1


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("slots", [[0, 1, 2], [1, 4]])
@torch.inference_mode()
def test_draft_in_a_box(slots: Sequence[int], sliding: bool) -> None:
    config = new_draft_config(qwen3().config, num_layers=2, block_size=4, mask_token_id=MASK_ID)
    if sliding:
        config.layer_types, config.sliding_window = ["sliding_attention", "full_attention"], 6
    torch.manual_seed(4)
    draft = DraftDecoder(DraftModel(config).eval())
    plain = filled(draft.new_cache(SLOTS, COLUMNS))
    caches = plain, boxed(plain)
    places, columns = torch.tensor([0, 0, 1, 4, 4]), torch.tensor([3, 4, 9, 0, 1])
    features = torch.randn(5, draft.draft.fc.in_features, generator=torch.Generator().manual_seed(5))
    expected, found = (draft.extend(features, places, columns, cache) for cache in caches)
    assert_same(found, expected)
    packing = Packing([4, 2, 3][: len(slots)], [20, 7, 1][: len(slots)], CPU)
    embedded = torch.randn(packing.num_tokens, 48, generator=torch.Generator().manual_seed(6))
    index = torch.tensor(slots)
    rows = slice(0, len(slots)) if slots[0] == 0 else index
    expected, found = (
        draft.propose(embedded, packing, cache.view(index[packing.rows], packing.columns, rows, packing.length))
        for cache in caches
    )
    assert_same(found, expected)
    assert_same(*(cache.layers[..., :-1, :] for cache in caches))
    graphs = caches[1].graphs
    assert graphs is not None
    assert len(graphs) == 2


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
    for _ in range(2):
        engine.add(Request((5, 6, 7), 12, block_size=4))
        while not engine.idle:
            engine.step()
    told = [outcome.has_captured for outcome in controller.outcomes]
    first, again = told[: len(told) // 2], told[len(told) // 2 :]
    assert first[0]
    assert len(first) > 2
    assert not any(again)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_cuda_graphs_emit_the_same_text(tiny_pair_dirs: tuple[str, str], temperature: float) -> None:
    pair = load_pair(target=str(tiny_pair_dirs[0]), draft=str(tiny_pair_dirs[1]), device="cuda", dtype="float32")
    graphs = Graphs(torch.device("cuda"))
    assert texts(pair, temperature, graphs) == texts(pair, temperature, None)
    assert len(graphs) > 4


def texts(pair: Pair, temperature: float, graphs: Graphs | None) -> list[list[int]]:
    """Answers of requests of all layouts and several lengths, more than there are slots."""
    engine = Engine(pair, num_slots=3, max_length=60, max_prefill_tokens=40, graphs=False)
    engine._cache.graphs = engine._drafter.cache.graphs = graphs
    kinds = [(1, "chain"), (4, "chain"), (7, "tree"), (2, "chain"), (12, "tree")]
    ids = [
        engine.add(
            Request(
                tuple(range(5, 12 + 9 * i)),
                18,
                sampling=Sampling(temperature=temperature, seed=i),
                block_size=size,
                layout=layout,
            )
        )
        for i, (size, layout) in enumerate(kinds)
    ]
    found: dict[int, list[int]] = {request_id: [] for request_id in ids}
    while not engine.idle:
        for step in engine.step():
            found[step.request_id] += step.tokens
    return [found[request_id] for request_id in ids]
