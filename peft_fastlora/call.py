"""What a call of a projection finds in its PEFT layer: read once, for the guards that decide and for the arithmetic.

This runs in front of every fused call, also for a single token, so it reads the dicts of the modules where they have
what it looks for: `nn.Module.__getattr__` is slow, and a layer has a dozen things to read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import quant
from .projection import Adapter, Projection, autocast_dtype, product_dtype


class Term(NamedTuple):
    """An active adapter of a layer."""

    name: str
    modules: tuple[Any, Any, Any]  # lora_A, lora_B, lora_dropout
    lora_A: Tensor
    lora_B: Tensor
    bias: Tensor | None  # of lora_B
    scaling: Any


class Call(NamedTuple):
    """One call of a projection, or (x is None) the question what the next call would do."""

    layer: Any  # a PEFT LoRA layer; None: a base layer without adapters, a member of a block
    base: Any  # the base layer
    weight: Any
    bias: Any
    terms: list[Term]  # the active adapters that have weights here, in PEFT's order
    in_4bit: bool  # the base layer is a bitsandbytes Linear4bit
    autocast: torch.dtype | None
    x: Any = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    member: bool = False  # of a block, which does not call the layer itself

    def tensors(self) -> list[tuple[str, Any]]:
        """The tensors that the fused node reads, with their names."""
        found = [("the base weight", self.weight), ("the base bias", self.bias), ("the input", self.x)]
        for term in self.terms:
            found += [("lora_A", term.lora_A), ("lora_B", term.lora_B), ("lora_bias", term.bias)]
        return [item for item in found if item[1] is not None]


def read_call(layer: Any, x: Any = None, args: tuple[Any, ...] = (), kwargs: Any = None) -> Call:
    """The call of a LoRA layer."""
    modules = layer._modules
    return _call(layer, modules["base_layer"], _terms(layer, modules), x, args, kwargs or {}, member=False)


def read_member(module: Any, x: Any) -> Call:
    """The call of a projection inside a block: a fast LoRA layer, or a base layer without adapters."""
    modules = module._modules
    if "lora_A" in modules:
        return _call(module, modules["base_layer"], _terms(module, modules), x, (), {}, member=True)
    return _call(None, module, [], x, (), {}, member=True)


def _call(layer: Any, base: Any, terms: list[Term], x: Any, args: Any, kwargs: Any, member: bool) -> Call:
    weight, bias = _parameter(base, "weight"), _parameter(base, "bias")
    autocast = autocast_dtype(weight.device.type) if isinstance(weight, Tensor) else None
    return Call(layer, base, weight, bias, terms, quant.is_4bit(base), autocast, x, args, kwargs, member)


def _terms(layer: Any, modules: Mapping[str, Any]) -> list[Term]:
    lora_As, lora_Bs, dropouts = (modules[part]._modules for part in ("lora_A", "lora_B", "lora_dropout"))
    terms = []
    for name in layer.active_adapters:
        if name in lora_As:
            parts = lora_As[name], lora_Bs[name], dropouts[name]
            weights = _parameter(parts[0], "weight"), _parameter(parts[1], "weight"), _parameter(parts[1], "bias")
            terms.append(Term(name, parts, *weights, layer.scaling[name]))
    return terms


def _parameter(module: Any, name: str) -> Any:
    """A parameter of a module, or what stands in its place (sharding and parametrizations put other things there)."""
    parameter = module._parameters.get(name)
    return parameter if parameter is not None else getattr(module, name, None)


def read_projection(call: Call) -> Projection:
    """The projection as it computes the call's x now."""
    adapters = tuple([_adapter(term, call.autocast) for term in call.terms])
    if not call.in_4bit:
        dtype = product_dtype(call.weight.dtype, call.autocast)
        return Projection(call.weight, call.bias, (), adapters, None, dtype, dtype)
    form, statistics = quant.read_state(quant.quant_state(call.base))
    dtype = product_dtype(quant.settle_compute_dtype(call.base, call.x), call.autocast)
    out_dtype = call.x.dtype
    if call.layer is not None and torch.is_autocast_enabled():
        # `lora.Linear4bit` asks this question without a device, so only autocast on an accelerator keeps it from
        # casting the branch to the dtype of the base result.
        for adapter in adapters:
            out_dtype = torch.promote_types(out_dtype, adapter.dtype)
    return Projection(call.weight, call.bias, statistics, adapters, form, dtype, out_dtype)


def _adapter(term: Term, autocast: torch.dtype | None) -> Adapter:
    dtype = product_dtype(term.lora_A.dtype, autocast)
    if isinstance(term.scaling, Tensor):
        return Adapter(term.lora_A, term.lora_B, term.bias, term.scaling, 1.0, dtype)
    return Adapter(term.lora_A, term.lora_B, term.bias, None, float(term.scaling), dtype)
