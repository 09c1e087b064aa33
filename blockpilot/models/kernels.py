"""Linear layers of a few rows, as decoding has them: on AMD CPUs their float32 product is often faster turned round.

MKL takes longer there for a product with two to five rows than with eight; with the weight as the left factor, and
one of an odd number of rows taken twice, it takes less. How far that goes depends on the layer's inputs.
Microseconds of [576, 576], [1536, 576], [576, 1536] and [49152, 576], as they are and turned round (AMD EPYC, AVX2,
one thread): with one row 127 and 89, 341 and 225, 235 and 248, 10938 and 6821; with two 181 and 85, 543 and 221,
358 and 246, 23665 and 6763; with four 158 and 111, 416 and 299, 362 and 533, 17406 and 9734. From six rows on, or
2,880 inputs, it is the other way about. Three rows as they are, turned, and turned as four (another such CPU): 180,
153 and 130; 542, 393 and 326; 399, 455 and 348; 33490, 20633 and 13265. For Intel's CPUs MKL has kernels for a few
rows (Xeon, AVX-512, weights from memory): with one row 183 and 347, 419 and 742, 341 and 613, 12202 and 29993, and
from four rows on the two take as long.
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
