"""Linear products with prepared weights: layers that read the same input are fused into one product.

On a CPU the weights are packed for the products in C (native/). So that memory does not double, a PreparedLinear
without weights replaces each layer in the model, which stays callable and keeps a complete state dict. On other
devices the layers' weights become views of the product's.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from blockpilot.models.expert_form import ExpertForm, RouterForm
from blockpilot.native.products import NativeProduct, Padding, native_product

MAPS = Path("/proc/self/maps")  # Linux
HUGE_PAGE = 2 << 20  # bytes
_MADV_COLLAPSE = 25


class Product:
    """x [..., inputs] -> x @ weight.T + bias, with the outputs of all `layers` concatenated."""

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
        """The product in C; None if it is by torch."""
        return self._weight if isinstance(self._weight, NativeProduct) else None

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(self._weight, NativeProduct):
            return self._weight(x)
        return functional.linear(x, self._weight, self._bias)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # immutable

    def parts(self) -> list[tuple[Tensor, Tensor | None]]:
        """Weight and bias of every layer, as views or unpacked copies."""
        weight = self._weight.unpacked() if isinstance(self._weight, NativeProduct) else self._weight
        biases = [None] * len(self.sizes) if self._bias is None else self._bias.split(self.sizes)
        return list(zip(weight.split(self.sizes), biases, strict=True))


def _side_by_side(weights: Sequence[Tensor]) -> Tensor:
    """Concatenated weights [outputs, inputs]: a view if they are adjacent in memory, else a copy."""
    first, start = weights[0], weights[0].data_ptr()
    # Adjacent weights are parts of an earlier product, or of a checkpoint that is mapped in memory.
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
    """Replacement of an nn.Linear: layer `index` of a packed product."""

    def __init__(self, layer: nn.Linear, product: Product, index: int) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.product, self.index = product, index
        self._has_bias = layer.bias is not None

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.product(x).split(self.product.sizes, dim=-1)[self.index]
        return outputs

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features], unpacked on every access."""
        return self.product.parts()[self.index][0]

    @property
    def bias(self) -> Tensor | None:
        return self.product.parts()[self.index][1] if self._has_bias else None

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight.clone()  # not a view of the product's
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias.clone()


def prepared(
    parent: nn.Module, *names: str, inputs: Padding | None = None, outputs: Padding | None = None
) -> Product:
    """Fused product of the linear layers of these names, created once; it replaces the layers' own weights.

    inputs, outputs: padding of the product's inputs and outputs, if it is in C.
    """
    layers: list[Any] = [getattr(parent, name) for name in names]
    if all(isinstance(layer, PreparedLinear) for layer in layers):
        product: Product = layers[0].product
        return product
    product = Product(layers, inputs, outputs)
    for index, (name, layer) in enumerate(zip(names, layers, strict=True)):
        if product.packed is not None:
            setattr(parent, name, PreparedLinear(layer, product, index))
        elif len(layers) > 1:
            layer.weight = nn.Parameter(product.parts()[index][0], requires_grad=False)
    return product


class PreparedExperts(nn.Module):
    """Replacement of a mixture's experts: the products of every expert, and of the router."""

    def __init__(
        self, products: Sequence["ExpertProducts"], scores: NativeProduct, form: ExpertForm, router: RouterForm
    ) -> None:
        super().__init__()
        self.products, self.scores, self.form, self.router = products, scores, form, router
        """scores: product for the router scores of all experts."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Hidden states [N, hidden], and the experts [N, k] of each token with weights [N, k] -> [N, hidden]."""
        mixed = torch.zeros_like(hidden_states, dtype=torch.float32)
        # Summed in float32, as in C. Each expert runs once, with all its tokens, so its weights are read once.
        for expert in top_k_index.unique().tolist():
            (gate_up, down), (rows, ranks) = self.products[expert], torch.where(top_k_index == expert)
            expert_outputs = down(self.form.gated(*gate_up(hidden_states[rows]).chunk(2, dim=-1)))
            mixed.index_add_(0, rows, expert_outputs * top_k_weights[rows, ranks, None].float())
        return mixed.to(hidden_states.dtype)

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        gate_ups, downs = zip(*self.products, strict=True)
        for name, products, as_in_module in (
            ("gate_up_proj", gate_ups, self.form.as_in_module),
            ("down_proj", downs, lambda rows: rows),
        ):
            weights = torch.stack([as_in_module(product.unpacked()) for product in products])
            destination[f"{prefix}{name}"] = self.form.outputs_first(weights).contiguous()
            if products[0].bias is not None:
                biases = [as_in_module(product.bias) for product in products]
                destination[f"{prefix}{name}_bias"] = torch.stack(biases)


