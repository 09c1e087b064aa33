"""Prepared products against the nn.Linear layers that they replace."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from blockpilot.models import kernels
from blockpilot.models.kernels import outputs, prepared, use_huge_pages


def layers(biases: tuple[bool, ...]) -> nn.ModuleDict:
    torch.manual_seed(0)
    sizes = zip("abc", (80, 16, 48), biases, strict=False)
    return nn.ModuleDict({name: nn.Linear(32, size, bias=bias) for name, size, bias in sizes}).requires_grad_(False)


def test_layers_are_prepared_once_and_weights_held_once(in_c: bool) -> None:
    """Packed layers have no separate weights; others share the memory of the product, also of one made later."""
    model, x = layers((False, False)), torch.randn(3, 32)
    product = prepared(model, "a", "b")
    parameters = list(model.parameters())
    second_product = prepared(model, "a", "b")
    assert torch.equal(product(x), second_product(x))
    torch.testing.assert_close(product(x), torch.cat([layer(x) for layer in copy.deepcopy(model).values()], dim=-1))
    assert (product is second_product) == in_c
    if in_c:
        assert not parameters
        return
    storage = product._weight.untyped_storage().data_ptr()
    assert {weight.untyped_storage().data_ptr() for weight in (*parameters, second_product._weight)} == {storage}
    assert torch.equal(second_product._weight, product._weight)
    assert not torch.equal(prepared(model, "b", "a")._weight, product._weight)


@pytest.mark.parametrize("refused", [False, True])
def test_huge_pages_change_nothing(refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory contents are unchanged if the kernel uses huge pages, and if its memory maps are not available."""
    held = torch.arange(3 << 20)
    if refused:
        monkeypatch.setattr(kernels, "MAPS", Path("/nowhere"))
    use_huge_pages()
    assert torch.equal(held, torch.arange(3 << 20))


@pytest.mark.parametrize("together", [("a", "b"), ("a", "b", "c"), ("b",), ()])
def test_layers_that_were_prepared_together_are_one_product(
    together: tuple[str, ...], in_c: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model, x = layers((False, True, False)), layers((False, True, False)), torch.randn(2, 3, 32)
    if together:
        prepared(model, *together)
    calls, call = [], kernels.Product.__call__
    monkeypatch.setattr(kernels.Product, "__call__", lambda self, x: calls.append(self) or call(self, x))
    for output, name in zip(outputs([model["b"], model["a"]], x), "ba", strict=True):
        torch.testing.assert_close(output, plain[name](x))
    assert len(calls) == (in_c and bool(together))
