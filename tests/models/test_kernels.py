"""Linear layers turned round for a few rows, beside nn.Linear."""

from pathlib import Path

import pytest
import torch
from torch import nn

from blockpilot.models.kernels import FewRowsLinear, use_few_rows
from blockpilot.pairs.loading import load_pair


@pytest.fixture(autouse=True)
def amd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": "AMD EPYC"})


def random_linear(bias: bool, dtype: torch.dtype = torch.float32, inputs: int = 24) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, 40, bias=bias, dtype=dtype).requires_grad_(False)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("inputs", [24, 1500, 3000])
@pytest.mark.parametrize("shape", [(), *((num,) for num in range(1, 7)), (1, 3), (2, 2), (3, 1, 1)])
def test_any_number_of_rows_has_the_product_of_a_plain_layer(shape: tuple[int, ...], bias: bool, inputs: int) -> None:
    plain, few = random_linear(bias, inputs=inputs), random_linear(bias, inputs=inputs)
    use_few_rows(few)
    rows = torch.randn(*shape, inputs, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(few(rows), plain(rows))
    assert few(rows).shape == (*shape, 40)
    assert few(rows).is_contiguous()


@pytest.mark.parametrize(
    ("inputs", "dtype", "turned_rows"),
    [
        (24, torch.float32, [(1, 2), (2, 2), (3, 4), (4, 4), (5, 5)]),
        (1500, torch.float32, [(2, 2)]),
        (3000, torch.float32, []),
        (24, torch.bfloat16, []),
    ],
)
def test_layers_are_turned_round_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, inputs: int, dtype: torch.dtype, turned_rows: list[tuple[int, int]]
) -> None:
    """Rows, and how many of them the product has."""
    turned: list[tuple[int, int]] = []

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        turned.append((num, right.shape[1]))
        return torch.matmul(left, right)

    monkeypatch.setattr(nn.Parameter, "__matmul__", product)
    few = random_linear(bias=False, dtype=dtype, inputs=inputs)
    use_few_rows(few)
    for num in range(8):
        few(torch.ones(num, inputs, dtype=dtype))
    assert turned == turned_rows


def test_plain_layers_of_a_model_are_replaced_and_keep_their_weights() -> None:
    class OfItsOwn(nn.Linear):
        pass

    model = nn.ModuleDict({"plain": random_linear(bias=True), "own": OfItsOwn(3, 4), "norm": nn.LayerNorm(3)})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    use_few_rows(model)
    assert {name: type(module) for name, module in model.items()} == {
        "plain": FewRowsLinear,
        "own": OfItsOwn,
        "norm": nn.LayerNorm,
    }
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("capabilities", [{"cpu_name": "Intel Xeon 2.50GHz"}, {"architecture": "aarch64"}])
def test_other_cpus_keep_plain_layers(monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, str]) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    layer = random_linear(bias=False)
    use_few_rows(layer)
    assert type(layer) is nn.Linear


def test_loaded_pairs_have_them(tiny_pair_dirs: tuple[Path, Path]) -> None:
    target, draft = tiny_pair_dirs
    pair = load_pair(target=str(target), draft=str(draft))
    for model in (pair.target, pair.draft):
        assert {type(module) for module in model.modules() if isinstance(module, nn.Linear)} == {FewRowsLinear}
