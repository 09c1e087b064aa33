"""BlockPilot: exact speculative decoding that picks its own block size.

import blockpilot as bp

pair = bp.load_pair("smollm2-135m")
for step in bp.generate(pair, prompt_ids, block_size=8):
    print(step.tokens, step.num_accepted)
"""

from blockpilot.control.controller import FixedPolicy
from blockpilot.control.price import StepPrice
from blockpilot.engine.engine import Engine
from blockpilot.engine.generate import generate
from blockpilot.pairs.loading import Pair, load_pair
from blockpilot.pairs.table import NAMED_PAIRS
from blockpilot.policy.learned import LearnedPolicy
from blockpilot.policy.store import load_policy, save_policy
from blockpilot.types import CandidateSet, PairId, Policy, Prefill, Request, Sampling, Step

__all__ = [
    "NAMED_PAIRS",
    "CandidateSet",
    "Engine",
    "FixedPolicy",
    "LearnedPolicy",
    "Pair",
    "PairId",
    "Policy",
    "Prefill",
    "Request",
    "Sampling",
    "Step",
    "StepPrice",
    "generate",
    "load_pair",
    "load_policy",
    "save_policy",
]
