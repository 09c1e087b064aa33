"""EAGLE-3 draft: its network against a slow one, its two checkpoint formats, its vocabulary."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from blockpilot.draft_training.start import start_eagle3_from_target
from blockpilot.drafts.eagle3 import Eagle3Model, Eagle3Options, UnrolledAttention, eagle3_layer_ids
from blockpilot.drafts.eagle3_checkpoint import load_eagle3, new_eagle3, parse_eagle3, save_eagle3
from helpers.eagle3 import Cache, SlowEagle3, random_eagle3
from helpers.published import write_draft
from helpers.tiny import tiny_target

SHAPE = {"vocab_size": 60, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 6}
TARGETS = {
    "llama": LlamaConfig(**SHAPE, num_attention_heads=4, num_key_value_heads=2, rope_theta=5000.0),
    "qwen3": Qwen3Config(**SHAPE, num_attention_heads=6, num_key_value_heads=2, head_dim=16, rope_theta=1e6),
}
VOCABULARY = torch.tensor([50, 3, 4, 20, 59, 7])
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def inputs(config: Any, length: int = 7, num_layers: int = 3) -> tuple[Tensor, Tensor]:
    """Features [2, length, layers * hidden] and embeddings [2, length, hidden]."""
    torch.manual_seed(5)
    return torch.randn(2, length, num_layers * config.hidden_size), torch.randn(2, length, config.hidden_size)


def slow_logits(slow: SlowEagle3, features: Tensor, embedded: Tensor) -> Tensor:
    """Scores after every position of a text."""
    cache: Cache = []
    pairs = enumerate(zip(features, embedded, strict=True))
    return torch.stack([slow.logits(slow.step(feature, token, i, cache)) for i, (feature, token) in pairs])


def logits_of(draft: Eagle3Model, features: Tensor, embedded: Tensor) -> Tensor:
    positions = torch.arange(features.shape[1]).expand(len(features), -1)
    return draft.logits(draft(embedded, draft.fuse(features), positions, UnrolledAttention())).detach()


# --- checkpoints ---


def published(directory: Path, draft: Eagle3Model, **changes: Any) -> Path:
    """The paper's format, written by hand."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "draft_vocab_size": len(draft.d2t)}
    config |= _llama(draft) | changes
    weights = {name: value.detach().half() for name, value in draft.named_parameters()}
    return write_draft(directory, config, weights | {"d2t": draft.d2t, "t2d": draft.t2d})


def speculators(directory: Path, draft: Eagle3Model, **changes: Any) -> Path:
    """The format of vLLM's speculators, written by hand."""
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {"model_type": "llama", **_llama(draft)},
        "draft_vocab_size": len(draft.d2t),
        "norm_before_residual": True,
        "target_hidden_size": None,
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [{"speculative_tokens": 5}]},
    } | changes
    weights = {name.replace("midlayer.", "layers.0."): value.detach() for name, value in draft.named_parameters()}
    shape = draft.config.vocab_size, draft.config.hidden_size
    weights |= {"embed_tokens.weight": torch.randn(shape), "verifier_norm.weight": torch.zeros(shape[1])}
    return write_draft(directory, config, weights | {"d2t": draft.d2t, "t2d": draft.t2d})


