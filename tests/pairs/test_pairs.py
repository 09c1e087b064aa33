"""Loading pairs: the embedded one, the other families, and what is refused."""

import hashlib
import json
import multiprocessing
import re
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from blockpilot.drafts.checkpoint import new_draft_config, save_draft
from blockpilot.drafts.dflash import DraftModel
from blockpilot.drafts.eagle3_checkpoint import save_eagle3
from blockpilot.engine.generate import generate
from blockpilot.models.decoder import Decoder
from blockpilot.models.native_layers import NativeLayers
from blockpilot.pairs import checkpoints, embedded
from blockpilot.pairs.checkpoints import directory_revision, known_revision
from blockpilot.pairs.embedded import converted
from blockpilot.pairs.loading import Pair, load_pair, with_draft
from blockpilot.pairs.table import (
    EMBEDDED_TARGET,
    NAMED_PAIRS,
    check_pair_names,
    no_draft_message,
    split_revision,
    target_slug,
)
from blockpilot.types import Sampling
from helpers.eagle3 import random_eagle3
from helpers.engines import NEVER, PROMPT, plain_text, text_of
from helpers.patience import patient
from helpers.tiny import MASK_ID, byte_tokenizer, tiny_draft, tiny_target

SMALL = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "eos_token_id": 257,
}
OF_FAMILY: dict[str, dict[str, int]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}


def save_pair(model: PreTrainedModel, directory: Path) -> dict[str, str]:
    """Write target and a fresh draft; returns the arguments of load_pair."""
    model.save_pretrained(directory / "target")
    byte_tokenizer().save_pretrained(directory / "target")
    config = new_draft_config(model.config, num_layers=2, block_size=4, mask_token_id=MASK_ID)
    save_draft(DraftModel(config), directory / "draft", dtype=torch.float32)
    return {"target": str(directory / "target"), "draft": str(directory / "draft")}


@pytest.mark.parametrize("family", OF_FAMILY)
def test_families_load_and_decode_exactly(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL, **OF_FAMILY[family])).eval()
    pair = load_pair(**save_pair(model, tmp_path), dtype="float32")
    prompt = torch.randint(0, 250, (1, 9))
    expected = model.generate(prompt, max_new_tokens=16, do_sample=False)[0, 9:].tolist()
    for block_size in (1, 3, 8):
        steps = generate(pair, prompt[0].tolist(), block_size=block_size, max_new_tokens=16)
        assert [t for step in steps for t in step.tokens] == expected


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


# --- conversion from GGUF ---


