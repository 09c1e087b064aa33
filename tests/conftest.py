"""A tiny random pair, in memory and on disk, for tests that need every code path but no language."""

import os
import subprocess
import sys

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from blockpilot.drafts.dflash import DraftModel, new_draft_config, save_draft
from blockpilot.pairs.loading import Pair, load_pair

MASK_ID, EOS_ID = 258, 257
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_ray_is_left() -> Iterator[None]:
    """A test that joined a cluster in this process leaves it, so that the next can tell whether it started one."""
    yield
    ray.shutdown()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens 0..255, then <pad>, <eos>, <mask>, <unused>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    vocab |= {"<pad>": 256, "<eos>": EOS_ID, "<mask>": MASK_ID, "<unused>": 259}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<pad>", "<eos>", "<mask>", "<unused>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", chat_template=CHAT_TEMPLATE
    )


def tiny_target(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=256,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config)


def tiny_draft(target: LlamaForCausalLM, block_size: int = 4, seed: int = 1) -> DraftModel:
    torch.manual_seed(seed)
    config = new_draft_config(target.config, num_layers=2, block_size=block_size, mask_token_id=MASK_ID)
    return DraftModel(config)


@pytest.fixture(scope="session")
def tiny_pair_dirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(target directory, draft directory) of the tiny pair, as `load_pair(target=, draft=)` takes them."""
    root = tmp_path_factory.mktemp("tiny")
    target = tiny_target()
    target.save_pretrained(root / "target")
    byte_tokenizer().save_pretrained(root / "target")
    save_draft(tiny_draft(target), root / "draft", dtype=torch.float32)
    return root / "target", root / "draft"


@pytest.fixture(scope="session")
def tiny_pair(tiny_pair_dirs: tuple[Path, Path]) -> Pair:
    target, draft = tiny_pair_dirs
    return load_pair(target=str(target), draft=str(draft))


@pytest.fixture(scope="session")
def embedded_pair() -> Pair:
    """SmolLM2-135M-Instruct with its draft, fp32."""
    return load_pair("smollm2-135m")


# --- an MLflow store ---

CREATE = """
import sys
from jobs.common.registry import Registry
with Registry.open(sys.argv[1]).log_run("run", experiment="create") as run:
    run.log_metrics({"x": 1.0})
"""
NUM_CREATORS = 2


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new sqlite store, made by several processes at once; a copy of it costs nothing."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    command = [sys.executable, "-c", CREATE, f"sqlite:///{path}"]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(NUM_CREATORS)]
    errors = [process.communicate(timeout=200)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * NUM_CREATORS, errors
    return path
