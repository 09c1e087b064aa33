"""Promote: set the alias `@champion` of a registered model to one of its versions.

The decision uses the measurements of jobs/evaluate.py on held-out prompts. The version must not be significantly
slower than the best fixed block size. It must beat the untrained choice, which servers use without a champion, and
the current champion: the 95% interval of the speed ratio, on the same prompts in the same run, must lie above 1. A
champion of another pair, such as one of the draft before retraining, is not compared. An evaluation needs at least
`MIN_PROMPTS` prompts: with fewer, a few long answers dominate. `--force` skips all checks and is recorded as a tag.
"""

from typing import NamedTuple

from pydantic import Field

from blockpilot.evaluation.statistics import Interval
from blockpilot.evaluation.tables import with_range
from blockpilot.pairs.table import NAMED_PAIRS
from blockpilot.types import PairId
from jobs.common.config import DEFAULT_PAIR, Config, main
from jobs.common.registry import UNTRAINED, HeldOut, Registry, Version, model_name

MIN_PROMPTS = 12


class PromoteConfig(Config):
    """Version to promote."""

    model: str = DEFAULT_PAIR
    """A named pair, or the name of a registered model (blockpilot-...)."""
    version: int | None = Field(default=None, ge=1)
    """Version number; by default the newest."""
    force: bool = False
    """Promote without any checks; recorded as a tag of the version."""


class PromoteResult(NamedTuple):
    """The decision and its reason."""

    version: Version
    promoted: bool
    reason: str
    champion: int | None
    """Version number of the champion after this job; None without one, or if it is of another pair."""


def run(config: PromoteConfig) -> PromoteResult:
    """Promote a version, or return why not; raises ValueError for a model or version that does not exist."""
    registry = Registry.open()
    named = NAMED_PAIRS.get(config.model)
    name = model_name(named.target) if named else config.model
    version = registry.newest(name) if config.version is None else registry.version(name, config.version)
    champion = registry.find_champion(name)
    passed, reason = _judge(version, champion)
    promoted = passed or config.force
    if promoted:
        if not passed:
            registry.tag_version(version, {"promoted.forced": reason})
        registry.set_champion(version)
    print(f"promote: {name} version {version.number} is {'' if promoted else 'not '}the champion: {reason}")
    current = version if promoted else champion
    number = current.number if current and _same_pair(version, current) else None
    return PromoteResult(version, promoted, reason, number)


def _judge(version: Version, champion: Version | None) -> tuple[bool, str]:
    """Decision (True if `version` may replace `champion`), and its reason."""
    if champion is not None and champion.number == version.number:
        return True, "it already was"
    figures = version.held_out
    if figures is None:
        return False, "no held-out figures; run jobs/evaluate.py on it first"
    if figures.num_prompts < MIN_PROMPTS:
        problem = f"measured on {figures.num_prompts:g} held-out prompts, at least {MIN_PROMPTS} are needed"
        return False, f"{problem}; run jobs/evaluate.py on more"
    if figures.speed_ratio_high < 1:
        ratio = figures.policy_speed / figures.best_fixed_speed
        measured = with_range(Interval(ratio, figures.speed_ratio_low, figures.speed_ratio_high), 3)
        return False, f"slower than the best fixed block size on held-out prompts, {measured} of its speed"
    if reason := _no_better_than_untrained(figures):
        return False, reason
    if champion is None:
        return True, "the first champion of its model"
    if _same_pair(version, champion):
        if figures.champion != champion.number:
            return (
                False,
                f"not measured together with champion version {champion.number}; run jobs/evaluate.py on it again",
            )
        if not figures.champion_ratio_low > 1:  # also refuses NaN
            over_champion = Interval(figures.champion_ratio, figures.champion_ratio_low, figures.champion_ratio_high)
            measured = with_range(over_champion, 3)
            return False, f"does not beat champion version {champion.number}, {measured} of its speed"
    return True, f"it follows version {champion.number}"


def _no_better_than_untrained(figures: HeldOut) -> str:
    """Reason to refuse a policy; empty if it beats the untrained choice."""
    if not figures.has_untrained:
        return f"not measured together with the untrained choice; run jobs/evaluate.py with baseline {UNTRAINED!r}"
    if figures.untrained_ratio_low > 1:
        return ""
    ratio = Interval(figures.untrained_ratio, figures.untrained_ratio_low, figures.untrained_ratio_high)
    return f"does not beat the untrained choice, {with_range(ratio, 3)} of its speed"


def _same_pair(version: Version, champion: Version) -> bool:
    """True for the same target, draft and revisions, and the same file format."""
    return all(version.tags.get(name) == champion.tags.get(name) for name in (*PairId._fields, "format"))


def _run_or_fail(config: PromoteConfig) -> None:
    """Promote; on the command line a refusal is an error."""
    result = run(config)
    if not result.promoted:
        raise ValueError(f"not promoted: {result.reason}")


if __name__ == "__main__":
    main(PromoteConfig, _run_or_fail)
