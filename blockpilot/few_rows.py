"""Linear layers of a few rows, as decoding has them: on a CPU their float32 product is faster turned round.

A product with two to five rows takes MKL longer than one with eight; with the weight as the left factor it takes
hardly more than with one row. That is what a block of a single request needs, and what a few requests need that
decode plainly: the layers of SmolLM2-135M take 54 ms with one row, 80, 98, 73 and 86 with two to five, turned round
56, 63, 52 and 73 (AMD EPYC, AVX2, one thread); from six rows on it is the other way about.
"""

import torch
from torch import Tensor, nn

FEW_ROWS = range(2, 6)


class FewRowsLinear(nn.Linear):
    """As nn.Linear, to the rounding."""

    def forward(self, input: Tensor) -> Tensor:
        num_rows = input.shape[:-1].numel()
        if num_rows not in FEW_ROWS or input.device.type != "cpu" or input.dtype != torch.float32:
            return super().forward(input)
        product = (self.weight @ input.reshape(num_rows, -1).T).T
        if self.bias is not None:
            product = product + self.bias
        return product.contiguous().view(*input.shape[:-1], -1)


def use_few_rows(model: nn.Module) -> None:
    """Let all plain linear layers of a model be FewRowsLinear, in place."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FewRowsLinear
