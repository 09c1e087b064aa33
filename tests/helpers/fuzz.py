"""Random requests, and pairs of any target to decode them with."""

from typing import Any

import numpy as np
import torch

from blockpilot.drafts.dflash import DraftModel
from blockpilot.drafts.dflash_checkpoint import new_draft_config
from blockpilot.pairs.loading import Pair
from blockpilot.types import LAYOUTS, PairId, Request, Sampling
from helpers.engines import NEVER
from helpers.tiny import MASK_ID, byte_tokenizer

MAX_NEW_TOKENS = 14


def pair_of(target: Any, dtype: torch.dtype) -> Pair:
    draft = DraftModel(new_draft_config(target.config, mask_token_id=MASK_ID, num_layers=2, block_size=8))
    models = (model.to(dtype).eval().requires_grad_(False) for model in (target, draft))
    return Pair(PairId("t", "1", "d", "2"), *models, byte_tokenizer())  # type: ignore[arg-type]


def any_request(rng: np.random.Generator, num_prompt_tokens: int) -> Request:
    """All sampling fields at random, each off in about half of the requests."""

    def maybe(value: object, off: object) -> object:
        return value if rng.random() < 0.5 else off

    few = rng.choice(256, size=12, replace=False).tolist()
    sampling = Sampling(
        temperature=float(rng.choice([0.0, 0.0, 0.7, 1.0, 6.0])),
        top_p=float(rng.choice([1.0, 1.0, 0.9, 0.5])),
        top_k=int(rng.choice([0, 0, 40, 3])),
        seed=int(rng.integers(2**40)),
        min_p=float(rng.choice([0.0, 0.0, 0.02, 0.3])),
        presence_penalty=float(maybe(rng.uniform(-2, 2), 0.0)),  # type: ignore[arg-type]
        frequency_penalty=float(maybe(rng.uniform(-2, 2), 0.0)),  # type: ignore[arg-type]
        repetition_penalty=float(maybe(rng.uniform(0.7, 1.8), 1.0)),  # type: ignore[arg-type]
        logit_bias=tuple((t, float(rng.uniform(-8, 8))) for t in few[: int(rng.choice([0, 0, 1, 12]))]),
    )
    num = int(rng.integers(1, MAX_NEW_TOKENS + 1))
    size = None if rng.random() < 0.3 else int(rng.integers(1, 10))
    stops = frozenset(rng.choice(256, size=40, replace=False).tolist()) if rng.random() < 0.5 else NEVER
    return Request(
        tuple(rng.integers(0, 256, size=num_prompt_tokens).tolist()),
        num,
        sampling,
        size,
        stops,
        layout=LAYOUTS[int(rng.integers(len(LAYOUTS)))],
        min_new_tokens=int(maybe(rng.integers(0, num + 1), 0)),  # type: ignore[call-overload]
        lookup=(None, None, True, False)[int(rng.integers(4))],
    )
