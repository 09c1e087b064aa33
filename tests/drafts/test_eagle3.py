"""EAGLE-3 draft: its network against a slow reference, its checkpoint formats, its vocabulary."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
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
from helpers.published import VOCAB_SIZE, small_draft, write_draft
from helpers.tiny import tiny_hybrid, tiny_target

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


def published(directory: Path, family: str) -> Path:
    """Checkpoint in the paper's format, written by hand."""
    draft = random_eagle3(TARGETS[family], VOCABULARY)
    names = "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim rms_norm_eps"
    config: dict[str, Any] = {name: getattr(draft.config, name) for name in names.split()}
    config |= {"rope_theta": draft.config.rope_parameters["rope_theta"], "rope_scaling": None, "hidden_act": "silu"}
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "draft_vocab_size": len(draft.d2t)}
    weights = {name: value.detach().half() for name, value in draft.named_parameters()}
    return write_draft(directory, config | {"num_hidden_layers": 1}, weights | {"d2t": draft.d2t, "t2d": draft.t2d})


FORMATS: dict[str, Callable[[Path], Path]] = {
    "llama": lambda directory: published(directory, "llama"),
    "qwen3": lambda directory: published(directory, "qwen3"),
    "speculators": lambda directory: small_draft("llama31-8b-eagle3", directory, draft_vocab_size=120),
    "deepspec": lambda directory: small_draft("qwen3-8b-eagle3", directory),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_published_checkpoint_computes_what_the_slow_network_does(name: str, tmp_path: Path) -> None:
    """Formats: the paper's; that of vLLM's speculators; DeepSpec's, a Qwen3 layer with head norms that reads five
    target layers, with the target's whole vocabulary.
    """
    draft = load_eagle3(directory := FORMATS[name](tmp_path / "draft"))
    weights = load_file(directory / "model.safetensors")
    weights = {name.replace("layers.0.", "midlayer."): value.float() for name, value in weights.items()}
    network = json.loads((directory / "config.json").read_text())
    network = network.get("transformer_layer_config", network)
    sizes = SimpleNamespace(**network, rope_parameters=network)
    slow = SlowEagle3(weights, sizes, norm_before_residual=name == "speculators")
    features, embedded = inputs(draft.config, num_layers=draft.options.num_features)
    for row, logits in enumerate(logits_of(draft, features, embedded)):
        torch.testing.assert_close(logits, slow_logits(slow, features[row], embedded[row]), rtol=1e-4, atol=1e-5)
    if name == "deepspec":
        assert draft.vocabulary.tolist() == list(range(VOCAB_SIZE))
        assert draft.options == Eagle3Options(VOCAB_SIZE, 8, (0, 1, 2, 3, 4), head_norms=True)
    else:
        is_published = name in TARGETS
        assert draft.vocabulary.tolist() == (VOCABULARY.sort().values.tolist() if is_published else [*range(5, 125)])
        assert (draft.options.block_size, draft.options.layer_ids(30)) == (8 if is_published else 6, (1, 14, 26))
    assert (draft.embed_tokens is None) == (name in TARGETS)
    if draft.embed_tokens is not None:
        assert torch.equal(draft.embed_tokens.weight, weights["embed_tokens.weight"])
        assert not draft.embed_tokens.weight.requires_grad


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28},  # SpecForge's for Qwen2.5
        {"use_sliding_window": False, "sliding_window": 512},  # and for Gemma 3
        {"model_type": "qwen2", "architectures": ["LlamaForCausalLMEagle3"]},
        {"t2d": None},  # NVIDIA's Model-Optimizer writes d2t only
    ],
    ids=str,
)
def test_forms_without_effect_change_nothing(changes: dict[str, Any], tmp_path: Path) -> None:
    draft = load_eagle3(directory := published(tmp_path / "draft", "llama"))
    config, weights = directory / "config.json", load_file(directory / "model.safetensors")
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    save_file({n: v for n, v in weights.items() if n not in changes}, directory / "model.safetensors")
    other = load_eagle3(directory)
    assert other.options == draft.options
    assert other.state_dict().keys() == draft.state_dict().keys()
    assert all(value.equal(other.state_dict()[name]) for name, value in draft.state_dict().items())


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
    ("name", "changes", "message"),
    [
        ("llama", {"architectures": ["DFlashDraftModel"]}, "architecture .*DFlashDraftModel.*: supported: "),
        ("llama", {"target_hidden_size": 64}, r"target_hidden_size = 64: not supported \(only 48\)"),
        ("llama", {"draft_vocab_size": 61}, "draft_vocab_size 61: must be 1 to 60"),
        ("llama", {"draft_vocab_size": 7}, "do not fit config.json at d2t, lm_head.weight"),
        ("llama", {"sliding_window": 512}, r"sliding_window = 512: not supported \(only None\)"),
        (
            *("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.25}}),
            "partial_rotary_factor = 0.25: not supported",
        ),
        ("llama", {"block_size": 1}, "block_size = 1: must be at least 2"),
        ("llama", {LAYER_IDS: [0, 3, 5]}, rf"{LAYER_IDS} = \[0, 3, 5\]"),
        ("llama", {"eagle_config": {LAYER_IDS: [1, 3]}}, "weights do not fit config.json at fc.weight"),
        (
            "llama",
            {"eagle_config": {"use_aux_hidden_state": False}},
            "use_aux_hidden_state = False: not supported",
        ),
        ("speculators", {"speculators_model_type": "eagle"}, "speculators_model_type = eagle: not supported"),
        ("speculators", {"transformer_layer_config": {"hidden_size": []}}, "config.json"),
        ("deepspec", {"target_layer_ids": [-1, 2, 4]}, r"= \[-1, 2, 4\]: supported are outputs of layers"),
    ],
)
def test_unsupported_checkpoints_are_refused_by_name(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = FORMATS[name](directory := tmp_path / "draft") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
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
    directory = published(tmp_path / "draft", "llama")
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


def test_a_new_draft_rotates_whole_heads() -> None:
    """Qwen3.5 rotates a quarter; other readers of the checkpoint would, too, if it said so."""
    target = tiny_hybrid().config
    assert target.rope_parameters["partial_rotary_factor"] == 0.25
    rope = new_eagle3(target, VOCABULARY).config.rope_parameters
    assert rope == {"rope_type": "default", "rope_theta": target.rope_parameters["rope_theta"]}


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
