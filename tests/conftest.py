"""A tiny random pair, in memory and on disk, for tests that need every code path but no language."""

import os
import secrets

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # in this process and those that it starts
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import torch
from hypothesis import settings
from transformers import PreTrainedModel

from blockpilot.drafts.dflash_checkpoint import save_draft
from blockpilot.native import library
from blockpilot.pairs.loading import Pair, load_pair
from helpers.eagle3 import eagle3_pair
from helpers.tiny import (
    DFLASH2,
    byte_tokenizer,
    tiny_draft,
    tiny_gemma,
    tiny_gemma4_of_all_parts,
    tiny_gpt_oss,
    tiny_hybrid,
    tiny_hybrid_mixture,
    tiny_target,
)

settings.register_profile("blockpilot", deadline=None)  # a busy machine is slow, not wrong
settings.load_profile("blockpilot")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Jobs first, those with most Ray clusters before others: they mostly wait, and would run alone at the end."""
    num_clusters = Counter(item.path for item in items if item.get_closest_marker("ray"))
    items.sort(key=lambda item: (not {"jobs", "workflows"} & {*item.path.parts[-4:-1]}, -num_clusters[item.path]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Seconds by file, where CI is set."""
    if not os.environ.get("CI"):
        return
    seconds = Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration  # type: ignore[assignment]
    terminalreporter.section(f"seconds by file, {sum(seconds.values()):.0f} in all")
    for file, of_file in seconds.most_common():
        terminalreporter.write_line(f"{of_file:8.1f} {file}")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def without_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a compiler."""
    monkeypatch.setattr(library, "_library", lambda dtype: "no C compiler")


@pytest.fixture(params=["C", "torch"])
def in_c(request: pytest.FixtureRequest) -> bool:
    """True for layers in C, where they can be, then False for layers by torch."""
    if request.param == "torch":
        request.getfixturevalue("without_c")
    elif library.library_for(torch.float32, torch.device("cpu")) is None:
        pytest.skip("no compiler, or no CPU for it")
    return bool(request.param == "C")


@pytest.fixture(autouse=True)
def _no_ray_is_left() -> Iterator[None]:
    """A test that joined a cluster in this process leaves it, so that the next can tell whether it started one."""
    yield
    ray.shutdown()


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
    return load_pair(target=str(target), draft=str(draft), dtype="float32")


@pytest.fixture(scope="session")
def gemma_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A random Gemma 3 with sliding-window layers, and a random draft for it."""
    root, target = tmp_path_factory.mktemp("gemma"), tiny_gemma()
    target.save_pretrained(root / "target")
    byte_tokenizer().save_pretrained(root / "target")
    save_draft(tiny_draft(target), root / "draft", dtype=torch.float32)
    return load_pair(target=root / "target", draft=root / "draft", dtype="float32")


@pytest.fixture(scope="session")
def markov_pair(tiny_pair: Pair) -> Pair:
    """The tiny pair with a draft that has a random Markov head."""
    draft = tiny_draft(tiny_target(), markov_rank=6).eval().requires_grad_(False)
    return replace(tiny_pair, draft=draft)


@pytest.fixture(scope="session")
def gated_pair(tiny_pair: Pair) -> Pair:
    """The tiny pair with a draft that has a random gated Markov head."""
    draft = tiny_draft(tiny_target(), markov_rank=6, markov_head_type="gated").eval().requires_grad_(False)
    return replace(tiny_pair, draft=draft)


@pytest.fixture(scope="session")
def dflash2_pair(tiny_pair: Pair) -> Pair:
    """The tiny pair with a draft that has random convolutions and a random candidate selector (DFlash 2)."""
    draft = tiny_draft(tiny_target(), **DFLASH2).eval().requires_grad_(False)
    return replace(tiny_pair, draft=draft)


@pytest.fixture(scope="session")
def eagle_pair(tiny_pair: Pair) -> Pair:
    """The tiny target with a random EAGLE-3 draft, which proposes two of three tokens."""
    vocabulary = torch.randperm(260, generator=torch.Generator().manual_seed(0))[:174]
    return eagle3_pair(tiny_pair, tiny_target(), vocabulary)


def with_random_draft(pair: Pair, target: PreTrainedModel) -> Pair:
    """The pair with another target and a random draft for it."""
    draft = tiny_draft(target).eval().requires_grad_(False)
    return replace(pair, target=target.eval().requires_grad_(False), draft=draft)


@pytest.fixture(scope="session")
def hybrid_pair(tiny_pair: Pair) -> Pair:
    """A random Qwen3.5, most of whose layers keep a state, with a random draft."""
    return with_random_draft(tiny_pair, tiny_hybrid())


@pytest.fixture(scope="session")
def hybrid_mixture_pair(tiny_pair: Pair) -> Pair:
    """As `hybrid_pair`, with a Qwen3.5-MoE."""
    return with_random_draft(tiny_pair, tiny_hybrid_mixture())


@pytest.fixture(scope="session")
def gpt_oss_pair(tiny_pair: Pair) -> Pair:
    """A random gpt-oss, with sinks, windows and experts, and a random draft."""
    return with_random_draft(tiny_pair, tiny_gpt_oss())


@pytest.fixture(scope="session")
def gemma4_pair(tiny_pair: Pair) -> Pair:
    """A random Gemma 4 with all that published ones have, and a random draft."""
    return with_random_draft(tiny_pair, tiny_gemma4_of_all_parts())


@pytest.fixture(scope="session")
def embedded_pair() -> Pair:
    """SmolLM2-135M-Instruct with its draft, fp32."""
    return load_pair("smollm2-135m", dtype="float32")
