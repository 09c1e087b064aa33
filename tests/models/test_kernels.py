"""Prepared products beside the nn.Linear layers that they replace."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from blockpilot.models import kernels
from blockpilot.models.kernels import outputs, prepared, use_huge_pages


def layers(biases: tuple[bool, ...], dtype: torch.dtype = torch.float32) -> nn.ModuleDict:
    torch.manual_seed(0)
    sizes = zip("abc", (40, 8, 24), biases, strict=False)
    found = nn.ModuleDict({name: nn.Linear(20, size, bias=bias, dtype=dtype) for name, size, bias in sizes})
    return found.requires_grad_(False)


@pytest.fixture(params=[True, False], ids=["packed", "plain"])
def packed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both forms: the one of this CPU, and that of other devices."""
    if not request.param:
        monkeypatch.setattr(kernels, "_can_pack", lambda weight: False)
    return bool(request.param)


@pytest.mark.parametrize("biases", [(False,), (True,), (False, False, False), (True, False, True)])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (0,), (2, 3)])
def test_layers_keep_their_products(biases: tuple[bool, ...], shape: tuple[int, ...], packed: bool) -> None:
    plain, model = layers(biases), layers(biases)
    product = prepared(model, *model)
    x = torch.randn(*shape, 20)
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
    x = torch.randn(3, 20)
    assert torch.equal(first(x), second(x))
    assert (first is second) == packed


def test_weights_are_held_once(packed: bool) -> None:
    """Packed layers have no weights of their own, others share the product's memory."""
    model = layers((False, False))
    product = prepared(model, "a", "b")
    parameters = list(model.parameters())
    if packed:
        assert not parameters
    else:
        storage = product._weight.untyped_storage().data_ptr()
        assert {parameter.untyped_storage().data_ptr() for parameter in parameters} == {storage}


def test_a_row_does_not_depend_on_the_others() -> None:
    """What makes a text the same at every block size in float32."""
    torch.manual_seed(1)
    model = nn.ModuleDict({"a": nn.Linear(576, 960, bias=False)}).requires_grad_(False)
    product, x = prepared(model, "a"), torch.randn(33, 576)
    alone = product(x[:1])
    for num in (2, 3, 4, 5, 8, 16, 33):
        torch.testing.assert_close(product(x[:num])[:1], alone, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_packed_where_the_cpu_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(4, 4, dtype=torch.bfloat16)
    for has in (True, False):
        monkeypatch.setattr(kernels, "has_bfloat16", lambda has=has: has)
        assert kernels._can_pack(weight) == has
    assert not kernels._can_pack(torch.zeros(4, 4, dtype=torch.float64))
    assert not kernels._can_pack(torch.zeros(4, 4, device="meta"))


@pytest.mark.skipif(not kernels.has_bfloat16(), reason="no bfloat16 products on this CPU")
@pytest.mark.parametrize("shape", [(), (1,), (3,), (4,), (0,), (2, 3)])
def test_few_rows_in_bfloat16_are_filled_up_unseen(shape: tuple[int, ...]) -> None:
    plain, model = layers((True, False, True), torch.bfloat16), layers((True, False, True), torch.bfloat16)
    product, x = prepared(model, *model), torch.randn(*shape, 20, dtype=torch.bfloat16)
    found = product(x)
    torch.testing.assert_close(found, torch.cat([layer(x) for layer in plain.values()], dim=-1))
    assert found.shape == (*shape, 72)


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
    plain, model, x = layers((False, True, False)), layers((False, True, False)), torch.randn(2, 3, 20)
    if together:
        prepared(model, *together)
    calls = []
    call = kernels.Product.__call__
    monkeypatch.setattr(kernels.Product, "__call__", lambda self, x: calls.append(self) or call(self, x))
    found = outputs([model["b"], model["a"]], x)
    assert len(calls) == (packed and bool(together))
    for each, name in zip(found, "ba", strict=True):
        torch.testing.assert_close(each, plain[name](x))
