"""Step benchmark on a GPU: bytes that its lower bound counts."""

import pytest
import torch

from blockpilot.engine.engine import Engine
from jobs.bench.gpu_models import SHAPES, TINY, random_pair, step_bytes

SIZES = TINY | {"num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32}


@pytest.mark.usefixtures("without_c")
def test_bytes_of_a_step_of_a_mixture() -> None:
    """Mixture of experts: all experts are read except the share (3 / 4)^n that none of n tokens selects."""
    shape = SHAPES["coder-30b"]
    shape = shape._replace(sizes=shape.sizes | SIZES)
    pair = random_pair(shape.new, torch.device("cpu"), torch.float32, num_layers=1, block_size=4)
    engine = Engine(pair, num_slots=2, max_length=100)
    weights = sum(weight.nbytes for weight in pair.target.parameters()) - 512 * 128 * 4
    experts, column = 4 * 16 * 3 * 128 * 32 * 4, 4 * 2 * 2 * 2 * 32 * 4
    for tokens in (1, 3):
        step, target = step_bytes(engine, tokens, 50)
        assert target == pytest.approx(weights - experts * 0.75 ** (2 * tokens) + 50 * column)
        assert (step > target) == (tokens > 1)


@pytest.mark.usefixtures("without_c")
def test_states_are_read_and_written() -> None:
    shape = SHAPES["qwen3.5-4b"]
    shape = shape._replace(sizes=shape.sizes | TINY | {"num_hidden_layers": 4})
    pair = random_pair(shape.new, torch.device("cpu"), torch.float32, num_layers=1, block_size=4)
    engine = Engine(pair, num_slots=2, max_length=100)
    weights = sum(weight.nbytes for weight in pair.target.parameters())
    states, column = 2 * 2 * 3 * 32 * 128 * 128 * 4, 2 * 2 * 2 * 32 * 4
    assert step_bytes(engine, 1, 50)[0] == weights + states + 50 * column
