"""Prepared products beside the nn.Linear layers that they replace."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from blockpilot.models import kernels
from blockpilot.models.kernels import outputs, prepared, use_huge_pages
from blockpilot.native.products import native_product


def layers(biases: tuple[bool, ...], dtype: torch.dtype = torch.float32) -> nn.ModuleDict:
    torch.manual_seed(0)
    sizes = zip("abc", (80, 16, 48), biases, strict=False)
    found = nn.ModuleDict({name: nn.Linear(32, size, bias=bias, dtype=dtype) for name, size, bias in sizes})
    return found.requires_grad_(False)


@pytest.fixture(params=[True, False], ids=["packed", "plain"])
def packed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both forms: the one of CPUs that the C is for, and that of other devices."""
    if not request.param:
        monkeypatch.setattr(kernels, "native_product", lambda *_, **__: None)
    elif native_product(torch.zeros(16, 32), None) is None:
        pytest.skip("no compiler, or no CPU for it")
    return bool(request.param)


@pytest.mark.parametrize("biases", [(False,), (True,), (False, False, False), (True, False, True)])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (0,), (2, 3)])
def test_layers_keep_their_products(biases: tuple[bool, ...], shape: tuple[int, ...], packed: bool) -> None:
    plain, model = layers(biases), layers(biases)
    product = prepared(model, *model)
    x = torch.randn(*shape, 32)
    expected = [layer(x) for layer in plain.values()]
    torch.testing.assert_close(product(x), torch.cat(expected, dim=-1))
    assert product.is_packed == packed
    for layer, of_layer in zip(model.values(), expected, strict=True):
        torch.testing.assert_close(layer(x), of_layer)


def test_the_model_keeps_its_state(packed: bool) -> None:
    """State dict, weights by name, and copies."""
    plain, model = layers((True, False, True)), layers((True, False, True))
    prepared(model, *model)
    for each in (model, copy.deepcopy(model)):
        state = each.state_dict()
        assert list(state) == list(plain.state_dict())
        assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
        for layer, before in zip(each.values(), plain.values(), strict=True):
            assert torch.equal(layer.weight, before.weight)
            assert (layer.in_features, layer.out_features) == (before.in_features, before.out_features)


def test_layers_are_prepared_once(packed: bool) -> None:
    model = layers((False, False))
    first = prepared(model, "a", "b")
    second = prepared(model, "a", "b")
    x = torch.randn(3, 32)
    assert torch.equal(first(x), second(x))
    assert (first is second) == packed


def test_weights_are_held_once(packed: bool) -> None:
    """Packed layers have no weights of their own, others share the memory of the product, and of one made later."""
    model = layers((False, False))
    product = prepared(model, "a", "b")
    parameters = list(model.parameters())
    if packed:
        assert not parameters
    else:
        storage = product._weight.untyped_storage().data_ptr()
        assert {parameter.untyped_storage().data_ptr() for parameter in parameters} == {storage}
        again = prepared(model, "a", "b")
        assert again._weight.untyped_storage().data_ptr() == storage
        assert torch.equal(again._weight, product._weight)
        assert not torch.equal(prepared(model, "b", "a")._weight, product._weight)


@pytest.mark.parametrize("refused", [False, True])
def test_huge_pages_change_nothing(refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where the kernel lays memory out anew nor where it tells nothing of it."""
    held = torch.arange(3 << 20)
    if refused:
        monkeypatch.setattr(kernels, "MAPS", Path("/nowhere"))
    use_huge_pages()
    assert torch.equal(held, torch.arange(3 << 20))


@pytest.mark.parametrize("together", [("a", "b"), ("a", "b", "c"), ("b",), ()])
def test_layers_that_were_prepared_together_are_one_product(
    together: tuple[str, ...], packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model, x = layers((False, True, False)), layers((False, True, False)), torch.randn(2, 3, 32)
    if together:
        prepared(model, *together)
    calls = []
    call = kernels.Product.__call__
    monkeypatch.setattr(kernels.Product, "__call__", lambda self, x: calls.append(self) or call(self, x))
    found = outputs([model["b"], model["a"]], x)
    assert len(calls) == (packed and bool(together))
    for each, name in zip(found, "ba", strict=True):
        torch.testing.assert_close(each, plain[name](x))
