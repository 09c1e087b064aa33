"""Loading pairs: the embedded one, names and revisions, dtypes, and what is refused."""

import json
import re
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from blockpilot.drafts.dflash import DraftModel
from blockpilot.drafts.dflash_checkpoint import save_draft
from blockpilot.drafts.eagle3_checkpoint import save_eagle3
from blockpilot.engine.engine import Engine
from blockpilot.engine.generate import generate
from blockpilot.models.decoder import UNSUPPORTED, Decoder
from blockpilot.models.native_layers import NativeLayers
from blockpilot.pairs.loading import Pair, load_pair, with_draft
from blockpilot.pairs.table import (
    NAMED_PAIRS,
    REVISIONS,
    check_pair_names,
    no_draft_message,
    split_revision,
    target_slug,
)
from helpers.eagle3 import random_eagle3
from helpers.engines import PROMPT
from helpers.tiny import (
    byte_tokenizer,
    tiny_draft,
    tiny_gemma,
    tiny_gemma4_of_all_parts,
    tiny_gpt_oss,
    tiny_hybrid,
    tiny_hybrid_mixture,
    tiny_target,
)


def test_the_embedded_target_is_smollm2(embedded_pair: Pair) -> None:
    assert embedded_pair.vocab_size == 49152
    assert embedded_pair.stop_token_ids == {2}
    assert embedded_pair.id.target == "HuggingFaceTB/SmolLM2-135M-Instruct"
    ids = embedded_pair.tokenizer("In 2024, it cost $15.", add_special_tokens=False)["input_ids"]
    pieces = [embedded_pair.tokenizer.decode([i]) for i in ids]
    assert pieces == ["In", " ", "2", "0", "2", "4", ",", " it", " cost", " $", "1", "5", "."]
    prompt = embedded_pair.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
        add_generation_prompt=True,
        return_dict=False,
    )
    tokens = [t for step in generate(embedded_pair, prompt, max_new_tokens=16) for t in step.tokens]
    assert "Paris" in embedded_pair.tokenizer.decode(tokens)


# --- names ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nope", None, None), "unknown pair 'nope': named pairs are smollm2-135m"),
        (("smollm2-135m", "x", None), "give a name, or both models"),
        ((None, None, "x"), "target None and draft 'x': a target is needed"),
        ((None, None, None), "a target is needed"),
        ((None, "x", ""), "draft ''"),
    ],
)
def test_bad_names_are_refused(arguments: tuple[str | None, str | None, str | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_pair_names(*arguments)
    check_pair_names(None, "x", None)


@pytest.mark.parametrize(("target", "named"), [("Qwen/Qwen3-4B@main", "--pair qwen3-4b has one"), ("x", "--draft")])
def test_a_missing_draft_is_named(target: str, named: str) -> None:
    message = no_draft_message(target, "a sweep")
    assert message.startswith(f"target '{target}' has no draft, a sweep needs one: {named}")
    assert message.endswith("without one there is plain decoding plus what is looked up in each text")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "/nowhere"}, "target '/nowhere': neither"),
        ({"draft": "no/where"}, "draft 'no/where'"),
        ({"dtype": "float8"}, "dtype 'float8': must be one of float32, bfloat16"),
        ({"device": "gpu"}, "device 'gpu': must be one of cpu"),
    ],
)
def test_what_cannot_be_loaded_is_named(
    changes: dict[str, Any], message: str, tiny_pair_dirs: tuple[Path, Path]
) -> None:
    target, draft = tiny_pair_dirs
    with pytest.raises(ValueError, match=message):
        load_pair(**{"target": target, "draft": draft} | changes)