def deepspec(directory: Path, draft: Eagle3Model, **changes: Any) -> Path:
    """DeepSpec's format, written by hand: a Qwen3 layer with norms of heads, which reads five layers, over the
    target's whole vocabulary.
    """
    config = _llama(draft) | {
        **{"architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "attention_bias": False, "ttt_length": 6},
        **{"target_layer_ids": [0, 1, 2, 3, 4], "layer_types": ["full_attention"], "num_target_layers": 6},
    }
    weights = {name.replace("midlayer.", "layers.0."): value.detach() for name, value in draft.named_parameters()}
    size, width = draft.config.vocab_size, draft.config.hidden_size
    weights |= {"embed_tokens.weight": torch.randn(size, width), "lm_head.weight": torch.randn(size, width)}
    weights["fc.weight"] = torch.randn(width, 5 * width) / 5
    for name in "qk":
        weights[f"layers.0.self_attn.{name}_norm.weight"] = 1 + torch.randn(draft.config.head_dim) / 4
    return write_draft(directory, config | changes, weights)


def _llama(draft: Eagle3Model) -> dict[str, Any]:
    names = "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim rms_norm_eps"
    theta = {"rope_theta": draft.config.rope_parameters["rope_theta"], "rope_scaling": None}
    sizes = {name: getattr(draft.config, name) for name in names.split()}
    return sizes | theta | {"num_hidden_layers": 1, "hidden_act": "silu"}


@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize("written", [published, speculators, deepspec])
def test_a_published_checkpoint_computes_what_the_slow_network_does(
    family: str, written: Any, tmp_path: Path
) -> None:
    made = random_eagle3(TARGETS[family], VOCABULARY)
    draft = load_eagle3(written(tmp_path / "draft", made))
    weights = load_file(tmp_path / "draft" / "model.safetensors")
    weights = {name.replace("layers.0.", "midlayer."): value.float() for name, value in weights.items()}
    slow = SlowEagle3(weights, made.config, norm_before_residual=written is speculators)
    features, embedded = inputs(draft.config, num_layers=draft.options.num_features)
    for row, logits in enumerate(logits_of(draft, features, embedded)):
        torch.testing.assert_close(logits, slow_logits(slow, features[row], embedded[row]), rtol=1e-4, atol=1e-5)
    assert draft.options.block_size == {published: 8, speculators: 6, deepspec: 7}[written]
    if written is deepspec:
        assert draft.vocabulary.tolist() == list(range(60))
        assert draft.options == Eagle3Options(60, 7, (0, 1, 2, 3, 4), head_norms=True)
    else:
        assert draft.vocabulary.tolist() == VOCABULARY.sort().values.tolist()
        assert draft.options.layer_ids(30) == (1, 14, 26)
    assert (draft.embed_tokens is None) == (written is published)
    if draft.embed_tokens is not None:
        assert torch.equal(draft.embed_tokens.weight, weights["embed_tokens.weight"])
        assert not draft.embed_tokens.weight.requires_grad


def test_what_is_saved_is_loaded_again(tmp_path: Path) -> None:
    draft = random_eagle3(TARGETS["qwen3"], VOCABULARY, block_size=5)
    save_eagle3(draft, tmp_path, dtype=torch.float32)
    loaded = load_eagle3(tmp_path)
    assert loaded.options == draft.options == Eagle3Options(6, 5, (0, 2, 4))
    assert loaded.vocabulary.tolist() == [3, 4, 7, 20, 50, 59]
    features, embedded = inputs(draft.config)
    assert torch.equal(logits_of(loaded, features, embedded), logits_of(draft, features, embedded))
    save_eagle3(loaded, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert {value.dtype for name, value in stored.items() if "2" not in name} == {torch.bfloat16}
    assert (stored["d2t"].dtype, stored["t2d"].dtype) == (torch.int64, torch.bool)
    assert stored.keys() == {
        *("fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"),
        *(f"midlayer.{n}.weight" for n in ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
        *(f"midlayer.self_attn.{n}_proj.weight" for n in "qkvo"),
        *(f"midlayer.mlp.{n}_proj.weight" for n in ("gate", "up", "down")),
    }
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["draft_vocab_size"], config["num_hidden_layers"], config["rope_theta"]) == (6, 1, 1e6)
    assert config["eagle_config"][LAYER_IDS] == [0, 2, 4]  # outputs
    assert config[LAYER_IDS] == [1, 3, 5]  # inputs


def test_layer_numbers_of_both_readers_mean_the_same() -> None:
    sizes = SHAPE | {"num_hidden_layers": 1, "num_attention_heads": 4}
    base = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 6, **sizes}
    for config in ({"eagle_config": {LAYER_IDS: [1, 14, 26]}}, {LAYER_IDS: [2, 15, 27]}):
        assert parse_eagle3(base | config)[1].target_layer_ids == eagle3_layer_ids(30) == (1, 14, 26)


@pytest.mark.parametrize(
    ("written", "changes", "message"),
    [
        (published, {"architectures": ["DFlashDraftModel"]}, "architecture .*DFlashDraftModel.*: supported is"),
        (published, {"target_hidden_size": 64}, r"target_hidden_size = 64: not supported \(only 48\)"),
        (published, {"draft_vocab_size": 61}, "draft_vocab_size 61: must be 1 to 60"),
        (published, {"draft_vocab_size": 7}, "do not fit config.json at d2t, lm_head.weight"),
        (published, {"block_size": 1}, "block_size = 1: must be at least 2"),
        (published, {LAYER_IDS: [0, 3, 5]}, rf"{LAYER_IDS} = \[0, 3, 5\]"),
        (published, {"eagle_config": {LAYER_IDS: [1, 3]}}, "weights do not fit config.json at fc.weight"),
        (published, {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state = False: not supported"),
        (speculators, {"speculators_model_type": "eagle"}, "speculators_model_type = eagle: not supported"),
        (speculators, {"transformer_layer_config": {"hidden_size": []}}, "config.json"),
        (deepspec, {"target_layer_ids": [-1, 2, 4]}, r"= \[-1, 2, 4\]: supported are outputs of layers"),
    ],
)
def test_unsupported_checkpoints_are_refused_by_name(
    written: Any, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    directory = written(tmp_path / "draft", random_eagle3(TARGETS["llama"], VOCABULARY), **changes)
    with pytest.raises(ValueError, match=f"draft .*{message}"):
        load_eagle3(directory)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("d2t", lambda d2t: d2t - 60, "d2t leads to token -57, must be 0 to 59"),
        ("d2t", lambda d2t: -torch.arange(len(d2t)), "d2t leads to the same token twice"),
        ("t2d", lambda t2d: ~t2d, "t2d holds other tokens than d2t"),
    ],
)
def test_maps_of_the_vocabulary_that_contradict_are_refused(
    name: str, change: Any, message: str, tmp_path: Path
) -> None:
    directory = published(tmp_path / "draft", random_eagle3(TARGETS["llama"], VOCABULARY))
    weights = load_file(directory / "model.safetensors")
    save_file(weights | {name: change(weights[name]).contiguous()}, directory / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_eagle3(directory)


@pytest.mark.parametrize(
    ("vocabulary", "layer_ids", "message"),
    [
        ([1, 1, 2], None, "draft vocabulary of 2 different tokens, expected 3"),
        ([0, 1, 60], None, "draft vocabulary: tokens 0 to 60, must be 0 to 59"),
        ([0, 1, 2], (1, 2, 6), "draft reads target layer 6: must be 0 to 5"),
    ],
)
def test_a_new_draft_that_does_not_fit_is_refused(vocabulary: list[int], layer_ids: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        new_eagle3(TARGETS["llama"], torch.tensor(vocabulary), target_layer_ids=layer_ids)


def test_starting_from_the_target() -> None:
    target = tiny_target()
    draft = new_eagle3(target.config, VOCABULARY)
    start_eagle3_from_target(draft, target, range(20))
    last, attention = target.model.layers[-1], draft.midlayer.self_attn
    assert torch.equal(draft.midlayer.mlp.up_proj.weight, last.mlp.up_proj.weight)
    assert torch.equal(attention.o_proj.weight, last.self_attn.o_proj.weight)
    assert torch.equal(attention.k_proj.weight[:, 48:], last.self_attn.k_proj.weight)
    assert torch.equal(draft.lm_head.weight, target.get_output_embeddings().weight[draft.vocabulary])
    features = torch.randn(3, 3 * 48)
    assert torch.equal(draft.fuse(features), features[:, -48:])
