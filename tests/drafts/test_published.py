"""Published formats of DFlash and DSpark drafts: checkpoints draft what a slow reference network drafts.

The configurations are those of `deepseek-ai/dspark_qwen3_4b_block7`, `dflash_qwen3_4b_block7` and of speculators'
checkpoints, with smaller sizes.
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from blockpilot.drafts.dflash import DraftModel
from blockpilot.drafts.dflash_checkpoint import load_draft, save_draft
from blockpilot.engine.engine import Engine
from blockpilot.engine.sampling import best_choices
from blockpilot.pairs.loading import Pair, load_pair
from blockpilot.types import Request, Sampling
from helpers.dflash import SlowDFlash, slow_lift
from helpers.drafts import Proposal, proposals_of
from helpers.engines import NEVER, PROMPT, plain_text, run, text_of
from helpers.published import write_draft
from helpers.tiny import MASK_ID, byte_tokenizer, tiny_gemma4
from helpers.tiny import SHAPE as OF_TARGET

LAYERS, RANK, SLOTS = [1, 3, 4], 6, 7
NETWORK = OF_TARGET | {
    **{"num_hidden_layers": 2, "num_attention_heads": 6, "head_dim": 16, "tie_word_embeddings": False},
    **{"layer_types": ["full_attention"] * 2, "rope_theta": 1e4},
}
VOCABULARY = torch.arange(3, 260, 2)  # of a separate LM head
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": RANK, "selector_top_k": 5}


def backbone(**parts: int) -> dict[str, Tensor]:
    """Random weights of the network, by their published names, optionally with parts of DFlash 2."""
    options = {"block_size": SLOTS, "num_target_layers": 6, "target_layer_ids": LAYERS, "mask_token_id": MASK_ID}
    torch.manual_seed(3)
    weights = DraftModel(Qwen3Config(**NETWORK, dflash_config=options | parts)).state_dict()
    sizes = {name: 1.0 if name.startswith("candidate_selector.") else 0.2 for name in weights}
    return {name: torch.randn_like(value) * sizes[name] + (value.dim() == 1) for name, value in weights.items()}


def heads(num_tokens: int = 260) -> dict[str, Tensor]:
    return {
        "markov_head.markov_w1.weight": torch.randn(260, RANK),
        "markov_head.markov_w2.weight": torch.randn(num_tokens, RANK) * 0.4,
        "confidence_head.proj.weight": torch.randn(1, 48 + RANK),
        "confidence_head.proj.bias": torch.randn(1),
    }


def deepspec(directory: Path, markov: bool = True, copies: Path | None = None, **changes: Any) -> Path:
    """DeepSpec's format: DSpark, or DFlash without heads; embeddings and LM head are random or a target's."""
    config = NETWORK | {
        **{"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "attention_bias": False},
        **{"block_size": SLOTS, "num_target_layers": 6, "target_layer_ids": LAYERS, "mask_token_id": MASK_ID},
        **{"num_anchors": 512, "enable_confidence_head": markov, "markov_rank": RANK if markov else 0},
    }
    if markov:
        config |= {"markov_head_type": "vanilla", "confidence_head_with_markov": True}
    weights = backbone() | (heads() if markov else {})
    if changes.get("markov_head_type") == "gated":
        weights["markov_head.gate_proj.weight"] = torch.randn(RANK, 48 + RANK) * 0.3
        weights["markov_head.gate_proj.bias"] = torch.randn(RANK)
    for name in ("embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.randn(260, 48) * 0.5
    if copies is not None:
        target = AutoModelForCausalLM.from_pretrained(copies)
        weights["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
        weights["lm_head.weight"] = target.get_output_embeddings().weight.detach().clone()
    return write_draft(directory, config | changes, weights)


def dflash2(directory: Path, **changes: Any) -> Path:
    """Format of z-lab: one of two layers has a sliding window, and attention is not causal."""
    config = NETWORK | {
        **{"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "is_causal": False},
        **{"architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "attention_bias": False},
        **{"block_size": SLOTS, "num_target_layers": 6},
        "dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": LAYERS} | DFLASH2,
    }
    return write_draft(directory, config | changes, backbone(**DFLASH2))


def speculators(directory: Path, kind: str = "dflash", from_anchor: bool = False, **changes: Any) -> Path:
    """Speculators' format, with an LM head for half of the target's tokens."""
    config = {
        **{"architectures": ["DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel"], "dtype": "bfloat16"},
        **{"aux_hidden_state_layer_ids": [i + 1 for i in LAYERS], "block_size": SLOTS, "mask_token_id": MASK_ID},
        **{"draft_vocab_size": len(VOCABULARY), "target_hidden_size": None, "sliding_window_non_causal": False},
        **{"sample_from_anchor": from_anchor, "speculators_model_type": kind},
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "Qwen/Qwen3-8B"}},
        "transformer_layer_config": NETWORK | {"model_type": "llama" if kind == "dflash" else "qwen3"},
    }
    if kind == "dflash2":
        weights = backbone(**DFLASH2) | {"verifier_norm.weight": torch.ones(48)}
        config |= DFLASH2 | {"draft_vocab_size": 260, "architectures": ["DFlash2DraftModel"]}
        return write_draft(directory, config | changes, weights)
    if kind == "dspark":
        config |= {"markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True}
    weights = backbone() | (heads(len(VOCABULARY)) if kind == "dspark" else {})
    weights |= {"lm_head.weight": torch.randn(len(VOCABULARY), 48) * 0.5, "verifier_norm.weight": torch.ones(48)}
    weights |= {"d2t": VOCABULARY - torch.arange(len(VOCABULARY)), "t2d": torch.zeros(260, dtype=torch.bool)}
    weights["t2d"][VOCABULARY] = True
    return write_draft(directory, config | changes, weights)


SPECFORGE = {"architectures": ["DSparkDraftModel"], "dflash_config": {"projector_type": "dspark"}}
FORMATS: dict[str, Callable[[Path], Path]] = {
    "dspark": deepspec,
    "dflash block 7": lambda directory: deepspec(directory, markov=False),
    "speculators dflash": speculators,
    "speculators dspark": lambda directory: speculators(directory, "dspark"),
    "speculators dspark, from the anchor": lambda directory: speculators(directory, "dspark", True),
    "gated dspark": lambda directory: deepspec(directory, markov_head_type="gated"),
    "specforge dspark": lambda directory: deepspec(directory, **SPECFORGE),
    "dflash2": dflash2,
    "speculators dflash2": lambda directory: speculators(directory, "dflash2"),
}


def chains_of(slow: SlowDFlash, target: Any, proposal: Proposal, from_anchor: bool) -> list[list[int]]:
    """Chains that a slow network drafts after a row's accepted tokens, with its own LM head or the target's: one with
    its edges, if it has any, and one without.
    """
    w, tokens, sampling = slow.weights, proposal.tokens, proposal.request.sampling
    states = target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    features = torch.cat([states[layer + 1][0, :-1] for layer in LAYERS], dim=-1)
    embedding = w.get("embed_tokens.weight", target.get_input_embeddings().weight.double())
    target_head = target.get_output_embeddings().weight.double()
    depth = len(proposal.found.tokens)
    slots = torch.tensor([tokens[-1], *[MASK_ID] * (depth - from_anchor)])
    window = slow.config.sliding_window
    causal = getattr(slow.config, "is_causal", None) if window else None
    hidden = slow(features, embedding[slots], len(tokens) - 1, causal, window)
    ids, chains = VOCABULARY if "d2t" in w else torch.arange(260), [[tokens[-1]], [tokens[-1]]]
    for drafted, edges in zip(chains, (w, {}), strict=True):
        for i in range(depth):
            scores, slot_hidden = torch.full((1, 260), -math.inf), hidden[i if from_anchor else i + 1]
            head_scores = w.get("lm_head.weight", target_head) @ slot_hidden
            lift = slow_lift(edges, slot_hidden, drafted[-1], len(ids))
            is_selected = "candidate_selector.successor_codebook" in edges
            scores[0, ids] = (head_scores if is_selected else head_scores + lift).float()
            best = best_choices(
                scores, [len(tokens) + i], [sampling], DFLASH2["selector_top_k"] if is_selected else 1
            )
            lifted = best.scores[0].double()
            if is_selected:
                lifted += lift[best.tokens[0]] / (sampling.temperature or 1.0)
            drafted.append(int(best.tokens[0, lifted.argmax()]))
    return [drafted[1:] for drafted in chains]


def first_choices(proposal: Proposal) -> list[int]:
    """The first choice of every slot after the one above it."""
    chain, after = [], 0
    for slot, tokens in enumerate(proposal.found.tokens):
        chain.append(tokens[after][0])
        after = proposal.found.next_lists[slot][after][0]
    return chain


@pytest.mark.parametrize("name", FORMATS)
@torch.inference_mode()
def test_drafts_are_those_of_a_slow_network(name: str, tiny_pair_dirs: tuple[Path, Path], tmp_path: Path) -> None:
    check_drafts(name, tiny_pair_dirs[0], tmp_path)


@torch.inference_mode()
def test_drafts_of_speculators_embed_without_the_scale_of_a_gemma_target(tmp_path: Path) -> None:
    tiny_gemma4().save_pretrained(tmp_path / "target")
    byte_tokenizer().save_pretrained(tmp_path / "target")
    check_drafts("speculators dflash", tmp_path / "target", tmp_path)


def check_drafts(name: str, target_dir: Path, folder: Path) -> None:
    """Same chains as by a slow network, and the target's own text."""
    draft_dir = FORMATS[name](folder / "draft")
    pair = load_pair(target=target_dir, draft=draft_dir, dtype="float32")
    assert isinstance(pair.draft, DraftModel)
    from_anchor = name.endswith(("7", "anchor", "k")) and name != "speculators dspark"
    has_edges = "dspark" in name or "dflash2" in name
    assert pair.block_size == SLOTS + from_anchor
    slow = SlowDFlash(load_file(draft_dir / "model.safetensors"), pair.draft.config)
    sizes = (pair.block_size, pair.block_size - 3)
    requests = [
        Request(PROMPT[: 3 + 5 * i], 16, Sampling(6.0 * i, seed=9), size, NEVER) for i, size in enumerate(sizes)
    ]
    proposals = proposals_of(Engine(pair, num_slots=2, max_length=64), requests)
    target, num_bent = AutoModelForCausalLM.from_pretrained(target_dir), 0
    texts = {r.prompt_ids: r.prompt_ids + plain_text(pair, r.prompt_ids, 16, r.sampling) for r in requests}
    for proposal in proposals:
        assert proposal.tokens == texts[proposal.request.prompt_ids][: len(proposal.tokens)]
    (steps,) = run(Engine(pair, num_slots=1, max_length=64), [replace(requests[1], layout="tree")])
    assert requests[1].prompt_ids + text_of(steps) == texts[requests[1].prompt_ids]
    for proposal in proposals[::9]:
        by_edges, without = chains_of(slow, target, proposal, from_anchor)
        assert first_choices(proposal) == by_edges
        num_bent += by_edges != without
    assert max(len(proposal.found.tokens) for proposal in proposals) == pair.block_size - 1
    assert bool(num_bent) == has_edges


