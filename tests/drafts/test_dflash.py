"""The draft network against an independent loop-by-loop reference, its cache, and its checkpoint format."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config

from blockpilot.drafts.checkpoint import load_draft, save_draft
from blockpilot.drafts.decoder import DraftDecoder
from blockpilot.drafts.dflash import DraftModel
from blockpilot.drafts.options import default_layer_ids, parse_options
from blockpilot.models.cache import SlotCache
from blockpilot.models.packing import Packing
from helpers.caches import rows_view
from helpers.dflash import SlowDFlash

BLOCK, CONTEXT, MASK_ID = 5, 11, 7


def random_draft(**changes: Any) -> DraftModel:
    """Two or three layers of grouped heads over three target layers, every weight (norms too) random."""
    options: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "block_size": BLOCK,
        "num_target_layers": 10,
        "dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": [1, 4, 6]},
    }
    torch.manual_seed(3)
    draft = DraftModel(Qwen3Config(**options | changes)).eval()
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return draft


def inputs(rows: int = 2) -> tuple[Tensor, Tensor]:
    """(features [rows, CONTEXT, 3 * 24], block [rows, BLOCK, 24])"""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(rows, CONTEXT, 72, generator=generator), torch.randn(rows, BLOCK, 24, generator=generator)


@torch.inference_mode()
def propose(draft: DraftModel, features: Tensor, block: Tensor, anchors: list[int], sizes: list[int]) -> Tensor:
    """Through the cache, as the engine does: context in two uneven pieces, with junk columns after it."""
    rows, width = len(anchors), block.shape[1]
    decoder = DraftDecoder(draft)
    cache = decoder.new_cache(rows, CONTEXT + width + 3)
    for some in (slice(0, 4), slice(4, CONTEXT)):
        positions = torch.arange(CONTEXT)[some].expand(rows, -1)
        slots = torch.arange(rows).repeat_interleave(positions.shape[1])
        decoder.extend(features[:, some].flatten(0, 1), slots, positions.flatten(), cache)
    packing = Packing(sizes, anchors, torch.device("cpu"))
    view = cache.view(packing.rows, packing.positions, slice(0, rows), int(packing.positions.max()) + 1)
    return packing.pad(decoder.propose(block[packing.rows, packing.offsets], packing, view))


@torch.inference_mode()
def in_training(draft: DraftModel, features: Tensor, block: Tensor, anchors: list[int], sizes: list[int]) -> Tensor:
    """The module's own forward, with all context at once, as training and replay do."""
    cache = SlotCache(draft.config, len(anchors), CONTEXT + block.shape[1], torch.float32, torch.device("cpu"))
    positions = torch.arange(CONTEXT).expand(len(anchors), -1)
    known = draft.known(features)
    for layer, keys_and_values in enumerate(zip(known.keys, known.values, strict=True)):
        rows_view(cache, positions, CONTEXT).update(*keys_and_values, layer)
    positions = torch.tensor(anchors)[:, None] + torch.arange(block.shape[1])
    columns = torch.arange(CONTEXT + block.shape[1])
    visible = columns < (torch.tensor(anchors) + torch.tensor(sizes))[:, None, None]
    masks = draft.layer_masks(visible, positions[:, :, None] - columns)
    return cast(Tensor, draft(block, positions, masks, rows_view(cache, positions, len(columns))))


SLIDING = {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "sliding_window": 4}


CAUSAL: list[dict[str, Any]] = [{}, {"is_causal": True}, SLIDING, SLIDING | {"is_causal": False}]


@pytest.mark.parametrize("run", [in_training, propose])
@pytest.mark.parametrize("changes", [*CAUSAL, {"causal": True}, {"causal_head": True}, SLIDING | {"causal": False}])
def test_equals_the_reference(changes: dict[str, Any], run: Callable[..., Tensor]) -> None:
    """fp32 against float64: about 300 rounded operations deep, so 1e-5 of values of size 1 leaves 100 ulp."""
    draft = random_draft(use_sliding_window=True, **changes)
    features, block = inputs()
    found, slow = run(draft, features, block, [CONTEXT, CONTEXT], [BLOCK, BLOCK]), SlowDFlash.of(draft)
    for row in range(2):
        causal = next((changes[name] for name in ("is_causal", "causal", "causal_head") if name in changes), None)
        expected = slow(features[row], block[row], CONTEXT, causal, changes.get("sliding_window"))
        torch.testing.assert_close(found[row].double(), expected, rtol=1e-4, atol=1e-5)


