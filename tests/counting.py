"""Counts instead of stopwatches: matrix products, dequantisations, bytes kept for backward, bytes alive."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# `FlopCounterMode` does not see `addmm_`, nor bitsandbytes' operators.
# fmt: off
PRODUCT_OPERATORS = frozenset([
    "mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "addbmm", "addbmm_", "mv", "addmv", "addmv_", "dot", "vdot",
    "addr", "addr_", "ger", "outer", "linear", "matmul", "mkldnn_linear", "_addmm_activation", "_int_mm", "_scaled_mm",
    "gemm_4bit", "gemv_4bit",
])
# fmt: on


@dataclass(frozen=True)
class Product:
    """One matrix product: the operator and the shapes of its tensor operands."""

    operator: str
    shapes: tuple[tuple[int, ...], ...]

    def reads(self, out_features: int, in_features: int) -> bool:
        """Whether an operand has the shape of this weight, either way round, or of its packed form."""
        weight, packed = (out_features, in_features), (out_features * in_features // 2, 1)
        return any(shape in (weight, weight[::-1], packed) for shape in self.shapes)


class Operators(TorchDispatchMode):
    """Records what runs inside: products with their operands, and the number of weight dequantisations."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[Product] = []
        self.dequantisations = 0
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.rpartition("::")[2]
        self.names[name] += 1
        if name in PRODUCT_OPERATORS:
            shapes = tuple(tuple(leaf.shape) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            self.products.append(Product(name, shapes))
        if name in ("dequantize_4bit", "gemm_4bit", "gemv_4bit"):  # the products dequantise inside
            self.dequantisations += 1
        return func(*args, **(kwargs or {}))

    def with_weight(self, out_features: int, in_features: int) -> list[Product]:
        return [product for product in self.products if product.reads(out_features, in_features)]


class SavedTensors(saved_tensors_hooks):
    """Records what autograd nodes keep for backward while it is active.

    Args:
        exclude: a module whose parameters do not count: they are there anyway.
    """

    def __init__(self, exclude: nn.Module | None = None) -> None:
        self._excluded = {storage_key(p) for p in exclude.parameters()} if exclude is not None else set()
        self.tensors: list[Tensor] = []
        self.unpacked = 0
        super().__init__(self._pack, self._unpack)

    def __enter__(self) -> SavedTensors:  # type: ignore[override]
        super().__enter__()
        return self

    def _pack(self, tensor: Tensor) -> Tensor:
        if storage_key(tensor) not in self._excluded:
            self.tensors.append(tensor)
        return tensor

    def _unpack(self, tensor: Tensor) -> Tensor:
        self.unpacked += 1
        return tensor

    @property
    def bytes(self) -> int:
        """The size of the distinct storages: a view keeps all of what it looks into."""
        return sum({storage_key(t): t.untyped_storage().nbytes() for t in self.tensors}.values())


def storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class LiveBytes(TorchDispatchMode):
    """The bytes of the storages born inside that are still alive, whoever holds them (C++ included)."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and storage_key(leaf) not in given:
                self._watch(leaf.untyped_storage())
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = (weakref.ref(storage, lambda _: self._alive.pop(key, None)), storage.nbytes())

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self._alive.values())


def tensors_inside(value: Any, seen: set[int] | None = None) -> list[Tensor]:
    """All tensors that can be reached from a Python object through attributes and containers."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        children: list[Any] = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        children = list(value)
    else:
        children = list(getattr(value, "__dict__", {}).values())
    return [tensor for child in children for tensor in tensors_inside(child, seen)]
