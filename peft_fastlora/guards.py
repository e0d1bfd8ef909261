"""When the fused path steps aside: small named functions, asked in order at every call and by the report.

Each guard gets a `Call` and returns None or a clause that completes "the fused path was not used because ...". Its
name is its identifier in tests, its docstring its line in `docs/reasons.md`. Guards read attributes; they touch no
data on the device and catch nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as module_globals

from . import quant
from .call import Call
from .detect import is_linear_forward
from .projection import product_dtype

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Refusal:
    """Why a call runs stock."""

    guard: str
    reason: str
    intended: bool  # the user asked for a state that is meant to run stock: `strict` does not complain

    def __str__(self) -> str:
        return f"the fused path was not used because {self.reason}"


# -- states that are meant to run stock -------------------------------------------------------------------------------


def adapters_disabled(call: Call) -> str | None:
    """The adapters are disabled (`disable_adapter()`), so there is nothing to fuse."""
    return "the adapters are disabled" if call.layer.disable_adapters else None


def adapter_merged(call: Call) -> str | None:
    """An adapter is merged into the base weight; the base layer alone computes the result."""
    return "an adapter is merged into the base weight" if call.layer.merged else None


def mixed_adapters(call: Call) -> str | None:
    """The call names an adapter for each sample (`adapter_names`)."""
    given = call.kwargs.get("adapter_names") is not None
    return "the call names an adapter for each sample (adapter_names)" if given else None


def no_active_adapter(call: Call) -> str | None:
    """None of the active adapters has weights in this layer."""
    return None if call.terms else "none of the active adapters has weights in this layer"


def switched_off(call: Call) -> str | None:
    """`fuse_linear=False` was chosen."""
    return None if call.layer.fast_lora_options.fuse_linear else "fuse_linear is False"


# -- what the fused arithmetic cannot represent -----------------------------------------------------------------------


def extra_arguments(call: Call) -> str | None:
    """The layer was called with more than one tensor."""
    unknown = [name for name, value in call.kwargs.items() if value is not None]
    if call.args or unknown:
        return f"the call has further arguments ({len(call.args)} positional, {', '.join(unknown) or 'none'} by name)"
    return None


def lora_variant(call: Call) -> str | None:
    """The adapter is a LoRA variant (DoRA, aLoRA, ...) whose arithmetic is not plain LoRA."""
    variants = call.layer.__dict__.get("lora_variant", {})
    for term in call.terms:
        if term.name in variants:
            return f"adapter {term.name!r} uses {type(variants[term.name]).__name__}"
        if call.layer.use_dora.get(term.name, False):
            return f"adapter {term.name!r} uses DoRA"
    return None


def dropout_active(call: Call) -> str | None:
    """LoRA dropout is active: training mode and a probability above zero."""
    for term in call.terms:
        dropout = term.modules[2]
        if type(dropout) is nn.Identity:
            continue
        if type(dropout) is not nn.Dropout:
            return f"lora_dropout of adapter {term.name!r} is a {type(dropout).__name__}"
        if dropout.training and dropout.p > 0:
            return f"lora_dropout of adapter {term.name!r} is active (p = {dropout.p})"
    return None


def input_casting_off(call: Call) -> str | None:
    """PEFT was told not to cast the input (`disable_input_dtype_casting`)."""
    enabled = getattr(call.layer, "cast_input_dtype_enabled", True)
    return None if enabled else "the casting of inputs is switched off (cast_input_dtype_enabled)"


def transposed_base(call: Call) -> str | None:
    """The base weight is stored [in, out] (`fan_in_fan_out`, transformers' Conv1D)."""
    return "the base weight is stored transposed (fan_in_fan_out)" if call.layer.fan_in_fan_out else None


def unknown_base(call: Call) -> str | None:
    """The base layer is not an `nn.Linear` or `Linear4bit`, or a subclass whose forward computes something else."""
    base = call.base
    if quant.is_plain_4bit(base) if _expects_4bit(call) else _is_plain_linear(base):
        return None
    kind = f"the base layer is a {type(base).__module__}.{type(base).__qualname__}"
    if _expects_4bit(call) or not is_linear(base):
        return kind
    if call.bias is not None and call.bias.dtype is not product_dtype(call.weight.dtype, call.autocast):
        return f"{kind}, which adds a {_short(call.bias.dtype)} bias to its product"
    return None


def unknown_lora_module(call: Call) -> str | None:
    """`lora_A` or `lora_B` was replaced by something else than a plain `nn.Linear`."""
    for term in call.terms:
        for part, module in zip(("lora_A", "lora_B"), term.modules, strict=False):
            if not _is_plain_linear(module):
                return f"{part} of adapter {term.name!r} is a {type(module).__module__}.{type(module).__qualname__}"
        if term.modules[0].bias is not None:
            return f"lora_A of adapter {term.name!r} has a bias"
    return None


def hooked(call: Call) -> str | None:
    """A hook, or a replaced forward, on `base_layer`, `lora_A`, `lora_B` or `lora_dropout` would not be seen."""
    for name, module in _parts(call):
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            return f"{name} has hooks"
        if "forward" in module.__dict__:
            return f"the forward of {name} was replaced on the instance"
    return None


def globally_hooked(call: Call) -> str | None:
    """Hooks for all modules are registered; they would miss the modules that the fused node does not call."""
    any_hook = (
        module_globals._global_forward_hooks
        or module_globals._global_forward_pre_hooks
        or module_globals._global_backward_hooks
        or module_globals._global_backward_pre_hooks
    )
    return "hooks for all modules are registered" if any_hook else None


def parametrized(call: Call) -> str | None:
    """A weight is parametrized (`torch.nn.utils.parametrize`), so reading it computes it."""
    for name, module in _parts(call):
        if "parametrizations" in module._modules:
            return f"{name} is parametrized"
    return None


def trainable_base(call: Call) -> str | None:
    """The base weight itself is trained, and the fused node computes no gradient for it."""
    return "the base weight is trainable" if call.weight.requires_grad else None


def trainable_scaling(call: Call) -> str | None:
    """The scaling is a tensor that wants a gradient."""
    for term in call.terms:
        if isinstance(term.scaling, Tensor) and term.scaling.requires_grad:
            return f"the scaling of adapter {term.name!r} wants a gradient"
    return None


def tensor_subclass(call: Call) -> str | None:
    """A parameter or the input is a tensor subclass (DTensor and the like) with arithmetic of its own."""
    for name, tensor in call.tensors():
        kind = type(tensor)
        if kind is nn.Parameter or kind is Tensor:
            continue
        if call.in_4bit and tensor is call.weight and kind.__name__ == "Params4bit":
            continue
        return f"{name} is a {kind.__module__}.{kind.__qualname__}"
    return None


def unknown_weight_dtype(call: Call) -> str | None:
    """A weight is stored in a dtype that is not a plain floating-point one and is no known 4-bit format."""
    for name, tensor in call.tensors():
        if tensor.dtype not in FLOATS and not (call.in_4bit and tensor is call.weight):
            return f"{name} has dtype {_short(tensor.dtype)}"
    return None


def unreadable_4bit(call: Call) -> str | None:
    """The 4-bit weight has no quantisation state, or one that cannot be dequantised exactly."""
    return quant.why_unreadable(call.base) if call.in_4bit else None


def wrong_shape(call: Call) -> str | None:
    """A weight is not there in full (sharded or offloaded parameters are empty outside their own forward)."""
    if call.weight.numel() == 0:
        return f"the base weight is empty (shape {list(call.weight.shape)})"
    shape = tuple((quant.quant_state(call.base) if call.in_4bit else call.weight).shape)
    for term in call.terms:
        lora_A, lora_B = term.lora_A.shape, term.lora_B.shape
        if len(lora_A) != 2 or len(lora_B) != 2 or shape != (lora_B[0], lora_A[1]) or lora_A[0] != lora_B[1]:
            return (
                f"the shapes of base weight {list(shape)}, lora_A {list(lora_A)} and lora_B {list(lora_B)} of adapter "
                f"{term.name!r} do not fit"
            )
    return None


def mixed_devices(call: Call) -> str | None:
    """Weights, adapters and input are not all on one device (offloading, meta tensors)."""
    tensors = call.tensors()
    device = call.weight.device
    if all(tensor.device == device for _, tensor in tensors):
        return None
    return "not all tensors are on one device: " + ", ".join(f"{name} on {t.device}" for name, t in tensors)


def mixed_dtypes(call: Call) -> str | None:
    """The dtypes of input, base weight and bias, or of lora_A and lora_B, differ where stock would refuse them."""
    for term in call.terms:
        lora_A, lora_B = term.lora_A.dtype, term.lora_B.dtype
        if product_dtype(lora_A, call.autocast) is not product_dtype(lora_B, call.autocast):
            return f"lora_A is {_short(lora_A)} and lora_B {_short(lora_B)} in adapter {term.name!r}"
    if call.in_4bit:
        return None
    dtype = product_dtype(call.weight.dtype, call.autocast)
    for name, tensor in (("the input", call.x), ("the base bias", call.bias)):
        if tensor is not None and product_dtype(tensor.dtype, call.autocast) is not dtype:
            return f"{name} is {_short(tensor.dtype)} and the base weight {_short(call.weight.dtype)}"
    return None


def unfit_input(call: Call) -> str | None:
    """The input is no floating-point tensor with the right number of features."""
    x = call.x
    if x is None or (x.dtype in FLOATS and x.dim() > 0 and x.shape[-1] == call.base.in_features):
        return None
    return f"the input has shape {list(x.shape)} and dtype {_short(x.dtype)}"


def traced(call: Call) -> str | None:
    """A tracer or transform runs that the node cannot join (torch.jit.trace, torch.func, forward-mode AD)."""
    if torch.compiler.is_compiling():
        return None  # Dynamo traces through the node
    if torch._C._is_tracing():
        return "torch.jit.trace is running"
    if torch._C._are_functorch_transforms_active():
        return "a torch.func transform is running"
    return "forward-mode differentiation is running" if forward_ad._current_level >= 0 else None


Guard = Callable[[Call], str | None]

INTENDED: tuple[Guard, ...] = (adapters_disabled, adapter_merged, mixed_adapters, no_active_adapter, switched_off)

# for a base layer without adapters too
BASE_GUARDS: tuple[Guard, ...] = (
    unknown_base,
    hooked,
    globally_hooked,
    parametrized,
    trainable_base,
    tensor_subclass,
    unknown_weight_dtype,
    unreadable_4bit,
    wrong_shape,
    mixed_devices,
    mixed_dtypes,
    unfit_input,
    traced,
)

LORA_GUARDS: tuple[Guard, ...] = (
    lora_variant,
    dropout_active,
    input_casting_off,
    transposed_base,
    unknown_lora_module,
    trainable_scaling,
    *BASE_GUARDS,
)

GUARDS: tuple[Guard, ...] = (*INTENDED, extra_arguments, *LORA_GUARDS)

# A block computes a layer none of whose adapters is active as its base layer alone, and has a switch of its own.
MEMBER_GUARDS: tuple[Guard, ...] = (adapters_disabled, adapter_merged, *LORA_GUARDS)

# A group, too, has a switch of its own; and its members are called one by one as ever.
GROUP_GUARDS: tuple[Guard, ...] = tuple(guard for guard in GUARDS if guard is not switched_off)


def why_not(call: Call) -> Refusal | None:
    """The first reason why this call must run stock, or None where it can be fused."""
    return _first(GUARDS if not call.member else BASE_GUARDS if call.layer is None else MEMBER_GUARDS, call)


def why_not_grouped(call: Call) -> Refusal | None:
    """The same for a layer in a group of layers that read one tensor."""
    return _first(GROUP_GUARDS, call)


def _first(guards: Sequence[Guard], call: Call) -> Refusal | None:
    for guard in guards:
        reason = guard(call)
        if reason is not None:
            return Refusal(guard.__name__, reason, guard in INTENDED)
    return None


# -- what guards look at ----------------------------------------------------------------------------------------------


def _is_plain_linear(module: nn.Module) -> bool:
    """`nn.Linear`, or a subclass that computes the same (as FSDP2's)."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def is_linear(module: nn.Module) -> bool:
    """Whether a module is an `nn.Linear`, or a subclass whose own forward is written x W^T (+ b) as Falcon's is."""
    return _is_plain_linear(module) or (isinstance(module, nn.Linear) and is_linear_forward(type(module).forward))


def _expects_4bit(call: Call) -> bool:
    return call.in_4bit if call.layer is None else bool(call.layer.fast_lora_4bit)


def _parts(call: Call) -> list[tuple[str, Any]]:
    """The modules that stock would call and the fused node does not."""
    parts = [("base_layer", call.base)]
    if call.member and call.layer is not None:
        parts.append(("the layer", call.layer))
    for term in call.terms:
        parts += zip(("lora_A", "lora_B", "lora_dropout"), term.modules, strict=True)
    return parts


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