def test_a_shorter_row_in_a_wide_batch_equals_itself_alone() -> None:
    draft = random_draft()
    features, block = inputs(3)
    anchors, sizes = [CONTEXT, 4, 7], [BLOCK, 2, 3]
    together = propose(draft, features, block, anchors, sizes)
    for row, (anchor, size) in enumerate(zip(anchors, sizes, strict=True)):
        expected = SlowDFlash.of(draft)(features[row], block[row, :size], anchor)
        torch.testing.assert_close(together[row, :size].double(), expected, rtol=1e-4, atol=1e-5)


def test_attention_inside_the_block_is_bidirectional_and_stops_at_the_context() -> None:
    draft = random_draft()
    features, block = inputs(1)
    base = propose(draft, features, block, [6], [BLOCK])
    last_changed = block.clone()
    last_changed[:, -1] += 1
    assert not torch.allclose(propose(draft, features, last_changed, [6], [BLOCK])[:, 0], base[:, 0])
    after_anchor = features.clone()
    after_anchor[:, 6:] += 1
    assert torch.equal(propose(draft, after_anchor, block, [6], [BLOCK]), base)


@pytest.mark.skipif(importlib.util.find_spec("dflash") is None, reason="needs pip install --no-deps dflash==0.1.0")
@pytest.mark.parametrize("changes", [{}, SLIDING])
def test_published_package_loads_our_directory_and_computes_the_same(tmp_path: Path, changes: dict[str, Any]) -> None:
    from dflash.model import DFlashDraftModel

    draft = random_draft(use_sliding_window=True, **changes)
    save_draft(draft, tmp_path, dtype=torch.float32)
    theirs = DFlashDraftModel.from_pretrained(tmp_path, attn_implementation="sdpa").eval()
    features, block = inputs(1)
    with torch.no_grad():
        expected = theirs(
            position_ids=torch.arange(CONTEXT + BLOCK)[None], noise_embedding=block, target_hidden=features
        )
        found = propose(draft, features, block, [CONTEXT], [BLOCK])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# --- the checkpoint format ---


def test_round_trip(tmp_path: Path) -> None:
    draft = random_draft()
    save_draft(draft, tmp_path, dtype=torch.float32)
    again = load_draft(tmp_path)
    assert again.options == draft.options
    assert all(torch.equal(a, b) for a, b in zip(draft.parameters(), again.parameters(), strict=True))
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["DFlashDraftModel"]


def test_a_markov_head_is_part_of_a_checkpoint_and_named_as_published(tmp_path: Path) -> None:
    draft = random_draft(dflash_config={"mask_token_id": MASK_ID, "target_layer_ids": [1, 4, 6], "markov_rank": 4})
    save_draft(draft, tmp_path, dtype=torch.float32)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["markov_head.markov_w1.weight"].shape == stored["markov_head.markov_w2.weight"].shape == (50, 4)
    loaded = load_draft(tmp_path)
    assert loaded.markov_head is not None
    before, some = torch.tensor([[3, 4], [5, 5]]), torch.tensor([[7, 1, 0], [9, 9, 2]])
    hidden = torch.randn(2, 24)  # of no use to it
    found = loaded.markov_head.between(hidden, before, some)
    for s in range(2):
        for p in range(2):
            of_all = loaded.markov_head(hidden[s : s + 1], before[s, p : p + 1])[0]
            torch.testing.assert_close(found[s, p], of_all[some[s]])
            expected = stored["markov_head.markov_w2.weight"] @ stored["markov_head.markov_w1.weight"][before[s, p]]
            torch.testing.assert_close(of_all, expected)


CONVOLVED = {"mask_token_id": MASK_ID, "target_layer_ids": [1, 4, 6], "conv_kernel_size": 3, "conv_group_size": 8}


