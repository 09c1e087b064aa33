"""An evaluation of the tiny pair on eight questions, and a sweep of four others."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from blockpilot.control.controller import Controller
from blockpilot.control.cost import StepPrice
from blockpilot.evaluation.pricing import measure_price
from blockpilot.pairs.loading import Pair
from blockpilot.prompts.files import Prompt, load_prompts
from blockpilot.sweep.rows import Metadata, SweepRow
from blockpilot.sweep.sweep import sweep_prompts
from helpers.evaluations import (
    CANDIDATES,
    NUM_TOKENS,
    QUESTIONS,
    SWEPT,
    Watched,
    changed,
    plan_of,
    prompt_file,
    write_policy,
)
from jobs.common.config import PairConfig
from jobs.evaluation.inputs import EvaluateConfig


@pytest.fixture(scope="session")
def question_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prompt_file(tmp_path_factory.mktemp("prompts") / "questions.jsonl", QUESTIONS)


@pytest.fixture(scope="session")
def questions(question_file: Path) -> list[Prompt]:
    return load_prompts(str(question_file))


@pytest.fixture(scope="session")
def swept_rows(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> list[SweepRow]:
    prompts = load_prompts(str(prompt_file(tmp_path_factory.mktemp("prompts") / "swept.jsonl", SWEPT)))
    return sweep_prompts(tiny_pair, prompts, CANDIDATES, method="decode", max_new_tokens=NUM_TOKENS).rows


@pytest.fixture
def metadata(tiny_pair: Pair) -> Metadata:
    config = {"seed": 0}
    return Metadata(config, tiny_pair.id, "float32", tiny_pair.vocab_size, 4, list(CANDIDATES), {}, "unknown")


@pytest.fixture
def config(pair_config: PairConfig, question_file: Path, tmp_path: Path) -> EvaluateConfig:
    return EvaluateConfig(
        pair=pair_config,
        prompts=(str(question_file),),
        policy="none",
        max_new_tokens=NUM_TOKENS,
        warm_up=0,
        output=tmp_path / "out",
    )


@pytest.fixture
def policy_dir(tiny_pair: Pair, tmp_path: Path) -> Path:
    return write_policy(tmp_path / "any" / "policy", tiny_pair)


Start = Callable[..., Watched]


@pytest.fixture
def start(config: EvaluateConfig, questions: list[Prompt]) -> Start:
    """Starts the actor: start(texts, policies, price, **changes of the configuration)."""

    def start_actor(
        texts: Sequence[Prompt] = questions,
        policies: Mapping[str, Path] | None = None,
        price: StepPrice | None = None,
        **changes: object,
    ) -> Watched:
        test_config = changed(config, **changes)
        return Watched(test_config, plan_of(test_config, texts, policies)._replace(price=price))

    return start_actor


@pytest.fixture(autouse=True)
def quick_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step costs measured with one timed step of each mixture."""
    monkeypatch.setattr("jobs.evaluation.actor.measure_price", functools.partial(measure_price, num_steps=1))


@pytest.fixture
def price_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the given step cost: controllers do not adapt it to measured step times."""
    monkeypatch.setattr(Controller, "__init__", functools.partialmethod(Controller.__init__, follows=False))


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fail if Ray starts: bad input must be refused before."""
    monkeypatch.setattr("jobs.evaluate.connect", lambda **_: pytest.fail("started Ray"))
    monkeypatch.chdir(tmp_path)
