"""Mixtures of experts by torch against transformers', and no wait for the choice of experts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from transformers import PreTrainedModel

from blockpilot.models import experts
from blockpilot.models.experts import Mixture
from blockpilot.models.graphs import MOST_TOKENS
from blockpilot.models.kernels import router_of
from helpers.tiny import tiny_gpt_oss, tiny_hybrid_mixture, tiny_mixture

MODELS = [tiny_mixture, tiny_hybrid_mixture, tiny_gpt_oss]
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.03}
pytestmark = pytest.mark.usefixtures("without_c")


@pytest.fixture(params=[False, True], ids=["grouped", "copied"])
def copied(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """True: torch has no grouped product, and few tokens multiply copies of their experts."""
    if request.param:
        monkeypatch.setattr(experts, "_has_grouped_kernel", lambda weight: False)
    return bool(request.param)


def block_of(model: Callable[..., PreTrainedModel], dtype: torch.dtype = torch.float32) -> Any:
    layers: Any = model(hidden_size=64).eval().requires_grad_(False).to(dtype).model.layers
    return layers[1].mlp


@pytest.mark.usefixtures("copied")
@pytest.mark.parametrize("num", [1, 2, 17])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
@torch.inference_mode()
def test_the_experts_of_transformers(model: Callable[..., PreTrainedModel], dtype: torch.dtype, num: int) -> None:
    block, x = block_of(model, dtype), torch.randn(num, 64).to(dtype)
    _, weights, ids = router_of(block)(x)
    expected = block.experts(x, ids, weights)
    torch.testing.assert_close(Mixture(block)(x), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_nothing_waits_for_the_choice_of_experts(copied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake tensor passes, as in a CUDA graph; a loop over the chosen experts does not."""
    block = block_of(tiny_mixture, torch.bfloat16)
    mixture = Mixture(block)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(5, 64, dtype=torch.bfloat16)
        assert mixture(x).shape == (5, 64)
        with pytest.raises(DynamicOutputShapeException):
            block.gate(x)[2].unique()
    assert mixture.most_captured == MOST_TOKENS
    monkeypatch.setattr(experts, "MOST_COPIED", 2**17)
    expert_bytes = 3 * 32 * 64 * 4
    expected = 2**17 // (2 * expert_bytes) if copied else MOST_TOKENS
    assert Mixture(block_of(tiny_mixture)).most_captured == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("num", [1, 5, 64, 512])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_a_graph_holds_the_experts(dtype: torch.dtype, num: int) -> None:
    """Same outputs as transformers' loop over experts, regardless of the chosen experts."""
    block = block_of(tiny_mixture, dtype).to("cuda")
    block.experts.config._experts_implementation = "eager"
    mixture, inputs = Mixture(block), torch.randn(num, 64, device="cuda", dtype=dtype)
    tolerance = max(1e-4, TOLERANCE[dtype])
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
        torch.testing.assert_close(outputs, block(inputs[None])[0], rtol=tolerance, atol=tolerance)