@pytest.mark.parametrize("sliding", [False, True])
def test_convolutions_equal_a_slow_network(sliding: bool) -> None:
    """Through the cache and as training runs it, of rows of different sizes side by side."""
    changes = SLIDING | {"use_sliding_window": True, "is_causal": False} if sliding else {}
    draft = random_draft(dflash_config=CONVOLVED, **changes)
    features, block = inputs()
    sizes, anchors = [BLOCK, 3], [9, 6]
    found = propose(draft, features, block, anchors, sizes)
    window = draft.config.sliding_window if sliding else None
    for row, (size, anchor) in enumerate(zip(sizes, anchors, strict=True)):
        expected = SlowDFlash.of(draft)(features[row, :anchor], block[row, :size], anchor, False, window)
        torch.testing.assert_close(found[row, :size].double(), expected, rtol=1e-4, atol=1e-5)


def test_fresh_convolutions_and_edges_change_nothing() -> None:
    of_both = CONVOLVED | {"selector_rank": 4, "selector_top_k": 6}
    torch.manual_seed(0)
    fresh = DraftModel(Qwen3Config(**random_draft().config.to_dict() | {"dflash_config": of_both})).eval()
    plain = random_draft()
    unknown = fresh.load_state_dict(plain.state_dict(), strict=False)
    assert not unknown.unexpected_keys
    features, block = inputs()
    found, expected = (propose(draft, features, block, [9, 6], [BLOCK, 3]) for draft in (fresh, plain))
    torch.testing.assert_close(found, expected)
    assert fresh.candidate_selector is not None
    between = fresh.candidate_selector.between(
        found[:, 0].clone(), torch.tensor([[1, 2]] * 2), torch.tensor([[3, 4, 5]] * 2)
    )
    assert not between.any()


def test_codebooks_are_stored_for_the_drafts_own_vocabulary(tmp_path: Path) -> None:
    """Edges of other tokens are never asked for, or are zero; whole codebooks are read as well."""
    draft = random_draft(dflash_config=CONVOLVED | {"selector_rank": 4, "selector_top_k": 6})
    selector = draft.candidate_selector
    assert selector is not None
    torch.nn.init.normal_(selector.successor_codebook)
    draft.vocabulary = torch.tensor([9, 3, 17, 4, 40, 8])
    save_draft(draft, tmp_path, dtype=torch.float32)
    stored = load_file(tmp_path / "model.safetensors")
    again = load_draft(tmp_path).candidate_selector
    assert again is not None
    outside = [i for i in range(50) if i not in draft.vocabulary.tolist()]
    for name in ("predecessor_codebook", "successor_codebook"):
        assert stored[f"candidate_selector.{name}"].equal(getattr(selector, name)[draft.vocabulary])
        assert getattr(again, name)[draft.vocabulary].equal(getattr(selector, name)[draft.vocabulary])
        assert not getattr(again, name)[outside].any()
        stored[f"candidate_selector.{name}"] = getattr(selector, name).detach()
    save_file(stored, tmp_path / "model.safetensors")
    whole = load_draft(tmp_path).candidate_selector
    assert whole is not None
    assert whole.successor_codebook.equal(selector.successor_codebook)