def write_gguf(model: LlamaForCausalLM, path: Path) -> None:
    """As llama.cpp writes a llama: its own names, and rotary halves interleaved in q and k."""
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<pad>", "<eos>", "<mask>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*alphabet, *specials, "ab"])
    writer.add_token_types([1] * 256 + [3] * 3 + [1])
    writer.add_token_merges(["a b"])
    for add, token in [
        (writer.add_bos_token_id, 257),
        (writer.add_eos_token_id, 257),
        (writer.add_unk_token_id, 256),
        (writer.add_pad_token_id, 256),
    ]:
        add(token)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    names = {v: k for k, v in embedded._GGUF_NAMES.items()}
    names |= {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            layer, part = stem.removeprefix("model.layers.").split(".", 1)
            kind = names[part]
            if kind in heads:
                rows, columns = weight.shape
                weight = weight.view(heads[kind], 2, -1, columns).transpose(1, 2).reshape(rows, columns)
            stem = f"blk.{layer}.{kind}"
        else:
            stem = names[stem]
        writer.add_tensor(f"{stem}.weight", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_conversion_gives_the_same_model(tmp_path: Path) -> None:
    model = tiny_target().eval()
    write_gguf(model, tmp_path / "tiny.gguf")
    again = LlamaForCausalLM.from_pretrained(
        converted(tmp_path / "tiny.gguf", tmp_path / "cache", sha256(tmp_path / "tiny.gguf"))
    )
    tokens = torch.arange(20)[None]
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def _convert(gguf_file: str, cache_dir: str, queue: "multiprocessing.Queue[str]") -> None:
    queue.put(str(converted(Path(gguf_file), Path(cache_dir), sha256(Path(gguf_file)))))


def test_two_processes_convert_at_once(tmp_path: Path) -> None:
    write_gguf(tiny_target(), tmp_path / "tiny.gguf")
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[str] = context.Queue()
    arguments = (str(tmp_path / "tiny.gguf"), str(tmp_path / "cache"), queue)
    workers = [context.Process(target=_convert, args=arguments) for _ in range(4)]
    for worker in workers:
        worker.start()
    found = {queue.get(timeout=patient(60)) for _ in workers}
    for worker in workers:
        worker.join()
    [directory] = found
    assert [e.name for e in (tmp_path / "cache").iterdir()] == [Path(directory).name]  # nothing half-written stays
    assert LlamaForCausalLM.from_pretrained(directory).config.vocab_size == 260


def test_a_killed_conversion_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    write_gguf(tiny_target(), tmp_path / "tiny.gguf")
    (tmp_path / ".converting-killed").mkdir()
    (tmp_path / ".converting-killed" / "config.json").write_text("{")
    directory = converted(tmp_path / "tiny.gguf", tmp_path, sha256(tmp_path / "tiny.gguf"))
    assert json.loads((directory / "config.json").read_text())["model_type"] == "llama"


def test_a_damaged_gguf_is_refused_and_not_converted(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(tiny_target(), file)
    expected = sha256(file)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"checksum {sha256(file)}, expected {expected}"):
        converted(file, tmp_path / "cache", expected)
    assert not (tmp_path / "cache").exists()


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


def test_missing_models_are_named(tiny_pair_dirs: tuple[Path, Path]) -> None:
    target, draft = map(str, tiny_pair_dirs)
    with pytest.raises(ValueError, match="target '/nowhere'"):
        load_pair(target="/nowhere", draft=draft)
    with pytest.raises(ValueError, match="draft 'no/where'"):
        load_pair(target=target, draft="no/where")
    with pytest.raises(ValueError, match="dtype 'float8'"):
        load_pair(target=target, draft=draft, dtype="float8")


def test_an_unsupported_family_is_refused(tmp_path: Path, tiny_pair_dirs: tuple[Path, Path]) -> None:
    Qwen2ForCausalLM(Qwen2Config(**SMALL)).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="target family 'qwen2': supported are llama, qwen3, qwen3_moe"):
        load_pair(target=str(tmp_path), draft=str(tiny_pair_dirs[1]), dtype="float32")


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


def test_a_revision_changes_with_the_weights(tmp_path: Path) -> None:
    draft = tiny_draft(tiny_target())
    save_draft(draft, tmp_path)
    before = directory_revision(tmp_path)
    with torch.no_grad():
        draft.norm.weight[0] += 1
    save_draft(draft, tmp_path)
    assert directory_revision(tmp_path) != before


@pytest.mark.parametrize(
    "name", ["model-00002-of-00003.safetensors", "tokenizer.json", "generation_config.json", "chat_template.jinja"]
)
def test_a_revision_is_of_every_byte_that_is_loaded(name: str, tmp_path: Path) -> None:
    for other in ("config.json", "model-00001-of-00003.safetensors", "notes.md", name):
        (tmp_path / other).write_bytes(bytes(5 * 2**20))
    before = directory_revision(tmp_path)
    (tmp_path / "notes.md").write_bytes(b"not loaded")
    assert directory_revision(tmp_path) == before
    with (tmp_path / name).open("r+b") as file:
        file.seek(5 * 2**19)  # neither at the start nor at the end
        file.write(b"x")
    assert directory_revision(tmp_path) != before


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


def test_hub_ids_are_pinned_by_a_revision(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_pair_dirs: tuple[Path, Path]
) -> None:
    asked = []

    def download(repository: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repository, revision))
        assert not any(Path(name).match(pattern) for pattern in allow_patterns for name in ("x.py", "x.bin", "x.pt"))
        commit = tmp_path / repository.replace("/", "-") / "0123abcd"
        shutil.copytree(tiny_pair_dirs[len(asked) == 1], commit)
        return str(commit)

    monkeypatch.setattr(checkpoints, "snapshot_download", download)
    pair = load_pair(target="some/target@v1.0", draft="some/draft", dtype="float32")
    assert asked == [("some/draft", None), ("some/target", "v1.0")]
    assert pair.id == ("some/target", "0123abcd", "some/draft", "0123abcd")


def test_a_driver_knows_revisions_without_a_download(tiny_pair_dirs: tuple[Path, Path]) -> None:
    directory = str(tiny_pair_dirs[0])
    assert known_revision("target", directory) == directory_revision(tiny_pair_dirs[0])
    assert known_revision("target", EMBEDDED_TARGET) == embedded.GGUF_SHA256[:16]
    assert known_revision("target", "some/target") is None
    assert known_revision("draft", "some/draft@v2") == "v2"


