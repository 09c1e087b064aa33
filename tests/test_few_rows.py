"""Linear layers turned round for a few rows, beside nn.Linear."""

import pytest
import torch
from torch import nn

from blockpilot.few_rows import FEW_ROWS, FewRowsLinear, use_few_rows
from blockpilot.pairs import Pair


def random_linear(bias: bool, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(24, 40, bias=bias, dtype=dtype).requires_grad_(False)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(), *((num,) for num in (1, *FEW_ROWS, FEW_ROWS.stop)), (1, 3), (2, 2), (3, 1, 1)])
def test_any_number_of_rows_has_the_product_of_a_plain_layer(shape: tuple[int, ...], bias: bool) -> None:
    plain, few = random_linear(bias), random_linear(bias)
    use_few_rows(few)
    rows = torch.randn(*shape, 24, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(few(rows), plain(rows))
    assert few(rows).shape == (*shape, 40)
    assert few(rows).is_contiguous()


def test_only_float32_on_a_cpu_is_turned_round(monkeypatch: pytest.MonkeyPatch) -> None:
    turned: list[torch.dtype] = []

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        turned.append(left.dtype)
        return torch.matmul(left, right)

    monkeypatch.setattr(nn.Parameter, "__matmul__", product)
    for dtype in (torch.float32, torch.bfloat16):
        few = random_linear(bias=False, dtype=dtype)
        use_few_rows(few)
        for num in (1, 3, 6):
            few(torch.ones(num, 24, dtype=dtype))
    assert turned == [torch.float32]


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


def test_loaded_pairs_have_them(tiny_pair: Pair) -> None:
    for model in (tiny_pair.target, tiny_pair.draft):
        assert {type(module) for module in model.modules() if isinstance(module, nn.Linear)} == {FewRowsLinear}
