"""Which modules are MLP blocks: found out by what their forward does, not by what they or their children are called.

The forward that a module really has is run once on a symbolic stand-in. The only things it may do are to call
children, each once, and to multiply:

    down(act(gate(x)) * up(x))                 gated, factors in either order
    gate, up = gate_up(x).chunk(2, -1)         packed: one projection for both
    down(act(up(x)))                           plain

A look at the bytecode first makes this sound: a plain function of (self, x) whose names are the children and nothing
that could read other state, so it does the same at every later call, in training and in evaluation. All else is
refused with a reason. `is_linear_forward` asks the same way whether a subclass of `nn.Linear` with a forward of its
own still computes x W^T + b.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from .activations import FUNCTIONS, Activation

_TORCH_NAMES = frozenset({"torch", "nn", "functional", "F", "chunk"} | {function.__name__ for function in FUNCTIONS})


@dataclass(frozen=True)
class Block:
    """The structure of an MLP block."""

    form: str  # "gated", "packed" or "plain"
    inputs: tuple[str, ...]  # children that read x, in the order in which they are called
    gate: int  # which of the inputs (packed: which half) goes through the activation
    activation: str | Activation  # a child, or a function that forward calls itself
    down: str

    @property
    def projections(self) -> tuple[str, ...]:
        return (*self.inputs, self.down)


class Refused(Exception):
    """The symbolic run did something that a block does not do; the message says what."""


def block_of(module: nn.Module) -> Block | str:
    """The structure of the block that this module's forward computes, or the reason why it is none."""
    override = module.__dict__.get("forward")
    if override is not None:
        if not isinstance(override, types.MethodType) or override.__self__ is not module:
            return "its forward was replaced on the instance"
        return _block_of_function(override.__func__, frozenset(module._modules))
    return _block_of_function(type(module).forward, frozenset(module._modules))


@cache
def _block_of_function(function: Any, children: frozenset[str]) -> Block | str:
    reason = _why_not_plain(function, children | _TORCH_NAMES)
    if reason is not None:
        return reason
    owner = _Owner(children)
    try:
        result = function(owner, Value("x"))
    except Refused as refused:
        return str(refused)
    except Exception as error:  # an operation that `Value` does not have: whatever it raises, this is no block
        return f"its forward does something else than calling children and multiplying ({error})"
    return _match(result, owner.__dict__["calls"])


def _why_not_plain(function: Any, names: frozenset[str]) -> str | None:
    """The bytecode gate: a plain function of (self, x) that uses no other names."""
    if not isinstance(function, types.FunctionType) or function.__closure__:
        return "its forward is not a plain function"
    code = function.__code__
    simple = code.co_argcount == 2 and not code.co_kwonlyargcount and not code.co_flags & (0x04 | 0x08 | 0x20 | 0x80)
    if not simple or any(isinstance(constant, types.CodeType) for constant in code.co_consts):
        return "its forward is not a simple function of one tensor"
    foreign = sorted(set(code.co_names) - names)
    return f"its forward uses {', '.join(foreign)}" if foreign else None


@dataclass(frozen=True)
class Value:
    """A tensor of the symbolic run: the operation that made it and what it was made from."""

    op: str  # "x", "call", "function", "chunk", "mul"
    args: tuple[Any, ...] = ()

    def __mul__(self, other: Any) -> Value:
        if not isinstance(other, Value):
            raise Refused(f"its forward multiplies by {other!r}")
        return Value("mul", (self, other))

    __rmul__ = __mul__

    def __bool__(self) -> bool:
        raise Refused("its forward depends on the values of a tensor")

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Value, ...]:
        if chunks != 2 or dim != -1:
            raise Refused(f"its forward splits a tensor into {chunks} parts along dimension {dim}")
        return Value("chunk", (self, 0)), Value("chunk", (self, 1))

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Value:
        rest = {key: value for key, value in (kwargs or {}).items() if value not in (False, "none")}
        if func not in FUNCTIONS or len(args) != 1 or rest:
            raise Refused(f"its forward calls {getattr(func, '__name__', func)}")
        return Value("function", (FUNCTIONS[func], args[0]))