def test_paths_have_no_pinned_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert split_revision("/models/a@b") == ("/models/a@b", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model@2").mkdir()
    assert split_revision("model@2") == ("model@2", None)


@pytest.mark.parametrize(
    ("target", "slug"),
    [
        ("Qwen/Qwen3-4B@1cfa9a7208912126459214e8b04321603b3df60c", "qwen3-4b"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m-instruct"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b-instruct"),
        ("/models/My Model", "my-model"),
        ("/models/1.5", "1.5"),
    ],
)
def test_slugs(target: str, slug: str) -> None:
    assert target_slug(target) == slug


def test_names_of_other_alphabets_have_slugs_of_their_own() -> None:
    """Names of registered models and of deployments: distinct, and the same in every spelling of Unicode."""
    names = [
        "模型/千问",
        "模型/文心",
        "别的/千问",
        "千问-7B",
        "文心-7B",
        "Größe 7B",
        "Модель",
        "/models/モデル",
        ".",
        "x/...",
        "x/_",
    ]
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
    assert with_draft(pair, draft).id == pair.id
    assert load_pair(target=target, dtype=dtype).target.dtype == torch.bfloat16
    for wrong in ({"dtype": torch.float16}, {"device": "gpu"}):
        with pytest.raises(ValueError, match="must be one of"):
            load_pair(target=target, draft=draft, **wrong)


@pytest.mark.parametrize(("instructions", "dtype"), [("avx512_bf16", "bfloat16"), ("avx2", "float32")])
def test_by_default_a_pair_has_the_fastest_dtype_that_is_exact_here(
    instructions: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {instructions: True})
    pair = load_pair("smollm2-135m")
    assert pair.target.dtype == pair.draft.dtype == getattr(torch, dtype)
    assert isinstance(Decoder(pair.target)._layers, NativeLayers)


def test_named_pairs_are_the_published_ones() -> None:
    assert NAMED_PAIRS["qwen3-4b"] == ("Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16")


# --- drafts of other families ---


def test_an_eagle3_draft_is_loaded_by_its_architecture(tiny_pair_dirs: tuple[Path, Path], tmp_path: Path) -> None:
    draft = random_eagle3(tiny_target().config, torch.arange(5, 105), block_size=6)
    save_eagle3(draft, tmp_path, dtype=torch.float32)
    pair = load_pair(target=str(tiny_pair_dirs[0]), draft=str(tmp_path), dtype="float32")
    assert (pair.block_size, pair.layer_ids, pair.draft.context_size) == (6, (0, 2, 4), 48)
    assert pair.prepared_draft.head.subset is not None
    assert pair.prepared_draft.head.subset.tokens.tolist() == list(range(5, 105))
    steps = list(generate(pair, PROMPT, max_new_tokens=12, stop_token_ids=NEVER, block_size=6))
    assert text_of(steps) == plain_text(pair, PROMPT, 12, Sampling())
    assert steps[1].block_size == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["EagleModel"]},
            r"architecture \['EagleModel'\]: supported are DFlashDraftModel, DFlash2DraftModel, Qwen3DSparkModel, ",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 7], "eagle_config": {}}, "reads target layer 6: must be 0 to 5"),
    ],
)
def test_other_drafts_are_refused_by_name(
    changes: dict[str, object], message: str, tiny_pair_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    save_eagle3(random_eagle3(tiny_target().config, torch.arange(100)), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=f"draft .*{message}"):
        load_pair(target=str(tiny_pair_dirs[0]), draft=str(tmp_path), dtype="float32")


def test_an_eagle3_draft_fits_its_target_or_is_refused(tiny_pair_dirs: tuple[Path, Path], tmp_path: Path) -> None:
    config = tiny_target().config
    config.vocab_size = 300
    save_eagle3(random_eagle3(config, torch.arange(100)), tmp_path / "larger")
    config.vocab_size = 260
    save_eagle3(random_eagle3(config, torch.arange(7)), tmp_path / "few")
    for name, message in (
        ("larger", "draft does not fit target: vocabulary 300, the target's is 260"),
        ("few", "draft_vocab_size 7: must be at least 8"),
    ):
        with pytest.raises(ValueError, match=message):
            load_pair(target=str(tiny_pair_dirs[0]), draft=str(tmp_path / name), dtype="float32")
