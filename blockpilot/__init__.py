"""BlockPilot: exact speculative decoding with adaptive block sizes.

import blockpilot as bp

pair = bp.load_pair("smollm2-135m")  # dtype="auto": the fastest that is exact on this machine
for step in bp.generate(pair, prompt_ids, block_size=8):
    print(step.tokens, step.num_accepted)

Names are imported on first access: torch and transformers take seconds to import, and not every process of a cluster
needs them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blockpilot.control.controller import FixedPolicy
    from blockpilot.control.cost import StepPrice
    from blockpilot.engine.engine import Engine
    from blockpilot.engine.generate import generate
    from blockpilot.pairs.loading import Pair, load_pair
    from blockpilot.pairs.table import NAMED_PAIRS
    from blockpilot.policy.learned import PromptPolicy, StepPolicy
    from blockpilot.policy.store import load_policy, save_policy
    from blockpilot.types import CandidateSet, PairId, Policy, Prefill, Request, Sampling, Step

_MODULES = {
    "control.controller": ("FixedPolicy",),
    "control.cost": ("StepPrice",),
    "engine.engine": ("Engine",),
    "engine.generate": ("generate",),
    "pairs.loading": ("Pair", "load_pair"),
    "pairs.table": ("NAMED_PAIRS",),
    "policy.learned": ("PromptPolicy", "StepPolicy"),
    "policy.store": ("load_policy", "save_policy"),
    "types": ("CandidateSet", "PairId", "Policy", "Prefill", "Request", "Sampling", "Step"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "NAMED_PAIRS",
    "CandidateSet",
    "Engine",
    "FixedPolicy",
    "Pair",
    "PairId",
    "Policy",
    "Prefill",
    "PromptPolicy",
    "Request",
    "Sampling",
    "Step",
    "StepPolicy",
    "StepPrice",
    "generate",
    "load_pair",
    "load_policy",
    "save_policy",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