class ExpertProducts(NamedTuple):
    """Products of an expert; `gate_up` has gates before ups."""

    gate_up: NativeProduct
    down: NativeProduct


def prepared_experts(mixture: Any) -> PreparedExperts | None:
    """Experts of a transformers mixture in C, created once; they replace its weights. None without C."""
    experts, router = mixture.experts, RouterForm.of(router_of(mixture))
    if isinstance(experts, PreparedExperts):
        return experts
    scores = native_product(router.weight, router.bias)
    if scores is None:
        return None
    form, no_biases = ExpertForm.of(experts), [None] * len(experts.gate_up_proj)
    up_weights, down_weights = (form.outputs_first(weights) for weights in (experts.gate_up_proj, experts.down_proj))
    up_biases, down_biases = (getattr(experts, f"{name}_proj_bias", no_biases) for name in ("gate_up", "down"))
    inner, hidden = map(Padding.to_multiple, (down_weights.shape[2], down_weights.shape[1]))
    products = []
    for up_weight, up_bias, down_weight, down_bias in zip(
        up_weights.detach(), up_biases, down_weights.detach(), down_biases, strict=True
    ):
        first_bias = None if up_bias is None else form.gates_first(up_bias)
        gate_up = native_product(form.gates_first(up_weight), first_bias, outputs=inner)
        down = native_product(down_weight, down_bias, inputs=inner, outputs=hidden)
        assert gate_up is not None
        assert down is not None
        products.append(ExpertProducts(gate_up, down))
    mixture.experts = prepared_mixture = PreparedExperts(products, scores, form, router)
    return prepared_mixture


def router_of(mixture: Any) -> Any:
    """Router module of a mixture; its last two outputs are weights and indices [N, k] of the selected experts."""
    return mixture.router if hasattr(mixture, "router") else mixture.gate


def outputs(layers: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """Outputs of layers that read the same input, by one product if they were prepared together."""
    together = [layer for layer in layers if isinstance(layer, PreparedLinear)]
    if len(together) < len(layers) or len({id(layer.product) for layer in together}) > 1:
        return [layer(x) for layer in layers]
    product = together[0].product
    all_outputs = product(x).split(product.sizes, dim=-1)
    return [all_outputs[layer.index] for layer in together]


def use_huge_pages() -> None:
    """Move the memory of this process to huge pages, if the kernel can (Linux 6.1 and newer).

    A step reads every weight once: with small pages, address translation takes a fifth of the products' time.
    """
    try:
        mapped = MAPS.read_text().splitlines()
    except OSError:
        return
    advise = ctypes.CDLL(None).madvise
    for area, rights, _, _, _, *name in map(str.split, mapped):
        first, _, last = area.partition("-")
        # The huge pages inside the area: start rounded up, end rounded down.
        start, end = -(-int(first, 16) // HUGE_PAGE) * HUGE_PAGE, int(last, 16) // HUGE_PAGE * HUGE_PAGE
        if rights.startswith("rw") and name in ([], ["[heap]"]) and start < end:
            advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_COLLAPSE)  # errors are ignored


def copy_mapped_weights(model: nn.Module) -> None:
    """Copy the remaining weights (embeddings, norms), so that the checkpoint is not kept mapped in memory."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