def test_an_unsupported_family_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("olmo2", **sizes, vocab_size=260, num_hidden_layers=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(
        ValueError,
        match="target family 'olmo2': supported are llama, mistral, ministral, qwen2, qwen3, qwen3_moe, qwen3_5, "
        "qwen3_5_moe, qwen3_5_text, qwen3_5_moe_text, gemma3, gemma3_text, gemma4, gemma4_text, gpt_oss",
    ):
        load_pair(target=tmp_path, dtype="float32")


@pytest.mark.parametrize("family", UNSUPPORTED)
def test_a_family_that_people_ask_for_is_refused_with_the_reason(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(ValueError, match=re.escape(f"target family '{family}' ({UNSUPPORTED[family]}): supported")):
        load_pair(target=tmp_path, dtype="float32")


@pytest.mark.parametrize(
    ("family", "text_model"),
    [
        *(("qwen3_5", tiny_hybrid), ("qwen3_5_moe", tiny_hybrid_mixture)),
        *(("gemma3", tiny_gemma), ("gemma4", tiny_gemma4_of_all_parts)),
    ],
)
def test_a_checkpoint_that_also_reads_images_loads_its_language_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, text_model: Any
) -> None:
    """Logits equal those of the whole model for a text; the log names the parts that are left out."""
    text, parts = text_model().config.to_dict(), dict[str, Any]()
    vision = {"hidden_size": 16, "intermediate_size": 16}
    if family == "gemma4":
        vision |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
        parts = {"audio_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}}
        parts["audio_config"] |= {"output_proj_dims": 16}
    elif family == "gemma3":
        vision |= {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    else:
        vision |= {"depth": 1, "num_heads": 2, "out_hidden_size": 48}
    parts |= {"text_config": text, "vision_config": vision, "tie_word_embeddings": True}
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(AutoConfig.for_model(family, **parts)).eval()
    whole.save_pretrained(tmp_path)
    if family == "gemma4":  # head sizes in the published form
        stored = json.loads((tmp_path / "config.json").read_text())
        assert set(stored["text_config"].pop("per_layer_config")) == {"1", "3"}
        stored["text_config"] |= {"global_head_dim": 24, "num_global_key_value_heads": 1}
        (tmp_path / "config.json").write_text(json.dumps(stored))
    byte_tokenizer().save_pretrained(tmp_path)
    with caplog.at_level("INFO"):
        pair = load_pair(target=tmp_path, dtype="float32")
    assert "only its language model is loaded, no vision or audio part" in caplog.text
    tokens = torch.tensor([PROMPT])
    with torch.inference_mode():
        torch.testing.assert_close(pair.target(tokens).logits, whole(tokens).logits)
    engine = Engine(pair, num_slots=1, max_length=64, prefix_tokens=64)
    has_states = family.startswith("qwen")
    assert ("prefix_tokens 64: prefix cache off, the target has recurrent states" in caplog.text) == has_states
    assert list(engine.switched_off) == (["prefix cache", "CUDA graphs"] if has_states else [])
    assert pair.vocab_size == 260


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_of_four_bits_are_their_numbers(tmp_path: Path, dtype: str) -> None:
    """MXFP4 of the published gpt-oss: 32 numbers of 4 bits, even ones in a byte's low half, share a power of two."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "tie_word_embeddings": False}
    model, numbers = tiny_gpt_oss(**sizes).eval(), torch.tensor([*FP4, *(-number for number in FP4)])
    tensors = dict[str, Tensor]()
    for name, weight in model.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = weight.clone()
            continue
        num, inputs, outputs = weight.shape
        halves = torch.randint(16, (num, outputs, inputs // 32, 32))
        powers = torch.randint(120, 127, (num, outputs, inputs // 32))
        tensors[f"{name}_blocks"] = (halves[..., ::2] + 16 * halves[..., 1::2]).byte()
        tensors[f"{name}_scales"] = powers.byte()
        weight.copy_((numbers[halves] * 2.0 ** (powers - 127)[..., None]).flatten(-2).mT)
    model.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (tmp_path / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save_pretrained(tmp_path)
    loaded = load_pair(target=tmp_path, dtype=dtype).target.state_dict()
    assert loaded.keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert loaded[name].equal(weight.to(loaded[name].dtype)), name


def test_a_checkpoint_without_all_weights_is_refused(tmp_path: Path, tiny_pair_dirs: tuple[Path, Path]) -> None:
    """Missing weights are an error; transformers would initialize them randomly."""
    shutil.copytree(tiny_pair_dirs[0], tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"], tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    message = r"target '.*': 2 of its weights are not in its files, such as model\.layers\.3\.mlp\.up_proj\.weight"
    with pytest.raises(ValueError, match=message):
        load_pair(target=tmp_path, dtype="float32")


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("model.layers.3.self_attn.q_proj.bias", True),  # attention_bias is missing in config.json
        ("model.layers.6.mlp.up_proj.weight", True),  # num_hidden_layers is too small
        ("model.layers.3.self_attn.rotary_emb.inv_freq", False),  # of old checkpoints, computed here
        ("vision_tower.layers.0.weight", False),
    ],
)
def test_weights_of_layers_that_the_network_does_not_have_are_refused(
    name: str, refused: bool, tmp_path: Path, tiny_pair_dirs: tuple[Path, Path]
) -> None:
    """transformers would only report them, and compute something else than the checkpoint's network."""
    shutil.copytree(tiny_pair_dirs[0], tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors") | {name: torch.zeros(48)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    if not refused:
        assert load_pair(target=tmp_path, dtype="float32").target
        return
    message = f"target '.*': 1 weights of its layers are not in the network of its config.json, such as {name}"
    with pytest.raises(ValueError, match=message):
        load_pair(target=tmp_path, dtype="float32")


@pytest.mark.parametrize("sign", ["hf_quant_config.json", "compression_config", "weight_scale", "weight_scale_inv"])
def test_quantised_weights_are_refused_wherever_files_say_so(
    sign: str, tmp_path: Path, tiny_pair_dirs: tuple[Path, Path]
) -> None:
    """Without a `quantization_config` transformers would cast the stored numbers, and ignore their scales."""
    shutil.copytree(tiny_pair_dirs[0], tmp_path, dirs_exist_ok=True)
    name = "model.layers.3.mlp.up_proj.weight"
    tensors = load_file(tmp_path / "model.safetensors")
    scale = tensors[name].abs().max() / 448
    tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
    if sign.startswith("weight"):
        tensors[name.replace("weight", sign)] = scale
    elif sign.endswith(".json"):
        (tmp_path / sign).write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    else:
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {sign: {"format": "float-quantized"}}))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"target .*: quantised weights.*{sign}.*: not supported"):
        load_pair(target=tmp_path, dtype="float32")


@pytest.mark.parametrize("is_alone", [True, False])
def test_an_adapter_is_refused_by_name(is_alone: bool, tmp_path: Path, tiny_pair_dirs: tuple[Path, Path]) -> None:
    """A PEFT adapter's directory may have the model's config.json, too."""
    if not is_alone:
        shutil.copytree(tiny_pair_dirs[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(ValueError, match=r"target .*: a PEFT adapter: merge it into the model first"):
        load_pair(target=tmp_path, dtype="float32")


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_gemma3_loads_under_both_names_of_its_language_model(prefix: str, tmp_path: Path) -> None:
    model = tiny_gemma()
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("model.", prefix, 1): weight for name, weight in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = load_pair(target=tmp_path, dtype="float32").target.state_dict()
    assert all(loaded[name].equal(weight) for name, weight in tensors.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 96, "head_dim": 12}, "hidden size 96, the target's is 48"),
        ({"vocab_size": 300}, "vocabulary 300, the target's is 260"),
        ({"num_target_layers": 7}, "number of target layers 7, the target's is 6"),
        ({"dflash_config": {"mask_token_id": 258, "target_layer_ids": [1, 6]}}, "target layer 6: must be 0 to 5"),
        ({"dflash_config": {"mask_token_id": 260, "target_layer_ids": [1, 2]}}, "mask token 260: must be 0 to 259"),
    ],
)
def test_a_draft_that_does_not_fit_is_refused(
    change: dict[str, object], message: str, tmp_path: Path, tiny_pair_dirs: tuple[Path, Path]
) -> None:
    config = tiny_draft(tiny_target()).config
    for name, value in change.items():
        setattr(config, name, value)
    save_draft(DraftModel(config), tmp_path)
    with pytest.raises(ValueError, match=message):
        load_pair(target=str(tiny_pair_dirs[0]), draft=str(tmp_path), dtype="float32")


