"""Linear layers of a few rows, as decoding has them: on AMD CPUs their float32 product is often faster turned round.

MKL takes longer there for a product with two to five rows than with eight; with the weight as the left factor, and
one of an odd number of rows taken twice, it takes less. How far that goes depends on the layer's inputs.
Microseconds of [49152, 576] as it is and turned (AMD EPYC, AVX2, one thread): 10938 and 6821 with one row, 23665 and
6763 with two, 17406 and 9734 with four; from six rows on it is the other way about, and on Intel's CPUs always.
"""

from functools import cache

import torch
from torch import Tensor, nn

FEW_ROWS = (1024, range(1, 6)), (2048, range(2, 3))  # inputs at most, and rows for which such layers are turned
TAKEN_AS_EVEN = 1, 3  # rows of which one is taken twice; for five it does not pay


class FewRowsLinear(nn.Linear):
    """As nn.Linear, to the rounding."""

    def forward(self, input: Tensor) -> Tensor:
        num_rows = input.shape[:-1].numel()
        if input.device.type != "cpu" or input.dtype != torch.float32 or num_rows not in few_rows(self.in_features):
            return super().forward(input)
        rows = input.reshape(num_rows, -1)
        if num_rows in TAKEN_AS_EVEN:
            rows = torch.cat([rows, rows[:1]])
        product = (self.weight @ rows.T).T[:num_rows]
        if self.bias is not None:
            product = product + self.bias
        return product.contiguous().view(*input.shape[:-1], -1)


@cache
def few_rows(num_inputs: int) -> range:
    """Numbers of rows for which layers of so many inputs are turned round."""
    return next((rows for inputs, rows in FEW_ROWS if num_inputs <= inputs), range(0))


def use_few_rows(model: nn.Module) -> None:
    """Let all plain linear layers of a model be FewRowsLinear, in place, on a CPU where that is faster."""
    if "AMD" not in torch.cpu.get_capabilities().get("cpu_name", ""):
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FewRowsLinear
