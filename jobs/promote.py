"""Promote: point `@champion` of a registered model at one of its versions.

The first champion of a model needs no figures: there is nothing to lose. Any later one needs what
jobs/evaluate.py measured of it on held-out prompts, and must be no slower there than the best fixed block
size: the ratio of their speeds at least 1, and its 95% interval not wholly below that of the present
champion. `--force` skips all of it and is recorded as a tag of the version.
"""

from typing import NamedTuple

from pydantic import Field

from blockpilot.pairs import NAMED_PAIRS
from jobs.config import DEFAULT_PAIR, Config, main
from jobs.registry import HeldOut, Registry, Version, model_name


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


def run(config: PromoteConfig) -> PromoteResult:
    """Promote a version, or say why not; raises ValueError for a model or version that is not there."""
    registry = Registry.open()
    named = NAMED_PAIRS.get(config.model)
    name = model_name(named[0]) if named else config.model
    versions = registry.versions(name)
    if not versions:
        raise ValueError(f"registered model {name!r} in {registry.uri}: has no versions")
    version = versions[-1] if config.version is None else registry.version(name, config.version)
    champion = registry.find_champion(name)
    refusal = _refusal(version, champion)
    promoted = refusal is None or config.force
    if promoted:
        registry.set_champion(version)
    if refusal is not None and config.force:
        registry.tag_version(version, {"promoted.forced": refusal})
    reason = _reason(champion, refusal)
    print(f"promote: {name} version {version.number} is {'' if promoted else 'not '}the champion: {reason}")
    return PromoteResult(version, promoted, reason)


def _refusal(version: Version, champion: Version | None) -> str | None:
    """Why `version` must not follow `champion`; None when it may."""
    if champion is None or champion.number == version.number:
        return None
    ours = version.held_out
    if ours is None:
        return "no held-out figures; run jobs/evaluate.py on it first"
    if speed_ratio(ours) < 1:
        return f"slower than the best fixed block size on held-out prompts ({speed_ratio(ours):.3f} of its speed)"
    theirs = champion.held_out
    if theirs is not None and ours.speed_ratio_high < theirs.speed_ratio_low:
        return (
            f"gains at most {ours.speed_ratio_high:.3f} over the best fixed block size, "
            f"champion version {champion.number} at least {theirs.speed_ratio_low:.3f}"
        )
    return None


def speed_ratio(figures: HeldOut) -> float:
    """Speed of the policy over that of the best fixed block size."""
    return figures.policy_speed / figures.best_fixed_speed


def _reason(champion: Version | None, refusal: str | None) -> str:
    if refusal is not None:
        return refusal
    return f"it follows version {champion.number}" if champion else "the first of its model"


def _run_or_fail(config: PromoteConfig) -> None:
    """A refusal is an error on the command line."""
    result = run(config)
    if not result.promoted:
        raise ValueError(f"not promoted: {result.reason}")


if __name__ == "__main__":
    main(PromoteConfig, _run_or_fail)
