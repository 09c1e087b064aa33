"""Promote: point `@champion` of a registered model at one of its versions.

The decision takes what jobs/evaluate.py measured of the version on held-out prompts. The version must not be slower
than the best fixed block size beyond the interval, and must beat the untrained choice, which servers use without a
champion, and the present champion. To beat is to be faster on the same prompts in the same run: the whole 95%
interval of the ratio of their speeds lies above 1. A champion of another pair, such as a draft before its
retraining, is not compared. An evaluation needs at least `MIN_PROMPTS` prompts: with fewer, a few long answers
decide. `--force` skips all checks and is recorded as a tag.
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
    """Which version of which model."""

    model: str = DEFAULT_PAIR
    """A named pair, or a registered model (blockpilot-...)."""
    version: int | None = Field(default=None, ge=1)
    """Number of the version; the newest by default."""
    force: bool = False
    """Promote whatever the figures say."""


class PromoteResult(NamedTuple):
    """What came of it."""

    version: Version
    promoted: bool
    reason: str
    champion: int | None
    """Number of the champion now, if it is one of the version's pair."""


def run(config: PromoteConfig) -> PromoteResult:
    """Promote a version, or say why not; raises ValueError for a model or version that is not there."""
    registry = Registry.open()
    named = NAMED_PAIRS.get(config.model)
    name = model_name(named.target) if named else config.model
    version = registry.newest(name) if config.version is None else registry.version(name, config.version)
    champion = registry.find_champion(name)
    earned, reason = _judge(version, champion)
    promoted = earned or config.force
    if promoted:
        registry.set_champion(version)
        if not earned:
            registry.tag_version(version, {"promoted.forced": reason})
    print(f"promote: {name} version {version.number} is {'' if promoted else 'not '}the champion: {reason}")
    now = version if promoted else champion
    return PromoteResult(version, promoted, reason, now.number if now and _same_pair(version, now) else None)


def _judge(version: Version, champion: Version | None) -> tuple[bool, str]:
    """Whether `version` may follow `champion`, and why."""
    if champion is not None and champion.number == version.number:
        return True, "it already was"
    ours = version.held_out
    if ours is None:
        return False, "no held-out figures; run jobs/evaluate.py on it first"
    if ours.num_prompts < MIN_PROMPTS:
        few = f"measured on {ours.num_prompts:g} held-out prompts, at least {MIN_PROMPTS} are needed"
        return False, f"{few}; run jobs/evaluate.py on more"
    if ours.speed_ratio_high < 1:
        ratio = ours.policy_speed / ours.best_fixed_speed
        measured = with_range(Interval(ratio, ours.speed_ratio_low, ours.speed_ratio_high), 3)
        return False, f"slower than the best fixed block size on held-out prompts, {measured} of its speed"
    if reason := _no_better_than_untrained(ours):
        return False, reason
    if champion is None:
        return True, "the first of its model"
    if _same_pair(version, champion):
        if ours.champion != champion.number:
            return False, f"not measured beside champion version {champion.number}; run jobs/evaluate.py on it again"
        if not ours.champion_ratio_low > 1:  # nor where it is no number
            measured = with_range(Interval(ours.champion_ratio, ours.champion_ratio_low, ours.champion_ratio_high), 3)
            return False, f"does not beat champion version {champion.number}, {measured} of its speed"
    return True, f"it follows version {champion.number}"


def _no_better_than_untrained(ours: HeldOut) -> str:
    """Why a policy is refused; nothing where it beats the untrained choice."""
    if not ours.has_untrained:
        return f"not measured beside the untrained choice; run jobs/evaluate.py with baseline {UNTRAINED!r}"
    if ours.untrained_ratio_low > 1:
        return ""
    ratio = Interval(ours.untrained_ratio, ours.untrained_ratio_low, ours.untrained_ratio_high)
    return f"does not beat the untrained choice, {with_range(ratio, 3)} of its speed"


def _same_pair(version: Version, champion: Version) -> bool:
    """And the same format, without which it cannot be read."""
    return all(version.tags.get(name) == champion.tags.get(name) for name in (*PairId._fields, "format"))


def _run_or_fail(config: PromoteConfig) -> None:
    """A refusal is an error on the command line."""
    result = run(config)
    if not result.promoted:
        raise ValueError(f"not promoted: {result.reason}")


if __name__ == "__main__":
    main(PromoteConfig, _run_or_fail)