def test_pickled_weights_are_refused(tmp_path: Path, tiny_pair_dirs: tuple[Path, Path]) -> None:
    shutil.copytree(tiny_pair_dirs[0], tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"target .*safetensors"):
        load_pair(target=str(tmp_path), draft=str(tiny_pair_dirs[1]), dtype="float32")


def test_code_of_a_checkpoint_never_runs(tmp_path: Path, tiny_pair_dirs: tuple[Path, Path]) -> None:
    ran = tmp_path / "ran"
    target = tmp_path / "target"
    shutil.copytree(tiny_pair_dirs[0], target)
    (target / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass EvilConfig: pass\n")
    config = json.loads((target / "config.json").read_text())
    classes = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilConfig"}
    (target / "config.json").write_text(json.dumps(config | {"model_type": "evil", "auto_map": classes}))
    with pytest.raises(ValueError, match="evil"):
        load_pair(target=str(target), draft=str(tiny_pair_dirs[1]), dtype="float32")
    assert not ran.exists()


def test_revisions_are_commits_of_models_that_have_a_name() -> None:
    names = {split_revision(model)[0] for pair in NAMED_PAIRS.values() for model in pair if model is not None}
    assert REVISIONS.keys() < names
    assert all(re.fullmatch("[0-9a-f]{40}", revision) for revision in REVISIONS.values())


def test_slugs_are_the_lower_case_last_part_of_a_name() -> None:
    assert target_slug("Qwen/Qwen3-4B@1cfa9a7208912126459214e8b04321603b3df60c") == "qwen3-4b"
    assert target_slug("meta-llama/Llama-3.1-8B-Instruct") == "llama-3.1-8b-instruct"
    assert target_slug("/models/My Model") == "my-model"
    assert target_slug("/models/1.5") == "1.5"


def test_names_of_other_alphabets_have_different_slugs() -> None:
    """Slugs, which name registered models and deployments, are distinct and the same in NFC and NFD."""
    names = ["模型/千问", "模型/文心", "别的/千问", "千问-7B", "文心-7B", "Größe 7B", "Модель", "/models/モデル"]
    names += [".", "x/...", "x/_"]
    slugs = [target_slug(name) for name in names]
    assert len({*slugs}) == len(names)
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9.-]*[a-z0-9]", slug) for slug in slugs)
    assert all(target_slug(unicodedata.normalize("NFD", name)) == target_slug(name) for name in names)
    assert target_slug("千问-7B@main") == target_slug("千问-7B") != target_slug("7B")


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_a_pair_is_loaded_from_paths_in_torchs_dtype(dtype: Any, tiny_pair_dirs: tuple[Path, Path]) -> None:
    target, draft = tiny_pair_dirs
    pair = load_pair(target=target, draft=draft, dtype=dtype, device=torch.device("cpu"))
    assert pair.target.dtype == pair.draft.dtype == torch.bfloat16
    assert pair.id.target == str(target)
    assert with_draft(pair, draft).id == with_draft(pair, f"{draft}/").id == pair.id
    assert load_pair(target=f"{target}/./", draft=f"{draft}//", dtype=dtype).id == pair.id
    assert load_pair(target=target, dtype=dtype).target.dtype == torch.bfloat16


