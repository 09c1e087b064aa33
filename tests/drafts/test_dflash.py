"""The draft network against an independent loop-by-loop reference, and its checkpoint format."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config

from blockpilot.drafts.blocks import Blocks
from blockpilot.drafts.dflash import DraftModel
from blockpilot.drafts.dflash_checkpoint import load_draft, save_draft
from blockpilot.drafts.dflash_prepared import CachedDFlash
from blockpilot.drafts.options import default_layer_ids, parse_options
from blockpilot.models.packing import Packing
from helpers.dflash import SlowDFlash
from helpers.published import PUBLISHED

BLOCK, CONTEXT, MASK_ID, VOCAB, WIDTH = 5, 11, 7, 50, 24
PLAIN = {"mask_token_id": MASK_ID, "target_layer_ids": [1, 4, 6]}
CONVOLVED = PLAIN | {"conv_kernel_size": 3, "conv_group_size": 8}
DFLASH2 = CONVOLVED | {"selector_rank": 4, "selector_top_k": 6}
SLIDING = {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "sliding_window": 4}


def random_draft(**changes: Any) -> DraftModel:
    """Draft with three layers of grouped heads that reads three target layers; all weights are random, norms too."""
    options: dict[str, Any] = {
        **{"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 40, "num_hidden_layers": 3},
        **{"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8},
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        **{"block_size": BLOCK, "num_target_layers": 10, "dflash_config": PLAIN},
    }
    torch.manual_seed(3)
    draft = DraftModel(Qwen3Config(**options | changes)).eval()
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return draft


def inputs(rows: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """(features [rows, CONTEXT, 3 * WIDTH], tokens at the anchors [rows], embedding [VOCAB, WIDTH])"""
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(rows, CONTEXT, 3 * WIDTH, generator=generator)
    return features, torch.arange(20, 20 + rows), torch.randn(VOCAB, WIDTH, generator=generator)


@torch.inference_mode()
def as_engine(
    draft: DraftModel, features: Tensor, block: Tensor, anchors: list[int], sizes: list[int], embedding: Tensor
) -> Tensor:
    """Hidden states by way of the cache: context in two uneven chunks, with unused columns after it."""
    rows = len(anchors)
    decoder = CachedDFlash(draft)
    cache = decoder.new_cache(rows, CONTEXT + BLOCK + 3)
    for piece in (slice(0, 4), slice(4, CONTEXT)):
        positions = torch.arange(CONTEXT)[piece].expand(rows, -1)
        slots = torch.arange(rows).repeat_interleave(positions.shape[1])
        decoder.extend(features[:, piece].flatten(0, 1), slots, positions.flatten(), cache)
    packing = Packing(sizes, anchors, torch.device("cpu"))
    view = cache.view(packing.rows, packing.positions, slice(0, rows), int(packing.positions.max()) + 1)
    return packing.pad(decoder.propose(embedding[block][packing.rows, packing.offsets], packing, view))


@torch.inference_mode()
def as_training(
    draft: DraftModel, features: Tensor, block: Tensor, anchors: list[int], sizes: list[int], embedding: Tensor
) -> Tensor:
    """Hidden states from the whole context, as in training and replay."""
    blocks = Blocks(torch.tensor(anchors)[:, None], block[:, :1], torch.tensor(sizes)[:, None], (BLOCK,))
    return draft.at_anchors(blocks, draft.known(features), embedding.__getitem__)


@pytest.mark.parametrize("run", [as_engine, as_training])
@pytest.mark.parametrize(
    "changes",
    [
        *({}, {"is_causal": True}, SLIDING, SLIDING | {"is_causal": False}),
        *({"dflash_config": CONVOLVED}, {"dflash_config": CONVOLVED | {"conv_group_size": 6}}),
        SLIDING | {"is_causal": False, "dflash_config": CONVOLVED},
    ],
)
def test_equals_the_reference(changes: dict[str, Any], run: Callable[..., Tensor]) -> None:
    """Batch of rows of different sizes, whose context ends before the cached columns do."""
    check_equals_the_reference(changes, run)


@pytest.mark.usefixtures("without_c")
@pytest.mark.parametrize("changes", [{}, {"dflash_config": CONVOLVED}])
def test_layers_by_torch_equal_the_reference(changes: dict[str, Any]) -> None:
    """Layers as on a GPU, or on a CPU without a compiler."""
    check_equals_the_reference(changes, as_engine)


def check_equals_the_reference(changes: dict[str, Any], run: Callable[..., Tensor]) -> None:
    """Float32 against float64: about 300 rounded operations deep, so 1e-5 of values of size 1 leaves 100 ulp."""
    draft, (features, tokens, embedding) = random_draft(use_sliding_window=True, **changes), inputs(3)
    anchors, sizes = [CONTEXT, 4, 9], [BLOCK, 2, 3]
    block = torch.cat([tokens[:, None], torch.full((3, BLOCK - 1), MASK_ID)], dim=1)
    hidden, slow = run(draft, features, block, anchors, sizes, embedding), SlowDFlash.of(draft)
    for row, (anchor, size) in enumerate(zip(anchors, sizes, strict=True)):
        embedded, causal = embedding[block[row, :size]], changes.get("is_causal")
        expected = slow(features[row, :anchor], embedded, anchor, causal, changes.get("sliding_window"))
        torch.testing.assert_close(hidden[row, :size].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(importlib.util.find_spec("dflash") is None, reason="needs pip install --no-deps dflash==0.1.0")
@pytest.mark.parametrize("changes", [{}, SLIDING])
def test_published_package_loads_our_directory_and_computes_the_same(tmp_path: Path, changes: dict[str, Any]) -> None:
    from dflash.model import DFlashDraftModel

    draft = random_draft(use_sliding_window=True, **changes)
    save_draft(draft, tmp_path, dtype=torch.float32)
    theirs = DFlashDraftModel.from_pretrained(tmp_path, attn_implementation="sdpa").eval()
    features, tokens, embedding = inputs(1)
    block = torch.tensor([[int(tokens), *[MASK_ID] * (BLOCK - 1)]])
    with torch.no_grad():
        positions = torch.arange(CONTEXT + BLOCK)[None]
        expected = theirs(position_ids=positions, noise_embedding=embedding[block], target_hidden=features)
    hidden = as_engine(draft, features, block, [CONTEXT], [BLOCK], embedding)
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-5)


def test_fresh_convolutions_and_edges_change_nothing() -> None:
    torch.manual_seed(0)
    plain, (features, tokens, embedding) = random_draft(), inputs()
    fresh = DraftModel(Qwen3Config(**plain.config.to_dict() | {"dflash_config": DFLASH2})).eval()
    assert not fresh.load_state_dict(plain.state_dict(), strict=False).unexpected_keys
    hidden, expected = (
        as_training(draft, features, tokens[:, None], [9, 6], [BLOCK] * 2, embedding) for draft in (fresh, plain)
    )
    torch.testing.assert_close(hidden, expected)
    assert fresh.candidate_selector is not None
    before, after = torch.tensor([[1, 2]] * 2), torch.tensor([[3, 4, 5]] * 2)
    assert not fresh.candidate_selector.between(hidden[:, 0].clone(), before, after).any()


# --- the checkpoint format ---


def test_weights_are_named_as_published_and_bf16_by_default(tmp_path: Path) -> None:
    layer_names = {
        *(f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        *("input_layernorm.weight", "post_attention_layernorm.weight"),
    }
    plain = {
        "fc.weight",
        "hidden_norm.weight",
        "norm.weight",
        *(f"layers.{i}.{n}" for i in range(3) for n in layer_names),
    }
    markov: dict[str, tuple[int, ...]] = {f"markov_head.markov_w{i}.weight": (VOCAB, 4) for i in (1, 2)}
    second: dict[str, tuple[int, ...]] = {"candidate_selector.hidden_projection.weight": (4, WIDTH)}
    second |= {f"candidate_selector.{name}_codebook": (VOCAB, 4) for name in ("predecessor", "successor")}
    for conv in (f"layers.{i}.{name}_conv" for i in range(3) for name in ("attention", "mlp")):
        second |= {
            f"{conv}.base_kernel": (2, 3, WIDTH),
            f"{conv}.kernel_projection.weight": (2 * 3 * WIDTH // 8, WIDTH),
        }
    for architecture, parts, more in (
        ("DFlashDraftModel", PLAIN, {}),
        ("DFlashDraftModel", PLAIN | {"markov_rank": 4}, markov),
        ("DFlash2DraftModel", DFLASH2, second),
    ):
        save_draft(random_draft(dflash_config=parts), tmp_path)
        stored = load_file(tmp_path / "model.safetensors")
        assert stored.keys() == plain | more.keys()
        assert {name: tuple(stored[name].shape) for name in more} == more
        assert {value.dtype for value in stored.values()} == {torch.bfloat16}
        assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [architecture]


def test_codebooks_are_stored_for_the_drafts_own_vocabulary(tmp_path: Path) -> None:
    """Edges of other tokens are not used, or are zero; whole codebooks can be loaded, too."""
    draft = random_draft(dflash_config=DFLASH2)
    selector = draft.candidate_selector
    assert selector is not None
    draft.vocabulary = torch.tensor([9, 3, 17, 4, 40, 8])
    save_draft(draft, tmp_path, dtype=torch.float32)
    stored = load_file(tmp_path / "model.safetensors")
    loaded = load_draft(tmp_path).candidate_selector
    assert loaded is not None
    outside = [i for i in range(VOCAB) if i not in draft.vocabulary.tolist()]
    for name in ("predecessor_codebook", "successor_codebook"):
        assert stored[f"candidate_selector.{name}"].equal(getattr(selector, name)[draft.vocabulary])
        assert getattr(loaded, name)[draft.vocabulary].equal(getattr(selector, name)[draft.vocabulary])
        assert not getattr(loaded, name)[outside].any()
        stored[f"candidate_selector.{name}"] = getattr(selector, name).detach()
    save_file(stored, tmp_path / "model.safetensors")
    whole = load_draft(tmp_path).candidate_selector
    assert whole is not None
    assert whole.successor_codebook.equal(selector.successor_codebook)


def test_default_layer_ids_are_those_of_the_published_drafts() -> None:
    assert default_layer_ids(36, 5) == (1, 9, 17, 25, 33)  # Qwen3-4B-DFlash-b16
    assert default_layer_ids(30, 5) == (1, 8, 14, 20, 27)
    assert default_layer_ids(30, 1) == (15,)


def published_config(**changes: Any) -> Qwen3Config:
    """Qwen3-4B-DFlash-b16's config.json with changes; fields set to `...` are removed."""
    written = PUBLISHED["qwen3-4b"][1] | changes
    return Qwen3Config.from_dict({name: value for name, value in written.items() if value is not ...})


