"""Log probabilities are the target's own, whatever was drafted."""

import pytest
import torch

from blockpilot.engine.engine import Engine
from blockpilot.pairs.loading import Pair
from blockpilot.types import Request, Sampling
from helpers.engines import NEVER, PROMPT, run


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_they_are_those_of_one_pass_over_the_text(tiny_pair: Pair, temperature: float) -> None:
    requests = [
        Request(PROMPT[: 5 + i], 12, Sampling(temperature, seed=i), 1 + 2 * i, NEVER, num_logprobs=num)
        for i, num in enumerate([0, 3, 5, None])
    ]
    for request, steps in zip(requests, run(Engine(tiny_pair, num_slots=3, max_length=64), requests), strict=True):
        tokens = [token for step in steps for token in step.tokens]
        found = [each for step in steps for each in step.logprobs]
        if request.num_logprobs is None:
            assert not found
            continue
        text = torch.tensor([[*request.prompt_ids, *tokens]])
        scores = tiny_pair.target(text).logits[0, len(request.prompt_ids) - 1 : -1].log_softmax(dim=-1)
        assert [each.logprob for each in found] == pytest.approx(
            scores[torch.arange(len(tokens)), tokens].tolist(), abs=1e-4
        )
        for each, row in zip(found, scores, strict=True):
            best = row.topk(request.num_logprobs)
            assert [token for token, _ in each.likeliest] == best.indices.tolist()
            assert [value for _, value in each.likeliest] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("num", [-1, 261])
def test_impossible_numbers_are_refused(tiny_pair: Pair, num: int) -> None:
    with pytest.raises(ValueError, match=f"num_logprobs {num}: must be 0 to 260"):
        Engine(tiny_pair, max_length=64).add(Request(PROMPT, 4, num_logprobs=num))