def test_by_default_a_pair_has_the_fastest_dtype_that_is_exact_here(
    in_c: bool, tiny_pair_dirs: tuple[Path, Path]
) -> None:
    target, draft = tiny_pair_dirs
    pair = load_pair(target=target, draft=draft)
    assert pair.target.dtype == pair.draft.dtype == (torch.bfloat16 if in_c else torch.float32)
    assert isinstance(Decoder(pair.target)._layers, NativeLayers) == in_c


# --- drafts of other families ---


@pytest.mark.parametrize(
    ("num_tokens", "changes", "message"),
    [
        (100, {"architectures": ["EagleModel"]}, r"architecture \['EagleModel'\]: supported are DFlashDraftModel, "),
        (
            *(100, {"eagle_aux_hidden_state_layer_ids": [1, 3, 7], "eagle_config": {}}),
            "reads target layer 6: must be 0 to 5",
        ),
        (7, {}, "draft_vocab_size 7: must be at least 8"),
    ],
)
def test_an_eagle3_draft_that_does_not_fit_is_refused(
    num_tokens: int, changes: dict[str, Any], message: str, tiny_pair_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    save_eagle3(random_eagle3(tiny_target().config, torch.arange(num_tokens)), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=message):
        load_pair(target=tiny_pair_dirs[0], draft=tmp_path, dtype="float32")
