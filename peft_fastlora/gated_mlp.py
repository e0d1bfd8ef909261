"""`FastLoraGatedMLP`: an MLP block whose forward and backward are one autograd node.

A module whose forward was recognised (`detect`) gets a subclass of its own class with this mixin in front, so
`super().forward` is the model's own code. The projections inside stay fast LoRA layers of their own and run without
the block whenever it steps aside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from .activations import Activation, activation_of
from .call import read_member, read_projection
from .detect import Block
from .functions import lora_mlp
from .guards import Refusal, mixed_dtypes, why_not
from .layer import FastLoraLayer
from .mlp import Combine
from .projection import Projection
from .shared_input import FastLoraSharedInput


class FastLoraGatedMLP(FastLoraSharedInput):
    """Mixin in front of the class of an MLP block. A block that steps aside still shares its input where it can."""

    fast_lora_block: ClassVar[Block]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """[..., in] -> [..., out], equal to the stock block's result."""
        call = read_block(self, args, kwargs)
        plan = plan_block(call)
        if isinstance(plan, Refusal):
            return super().forward(*args, **kwargs)
        options = self.fast_lora_options
        keep_outputs = options.recompute == "activation"
        return lora_mlp(call.x, plan.inputs, plan.down, plan.combine, keep_outputs, options.chunk_size)


class BlockCall(NamedTuple):
    """One call of an MLP block, or (x is None) the question what the next call would do."""

    module: Any
    block: Block
    x: Any
    extra: bool  # called with something else than its one tensor


class BlockPlan(NamedTuple):
    """What the node computes."""

    inputs: tuple[Projection, ...]
    down: Any
    combine: Any


def read_block(module: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> BlockCall:
    x = args[0] if args else None
    return BlockCall(module, module.fast_lora_block, x, extra=len(args) > 1 or bool(kwargs))


# -- guards of the whole block, as in `guards` ------------------------------------------------------------------------


def switched_off(call: BlockCall) -> str | None:
    """`fuse_mlp=False` was chosen."""
    return None if call.module.fast_lora_options.fuse_mlp else "fuse_mlp is False"


def nothing_adapted(call: BlockCall) -> str | None:
    """No projection of the block has an active adapter."""
    members = [call.module._modules[name] for name in call.block.projections]
    active = any(isinstance(m, FastLoraLayer) and read_member(m, None).terms for m in members)
    return None if active else "no projection of the block has an active adapter"


def other_arguments(call: BlockCall) -> str | None:
    """The block was called with anything but one tensor by position."""
    if call.extra or (call.x is not None and not isinstance(call.x, Tensor)):
        return "the block was called with other arguments than one tensor"
    return None


def one_module_twice(call: BlockCall) -> str | None:
    """Two projections of the block are one module."""
    members = [id(call.module._modules[name]) for name in call.block.projections]
    return "two projections are the same module" if len(set(members)) < len(members) else None


def unknown_member(call: BlockCall) -> str | None:
    """A projection is neither a fast LoRA layer nor a plain Linear."""
    for name in call.block.projections:
        member = call.module._modules[name]
        if not isinstance(member, (FastLoraLayer, nn.Linear)):
            return f"{name} is a {type(member).__module__}.{type(member).__qualname__}"
    return None


def unknown_activation(call: BlockCall) -> str | None:
    """The activation is not in the table of `activations`, or was changed on the instance."""
    activation = call.block.activation
    if isinstance(activation, Activation):
        return None
    module = call.module._modules[activation]
    if module is None or activation_of(module) is None:
        return f"the activation {type(module).__module__}.{type(module).__qualname__} is not known"
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    if hooks or "forward" in module.__dict__:
        return f"the activation {activation} has hooks or a replaced forward"
    return None


BLOCK_GUARDS: tuple[Callable[[BlockCall], str | None], ...] = (
    switched_off,
    nothing_adapted,
    other_arguments,
    one_module_twice,
    unknown_member,
    unknown_activation,
)
INTENDED = (switched_off, nothing_adapted)


def why_not_block(call: BlockCall) -> Refusal | None:
    """The first reason why the block must run as its stock forward, or None where it can be one node."""
    plan = plan_block(call)
    return plan if isinstance(plan, Refusal) else None


def plan_block(call: BlockCall) -> BlockPlan | Refusal:
    """What the node computes for this call, or why it must not. Without an x, only whether there is a reason."""
    for guard in BLOCK_GUARDS:
        reason = guard(call)
        if reason is not None:
            return Refusal(guard.__name__, reason, guard in INTENDED)
    members, block = call.module._modules, call.block
    reads = [read_member(members[name], call.x if name != block.down else None) for name in block.projections]
    for name, read in zip(block.projections, reads, strict=True):
        refusal = why_not(read)
        if refusal is not None:
            return Refusal(refusal.guard, f"{name}: {refusal.reason}", refusal.intended)
    if call.x is None:
        return BlockPlan((), None, None)
    *inputs, down = reads
    projections = tuple([read_projection(read) for read in inputs])
    hidden = projections[0].out_dtype
    down = down._replace(x=call.x.new_empty((0, down.base.in_features), dtype=hidden))
    reason = mixed_dtypes(down)
    if reason is not None or any(projection.out_dtype is not hidden for projection in projections):
        return Refusal("mixed_dtypes", f"{block.down}: {reason}" if reason else "gate and up differ in dtype", False)
    activation = members[block.activation] if isinstance(block.activation, str) else None
    known: Any = block.activation if activation is None else activation_of(activation)
    return BlockPlan(projections, read_projection(down), Combine(block.form, block.gate, known))
