"""Experts on a GPU: in a CUDA graph, whatever the tokens choose, and beside transformers' loop over experts."""

from typing import Any

import pytest
import torch

from blockpilot.models.experts import Mixture
from helpers.tiny import tiny_mixture

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.03}


@pytest.mark.parametrize("num", [1, 5, 64, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_graph_holds_the_experts(dtype: torch.dtype, num: int) -> None:
    layers: Any = tiny_mixture(hidden_size=64).eval().to("cuda", dtype).model.layers
    block = layers[1].mlp
    block.experts.config._experts_implementation = "eager"
    mixture, inputs = Mixture(block), torch.randn(num, 64, device="cuda", dtype=dtype)
    assert num <= mixture.most_captured
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        mixture(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = mixture(inputs)
    for seed in range(3):
        torch.manual_seed(seed)
        inputs.normal_()
        graph.replay()
        torch.testing.assert_close(outputs, block(inputs[None])[0], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