def test_dflash_2_is_named_as_published(tmp_path: Path) -> None:
    draft = random_draft(dflash_config=CONVOLVED | {"selector_rank": 4, "selector_top_k": 6})
    save_draft(draft, tmp_path, dtype=torch.float32)
    stored = {name: tuple(value.shape) for name, value in load_file(tmp_path / "model.safetensors").items()}
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["DFlash2DraftModel"]
    for name in ("attention_conv", "mlp_conv"):
        assert stored[f"layers.2.{name}.base_kernel"] == (2, 3, 24)
        assert stored[f"layers.2.{name}.kernel_projection.weight"] == (2 * 3 * 24 // 8, 24)
    assert stored["candidate_selector.hidden_projection.weight"] == (4, 24)
    assert stored["candidate_selector.predecessor_codebook"] == (50, 4)
    assert stored["candidate_selector.successor_codebook"] == (50, 4)
    again = load_draft(tmp_path)
    assert again.options == draft.options
    assert all(torch.equal(a, b) for a, b in zip(draft.parameters(), again.parameters(), strict=True))


def test_weights_are_bf16_by_default(tmp_path: Path) -> None:
    save_draft(random_draft(), tmp_path)
    assert {w.dtype for w in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}


def test_published_parameter_names() -> None:
    names = set(random_draft().state_dict())
    of_a_layer = {n.removeprefix("layers.0.") for n in names if n.startswith("layers.0.")}
    assert {n for n in names if not n.startswith("layers.")} == {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert of_a_layer == {
        *(f"self_attn.{x}.weight" for x in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
    }


def test_default_layer_ids_are_those_of_the_published_drafts() -> None:
    assert default_layer_ids(36, 5) == (1, 9, 17, 25, 33)  # Qwen3-4B-DFlash-b16
    assert default_layer_ids(30, 5) == (1, 8, 14, 20, 27)
    assert default_layer_ids(30, 1) == (15,)


def published_config(**changes: Any) -> dict[str, Any]:
    """The fields of Qwen3-4B-DFlash-b16's config.json that say what it is."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 2560,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 5,
        "intermediate_size": 9728,
        "rope_theta": 1000000,
        "block_size": 16,
        "num_target_layers": 36,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    } | changes


def test_published_config_is_understood() -> None:
    options = parse_options(Qwen3Config.from_dict(published_config()))
    assert (options.block_size, options.mask_token_id) == (16, 151669)
    assert options.target_layer_ids == (1, 9, 17, 25, 33)


def test_block_size_inside_dflash_config() -> None:
    own = {"mask_token_id": 5, "target_layer_ids": [1], "block_size": 10}
    config = published_config(dflash_config=own)
    del config["block_size"]
    assert parse_options(Qwen3Config.from_dict(config)).block_size == 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["DSpineDraftModel"]}, "DSpineDraftModel"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        (
            {"dflash_config": {"mask_token_id": 5, "selector_rank": 8}},
            "selector_rank = 8, selector_top_k = 0: both or none are needed",
        ),
        (
            {"dflash_config": {"conv_kernel_size": 2, "conv_group_size": 3}},
            "conv_group_size = 3: must divide the hidden size 2560",
        ),
        ({"dflash_config": {"markov_rank": "8"}}, "markov_rank = '8': must be a whole number, 0 for none"),
        (
            {"dflash_config": {"markov_rank": 8, "selector_rank": 8, "selector_top_k": 4}},
            "markov_rank and selector_rank = 8: one at a time",
        ),
        ({"dflash_config": {}}, "lacks mask_token_id"),
        (
            {"dflash_config": {"mask_token_id": 5}, "block_size": None},
            "lacks block_size, target_layer_ids",
        ),
        ({"dflash_config": {"mask_token_id": 5, "target_layer_ids": []}}, "lacks target_layer_ids"),
        (
            {"dflash_config": {"mask_token_id": 5, "target_layer_ids": [1], "causal_head": "yes"}},
            "'causal_head': 'yes'",
        ),
        ({"is_causal": False, "causal": True}, "must be one of true and false"),
        ({"layer_types": ["sliding_attention"] * 5, "sliding_window": 4}, "sliding_attention without a window"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config = .*fp8"),
    ],
)
def test_unsupported_checkpoints_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_options(Qwen3Config.from_dict(published_config(**changes)))


@pytest.mark.parametrize("damage", ["no config", "bad json", "no weights", "missing weight", "other shape"])
def test_broken_directories_are_named(tmp_path: Path, damage: str) -> None:
    save_draft(random_draft(), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    if damage == "no config":
        (tmp_path / "config.json").unlink()
    elif damage == "bad json":
        (tmp_path / "config.json").write_text("{")
    elif damage == "no weights":
        (tmp_path / "model.safetensors").unlink()
    elif damage == "missing weight":
        del weights["fc.weight"]
        save_file(weights, tmp_path / "model.safetensors")
    else:
        weights["fc.weight"] = weights["fc.weight"][:, :5].contiguous()
        save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=str(tmp_path)):
        load_draft(tmp_path)
