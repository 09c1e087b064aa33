"""Linear products whose weights are prepared once: layers that read the same input are one product.

On a CPU the weights are packed for the products in C (native/). The layers give up their own weights, so memory
does not double: a PreparedLinear takes the place of each in the model, which stays callable and whose state dict
stays whole. Elsewhere the layers keep their weights, as views of the product's.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from blockpilot.native.products import NativeProduct, Padding, native_product

MAPS = Path("/proc/self/maps")  # Linux
HUGE_PAGE = 2 << 20  # bytes
_MADV_COLLAPSE = 25


class Product:
    """x [..., inputs] -> x @ weight.T + bias, for the outputs of all `layers` side by side."""

    def __init__(
        self, layers: Sequence[nn.Linear], inputs: Padding | None = None, outputs: Padding | None = None
    ) -> None:
        weights = [layer.weight.detach() for layer in layers]
        self.sizes = [len(weight) for weight in weights]
        self._bias = _joined_bias(layers)
        weight = _side_by_side(weights)
        self._weight: Tensor | NativeProduct = native_product(weight, self._bias, inputs, outputs) or weight

    @property
    def packed(self) -> NativeProduct | None:
        """The product in C, where it is one."""
        return self._weight if isinstance(self._weight, NativeProduct) else None

    @property
    def is_packed(self) -> bool:
        return self.packed is not None

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(self._weight, NativeProduct):
            return self._weight(x)
        return functional.linear(x, self._weight, self._bias)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # never changed

    def parts(self) -> list[tuple[Tensor, Tensor | None]]:
        """Weight and bias of every layer; views, or unpacked copies."""
        weight = self._weight.unpacked() if isinstance(self._weight, NativeProduct) else self._weight
        biases = [None] * len(self.sizes) if self._bias is None else self._bias.split(self.sizes)
        return list(zip(weight.split(self.sizes), biases, strict=True))


def _side_by_side(weights: Sequence[Tensor]) -> Tensor:
    """Weights [outputs, inputs] as one: a view where they are parts of an earlier product, one after the other."""
    first, start = weights[0], weights[0].data_ptr()
    # Neighbours in memory are parts of one product already, or share a checkpoint's pages.
    for weight in weights:
        if not weight.is_contiguous() or weight.data_ptr() != start:
            return torch.cat(list(weights))
        start += weight.nbytes
    if start > first.untyped_storage().data_ptr() + first.untyped_storage().nbytes():
        return torch.cat(list(weights))
    return first.as_strided((sum(map(len, weights)), first.shape[1]), first.stride())


def _joined_bias(layers: Sequence[nn.Linear]) -> Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    biases = list[Tensor]()
    for layer in layers:
        has_bias = layer.bias is not None
        biases.append(layer.bias if has_bias else layer.weight.new_zeros(layer.out_features))
    return torch.cat(biases).detach()


class PreparedLinear(nn.Module):
    """In the place of an nn.Linear: layer `place` of a packed product."""

    def __init__(self, layer: nn.Linear, product: Product, place: int) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.product, self.place = product, place
        self._has_bias = layer.bias is not None

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.product(x).split(self.product.sizes, dim=-1)[self.place]
        return outputs

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features], unpacked anew every time."""
        return self.product.parts()[self.place][0]

    @property
    def bias(self) -> Tensor | None:
        return self.product.parts()[self.place][1] if self._has_bias else None

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight.clone()  # no view of the product's
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias.clone()


def prepared(
    parent: nn.Module, *names: str, inputs: Padding | None = None, outputs: Padding | None = None
) -> Product:
    """The product of the linear layers of these names, made once: the layers give their weights up for it.

    inputs, outputs: how these are padded where the product is in C.
    """
    layers: list[Any] = [getattr(parent, name) for name in names]
    if all(isinstance(layer, PreparedLinear) for layer in layers):
        product: Product = layers[0].product
        return product
    product = Product(layers, inputs, outputs)
    for place, (name, layer) in enumerate(zip(names, layers, strict=True)):
        if product.is_packed:
            setattr(parent, name, PreparedLinear(layer, product, place))
        elif len(layers) > 1:
            layer.weight = nn.Parameter(product.parts()[place][0], requires_grad=False)
    return product


