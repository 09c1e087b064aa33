"""Fixtures: tiny random pairs of target and draft, for tests that need every code path but no real language."""

import os
import secrets

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # in this process and those that it starts
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_worker_niceness", "0")  # at Ray's default, 15, workers starve next to other tests

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

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

settings.register_profile("blockpilot", deadline=None)  # a busy machine may exceed any deadline
settings.load_profile("blockpilot")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort jobs and workflows first, by Ray tests in the file: they mostly wait, and would run alone at the end."""
    num_clusters = Counter(item.path for item in items if item.get_closest_marker("ray"))
    items.sort(key=lambda item: (not {"jobs", "workflows"} & {*item.path.parts[-4:-1]}, -num_clusters[item.path]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the seconds of every test file, if CI is set."""
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
    """Machine without a C compiler: layers run by torch."""
    monkeypatch.setattr(library, "_library", lambda dtype: "no C compiler")


@pytest.fixture(params=["C", "torch"])
def in_c(request: pytest.FixtureRequest) -> bool:
    """True: layers in C, skipped if they are not available; False: layers by torch."""
    if request.param == "torch":
        request.getfixturevalue("without_c")
    elif library.library_for(torch.float32, torch.device("cpu")) is None:
        pytest.skip("no compiler, or no CPU for it")
    return bool(request.param == "C")


@pytest.fixture(autouse=True)
def _no_ray_is_left() -> Iterator[None]:
    """Leave the Ray cluster of this process after every test, so that the next can tell whether it started one."""
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
def eagle_pair(tiny_pair: Pair) -> Pair:
    """The tiny target with a random EAGLE-3 draft, whose vocabulary is two thirds of the target's."""
    vocabulary = torch.randperm(260, generator=torch.Generator().manual_seed(0))[:174]
    return eagle3_pair(tiny_pair, tiny_target(), vocabulary)


@pytest.fixture(scope="session")
def alone(tiny_pair_dirs: tuple[Path, Path]) -> Pair:
    """The tiny target without a draft."""
    return load_pair(target=tiny_pair_dirs[0], dtype="float32")


def _pair_of(new_target: Callable[[], PreTrainedModel] | None = None, **parts: Any) -> Any:
    """Fixture: a pair of the tiny target, or of a new one, and a random draft with these parts (`DraftOptions`)."""

    @pytest.fixture(scope="session")
    def made(tiny_pair: Pair) -> Pair:
        target = (new_target() if new_target else tiny_pair.target).eval().requires_grad_(False)
        return replace(tiny_pair, target=target, draft=tiny_draft(target, **parts).eval().requires_grad_(False))

    return made


# The tiny pair with a Markov head, with a gated one, and with DFlash 2's convolutions and candidate selector.
markov_pair = _pair_of(markov_rank=6)
gated_pair = _pair_of(markov_rank=6, markov_head_type="gated")
dflash2_pair = _pair_of(**DFLASH2)
# Targets with sliding windows; with states in most layers, without and with experts; with sinks; a full Gemma 4.
gemma_pair = _pair_of(tiny_gemma)
hybrid_pair = _pair_of(tiny_hybrid)
hybrid_mixture_pair = _pair_of(tiny_hybrid_mixture)
gpt_oss_pair = _pair_of(tiny_gpt_oss)
gemma4_pair = _pair_of(tiny_gemma4_of_all_parts)


@pytest.fixture(scope="session")
def embedded_pair() -> Pair:
    """SmolLM2-135M-Instruct with its draft, fp32."""
    return load_pair("smollm2-135m", dtype="float32")


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Pair:
    """Pair fixture by name: `@pytest.mark.parametrize("pair", [names], indirect=True)`."""
    named: Pair = request.getfixturevalue(request.param)
    return named
