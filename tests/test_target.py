"""The target's forward pass beside what transformers computes by itself."""

import pytest
import torch

from blockpilot.pairs import Pair
from blockpilot.target import FEW_ROWS, Target


@pytest.mark.parametrize("num", [1, *FEW_ROWS, FEW_ROWS.stop])
def test_logits_of_any_number_of_rows_are_those_of_the_lm_head(tiny_pair: Pair, num: int) -> None:
    hidden = torch.randn(num, tiny_pair.target.config.hidden_size, generator=torch.Generator().manual_seed(num))
    with torch.inference_mode():
        logits = Target(tiny_pair.target, ()).logits(hidden)
        torch.testing.assert_close(logits, tiny_pair.target.lm_head(hidden))
    assert logits.is_contiguous()