class PreparedExperts(nn.Module):
    """In the place of Qwen3MoeExperts: the products of every expert, and of the router that chooses among them."""

    def __init__(
        self, products: Sequence[tuple[NativeProduct, NativeProduct]], router: NativeProduct, gate: Any
    ) -> None:
        super().__init__()
        self.products, self.router = products, router
        """Gate and up together, and down, of every expert; scores of all experts."""
        self.num_chosen: int = gate.top_k
        self.is_normed: bool = gate.norm_topk_prob

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[N, hidden], and experts and their weights [N, k] of every token -> [N, hidden]."""
        mixed = torch.zeros_like(hidden_states, dtype=torch.float32)
        # Each expert once, with all tokens that chose it: its weights are read once.
        for expert in top_k_index.unique().tolist():
            (gate_up, down), (rows, places) = self.products[expert], torch.where(top_k_index == expert)
            gate, up = gate_up(hidden_states[rows]).chunk(2, dim=-1)
            found = down(functional.silu(gate) * up)
            mixed.index_add_(0, rows, found * top_k_weights[rows, places, None].float())
        return mixed.to(hidden_states.dtype)

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        for place, name in enumerate(("gate_up_proj", "down_proj")):
            weights = [products[place].unpacked() for products in self.products]
            destination[f"{prefix}{name}"] = torch.stack(weights)


def prepared_experts(mixture: Any) -> PreparedExperts | None:
    """Those of a Qwen3MoeSparseMoeBlock in C, made once: experts give their weights up. None where there is no C."""
    experts, hidden = mixture.experts, Padding.to_multiple(mixture.gate.weight.shape[1])
    if isinstance(experts, PreparedExperts):
        return experts
    router = native_product(mixture.gate.weight.detach(), None)
    if router is None:
        return None
    inner, products = Padding.to_multiple(experts.down_proj.shape[2]), []
    for of_gate_up, of_down in zip(experts.gate_up_proj.detach(), experts.down_proj.detach(), strict=True):
        gate_up = native_product(of_gate_up, None, outputs=inner)
        down = native_product(of_down, None, inputs=inner, outputs=hidden)
        assert gate_up is not None
        assert down is not None
        products.append((gate_up, down))
    mixture.experts = PreparedExperts(products, router, mixture.gate)
    found: PreparedExperts = mixture.experts
    return found


def outputs(layers: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """Outputs of layers that read the same input, by one product where they were prepared together."""
    together = [layer for layer in layers if isinstance(layer, PreparedLinear)]
    if len(together) < len(layers) or len({id(layer.product) for layer in together}) > 1:
        return [layer(x) for layer in layers]
    product = together[0].product
    every = product(x).split(product.sizes, dim=-1)
    return [every[layer.place] for layer in together]


def use_huge_pages() -> None:
    """Have the kernel lay what this process holds in memory in huge pages, where it can (Linux 6.1 and newer).

    A step reads every weight once: with small pages, to look up addresses takes a fifth of its products' time.
    """
    try:
        mapped = MAPS.read_text().splitlines()
    except OSError:
        return
    advise = ctypes.CDLL(None).madvise
    for area, rights, _, _, _, *name in map(str.split, mapped):
        first, _, last = area.partition("-")
        # The whole pages inside: rounded up, and down.
        start, end = -(-int(first, 16) // HUGE_PAGE) * HUGE_PAGE, int(last, 16) // HUGE_PAGE * HUGE_PAGE
        if rights.startswith("rw") and name in ([], ["[heap]"]) and start < end:
            advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_COLLAPSE)  # refused: as it was


def leave_file(model: nn.Module) -> None:
    """Copy the weights that are left (embeddings, norms), so that nothing keeps the checkpoint mapped in memory."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