@pytest.fixture(scope="module")
def dspark(tiny_pair_dirs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Pair:
    draft = deepspec(tmp_path_factory.mktemp("dspark") / "draft")
    return load_pair(target=tiny_pair_dirs[0], draft=draft, dtype="float32")


def test_copies_of_the_targets_weights_are_given_up(
    dspark: Pair, tiny_pair_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    assert isinstance(dspark.draft, DraftModel)
    assert dspark.draft.embed_tokens is not None
    assert dspark.draft.lm_head is not None
    draft = deepspec(tmp_path / "draft", copies=tiny_pair_dirs[0])
    pair = load_pair(target=tiny_pair_dirs[0], draft=draft, dtype="float32")
    assert isinstance(pair.draft, DraftModel)
    assert pair.draft.embed_tokens is pair.draft.lm_head is pair.draft.vocabulary is None


def test_a_confidence_head_is_left_out_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_draft(deepspec(tmp_path / "draft"))
    assert [message.partition(":")[0] for message in caplog.messages] == ["the draft's confidence head is not used"]
    caplog.clear()
    load_draft(deepspec(tmp_path / "other", markov=False))
    assert not caplog.records


def test_what_is_saved_is_loaded_again(tmp_path: Path) -> None:
    for name, written in FORMATS.items():
        draft = load_draft(written(tmp_path / name))
        save_draft(draft, tmp_path / "saved", dtype=torch.float32)
        loaded = load_draft(tmp_path / "saved")
        assert loaded.options == draft.options
        assert (loaded.vocabulary is None) == (draft.vocabulary is None), name
        assert loaded.vocabulary is None or loaded.vocabulary.equal(draft.vocabulary), name
        assert loaded.state_dict().keys() == draft.state_dict().keys()
        assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in draft.state_dict().items())


@pytest.mark.parametrize(("kind", "causal"), [("dflash", False), ("dflash2", False), ("dspark", None)])
def test_windows_of_speculators_are_not_causal_unless_said(kind: str, causal: bool | None, tmp_path: Path) -> None:
    """None: in sliding-window layers. DSpark's checkpoints have no such option."""
    config = speculators(tmp_path / "draft", kind) / "config.json"
    written = json.loads(config.read_text())
    assert load_draft(tmp_path / "draft").options.causal is None  # sliding_window_non_causal: false
    del written["sliding_window_non_causal"]
    config.write_text(json.dumps(written))
    assert load_draft(tmp_path / "draft").options.causal is causal


def test_a_pickled_mask_embedding_is_refused_by_name(tmp_path: Path) -> None:
    directory = dflash2(tmp_path / "draft")
    load_draft(directory)
    torch.save(torch.ones(48), directory / "mask_embedding.pt")
    with pytest.raises(
        ValueError, match=r"draft .*: mask_embedding\.pt is pickled and not read: store .* embed_tokens"
    ):
        load_draft(directory)


@pytest.mark.parametrize(
    ("written", "changes", "message"),
    [
        (deepspec, {"markov_head_type": "rnn"}, r"markov_head_type = rnn: not supported \(only vanilla, gated\)"),
        (deepspec, {"dflash_config": {"projector_type": "domino"}}, "projector_type = domino: not supported"),
        (deepspec, {"vocab_size": 200}, "LM head of 260 tokens: d2t must lead to different ones of 0 to 199"),
        (deepspec, {"vocab_size": 300}, "LM head of 260 tokens, the target has 300: neither d2t nor t2d maps them"),
        (speculators, {"aux_hidden_state_layer_ids": None}, "lacks aux_hidden_state_layer_ids"),
        (speculators, {"shift_label": True}, "shift_label = True: not supported"),
        (speculators, {"target_hidden_size": 64}, r"target_hidden_size = 64: not supported \(only 48\)"),
        (speculators, {"architectures": ["DominoDraftModel"]}, "DominoDraftModel"),
    ],
)
def test_unsupported_checkpoints_are_refused_by_name(
    written: Any, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    directory = written(tmp_path / "draft", **changes)
    with pytest.raises(ValueError, match=f"draft .*{message}"):
        load_draft(directory)


def test_a_layer_that_the_target_does_not_have_is_refused(dspark: Pair, tmp_path: Path) -> None:
    """DeepSpec counts the embeddings as layer -1."""
    draft = load_draft(deepspec(tmp_path / "draft", target_layer_ids=[-1, 3, 4]))
    with pytest.raises(ValueError, match="draft reads target layer -1: must be 0 to 5"):
        draft.check_fit(dspark.target.config)


def test_t2d_alone_maps_a_small_head(tmp_path: Path) -> None:
    directory = speculators(tmp_path / "draft")
    weights = load_file(directory / "model.safetensors")
    expected = load_draft(directory).vocabulary
    del weights["d2t"]
    save_file(weights, directory / "model.safetensors")
    mapped = load_draft(directory).vocabulary
    assert expected is not None
    assert mapped is not None
    assert mapped.equal(expected.sort().values)


def test_a_soft_cap_must_be_the_targets(tiny_pair_dirs: tuple[Path, Path], tmp_path: Path) -> None:
    """z-lab's drafts of Gemma 4 write the target's cap."""
    tiny_gemma4().save_pretrained(tmp_path / "target")
    byte_tokenizer().save_pretrained(tmp_path / "target")
    draft = dflash2(tmp_path / "draft", final_logit_softcapping=9.0)
    assert load_pair(target=tmp_path / "target", draft=draft).has_draft
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        load_pair(target=tiny_pair_dirs[0], draft=draft)