class _Owner:
    """Stands in for `self`: children can be called, everything else is refused."""

    def __init__(self, children: frozenset[str]) -> None:
        self.__dict__.update(children=children, calls=[])

    def __getattr__(self, name: str) -> Callable[..., Value]:
        if name not in self.__dict__["children"]:
            raise Refused(f"its forward reads self.{name}")

        def child(*args: Any, **kwargs: Any) -> Value:
            if len(args) != 1 or kwargs or not isinstance(args[0], Value):
                raise Refused(f"its forward calls {name} with more than one tensor")
            self.__dict__["calls"].append(name)
            return Value("call", (name, args[0]))

        return child

    def __setattr__(self, name: str, value: Any) -> None:
        raise Refused(f"its forward sets self.{name}")


def _match(result: Any, calls: list[str]) -> Block | str:
    if len(set(calls)) != len(calls):
        return "its forward calls a child twice"
    block = _match_block(result)
    if block is None:
        return "its forward is not down(act(gate(x)) * up(x)), down(act(up(x))) or their packed form"
    modules = {*block.projections, *([block.activation] if isinstance(block.activation, str) else [])}
    if modules != set(calls):
        return f"its forward also calls {', '.join(sorted(set(calls) - modules))}"
    order = sorted(block.inputs, key=calls.index)
    gate = order.index(block.inputs[block.gate]) if block.form == "gated" else block.gate
    return Block(block.form, tuple(order), gate, block.activation, block.down)


def _match_block(result: Any) -> Block | None:
    if not isinstance(result, Value) or result.op != "call":
        return None
    down, hidden = result.args
    if hidden.op != "mul":
        plain = _activated(hidden)
        name = _projection(plain[1]) if plain else None
        return Block("plain", (name,), 0, plain[0], down) if plain and name else None
    for left, right in (hidden.args, hidden.args[::-1]):
        activated = _activated(left)
        if activated is None:
            continue
        activation, pre = activated
        gate, up = _projection(pre), _projection(right)
        if gate and up and gate != up:
            return Block("gated", (gate, up), 0, activation, down)
        if pre.op == right.op == "chunk" and pre.args[0] is right.args[0] and pre.args[1] != right.args[1]:
            packed = _projection(pre.args[0])
            return Block("packed", (packed,), pre.args[1], activation, down) if packed else None
    return None


def _activated(value: Value) -> tuple[str | Activation, Value] | None:
    """(activation, what it was applied to). A child applied to x itself is a projection, not an activation."""
    if value.op in ("call", "function") and isinstance(value.args[1], Value) and value.args[1].op != "x":
        return value.args[0], value.args[1]
    return None


def _projection(value: Value) -> str | None:
    """The child that was applied to x itself."""
    return str(value.args[0]) if value.op == "call" and value.args[1].op == "x" else None


@cache
def is_linear_forward(function: Any) -> bool:
    """Whether a forward is `x @ self.weight.T`, plus `self.bias` where there is one.

    The bias is then added to the rounded product, in the wider dtype of the two, which `F.linear` does not do.
    """
    if _why_not_plain(function, frozenset({"weight", "bias", "T"})) is not None:
        return False
    x, weight, bias = _Operand("x"), _Operand("weight"), _Operand("bias")
    product = x @ weight.T
    try:
        without = function(types.SimpleNamespace(weight=weight, bias=None), x)
        result = function(types.SimpleNamespace(weight=weight, bias=bias), x)
    except Exception:  # an operation that `_Operand` does not have
        return False
    return without == product and result in (product + bias, bias + product)


@dataclass(frozen=True)
class _Operand:
    """A tensor in the symbolic run of a Linear's forward, written as the formula that made it."""

    formula: str

    @property
    def T(self) -> _Operand:
        return _Operand(f"{self.formula}.T")

    def __matmul__(self, other: _Operand) -> _Operand:
        return _Operand(f"({self.formula} @ {other.formula})")

    def __add__(self, other: _Operand) -> _Operand:
        return _Operand(f"({self.formula} + {other.formula})")

    def __bool__(self) -> bool:
        raise TypeError("the forward depends on the values of a tensor")
