"""BlockPilot: exact speculative decoding that picks its own block size.

import blockpilot as bp

pair = bp.load_pair("smollm2-135m")
for step in bp.generate(pair, prompt_ids, block_size=8):
    print(step.tokens, step.num_accepted)
"""

from blockpilot.control.price import StepCosts
from blockpilot.engine.engine import Engine, Policy, Prefill, Request, Step, generate
from blockpilot.engine.sampling import Sampling
from blockpilot.pairs.loading import NAMED_PAIRS, Pair, PairId, load_pair
from blockpilot.policy.learned import CandidateSet, FixedPolicy, LearnedPolicy, load_policy, save_policy

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
    "StepCosts",
    "generate",
    "load_pair",
    "load_policy",
    "save_policy",
]