def test_published_options_are_understood() -> None:
    options = parse_options(published_config())
    assert (options.block_size, options.mask_token_id, options.causal) == (16, 151669, None)
    assert options.target_layer_ids == (1, 9, 17, 25, 33)
    assert parse_options(published_config(block_size=..., dflash_config=PLAIN | {"block_size": 10})).block_size == 10
    for name in ("is_causal", "causal", "causal_head"):
        assert parse_options(published_config(dflash_config=PLAIN | {name: True})).causal is True


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["DSpineDraftModel"]}, "DSpineDraftModel.*: supported are DFlashDraftModel"),
        ({"final_logit_softcapping": "30"}, "final_logit_softcapping = '30': must be a positive number"),
        ({"dflash_config": PLAIN | {"input_embedding_scale": 0}}, "input_embedding_scale = 0: must be a positive"),
        (
            {"dflash_config": PLAIN | {"swa_window_size": 1024}},
            r"swa_window_size = 1024: not supported \(only None\)",
        ),
        ({"dflash_config": PLAIN | {"attention_value_scale": 0.7}}, "attention_value_scale = 0.7"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor = 0.25"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config = .*fp8"),
        ({"layer_types": ["sliding_attention"] * 5, "sliding_window": 4}, "sliding_attention without a window"),
        ({"is_causal": False, "causal": True}, "must be one of true and false"),
        ({"dflash_config": PLAIN | {"causal_head": "yes"}}, "'causal_head': 'yes'"),
        ({"dflash_config": {"selector_rank": 8}}, "selector_rank = 8, selector_top_k = 0: both or none"),
        (
            {"dflash_config": {"conv_kernel_size": 2, "conv_group_size": 3}},
            "conv_group_size = 3: must divide .* 2560",
        ),
        ({"dflash_config": {"markov_rank": "8"}}, "markov_rank = '8': must be a whole number, 0 for none"),
        (
            {"dflash_config": {"markov_rank": 8, "selector_rank": 8, "selector_top_k": 4}},
            "markov_rank and selector_rank = 8: one at a time",
        ),
        ({"dflash_config": {"mask_token_id": 5}, "block_size": None}, "lacks block_size, target_layer_ids"),
        ({"dflash_config": {"target_layer_ids": []}}, "lacks mask_token_id, target_layer_ids"),
    ],
)
def test_unsupported_checkpoints_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_options(published_config(**changes))


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
    else:
        fc = weights.pop("fc.weight")
        other = {} if damage == "missing weight" else {"fc.weight": fc[:, :5].contiguous()}
        save_file(weights | other, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=str(tmp_path)):
        load_draft(tmp_path)
