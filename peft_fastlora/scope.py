"""Observing which projections read one tensor, and computing those together.

Which projections share a tensor is not read off their names; it is observed. While the forward of the module that owns
them runs, a `Scope` is open and sees every call of a fast layer inside. Calls with the same tensor object at the same
version form a group. From the next forward on, the first member of a known group computes it, and the others take
their result, once, if they are called with that very tensor; whoever is called with anything else computes alone. A
group that was computed and not taken in full was a mistake: what was right about it is kept for good, or else the next
forward is observed anew; all is given up at the second mistake. A scope ends with the owner's forward, also by an
exception, and nothing outlives it.

Activation checkpointing runs a forward again in backward and must see it save the same tensors. A pattern is therefore
never changed while a forward that ran under saved-tensor hooks still waits for its backward (`_waiting`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from .call import Call, read_call, read_projection
from .functions import lora_group
from .guards import why_not_grouped

Group = tuple[str, ...]  # names of children, in the order in which they are called


@dataclass(frozen=True)
class Pattern:
    """What is known about an owner: which children share a tensor, and how often that turned out wrong."""

    groups: tuple[Group, ...] | None = None  # None: not yet observed
    mistakes: int = 0

    @property
    def given_up(self) -> bool:
        return self.mistakes > 1

    def group_of(self, name: str) -> Group | None:
        return next((group for group in self.groups or () if name in group), None)


# Nodes of forward passes that ran under saved-tensor hooks and whose backward has not come, by owner: see above.
_waiting: WeakKeyDictionary[Any, WeakSet[Any]] = WeakKeyDictionary()


class Waiting:
    """A node of such a pass. Its hook holds this object, so it lives as long as the node."""


def _wait_for_backward(owner: Any, node: Any) -> None:
    """Count as waiting until the last backward of `node` came by, or until its graph is gone."""
    waiting, this = _waiting.setdefault(owner, WeakSet()), Waiting()
    waiting.add(this)

    def done(*_: Any) -> None:
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            waiting.discard(this)

    node.register_hook(done)


def next_pattern(owner: Any) -> Pattern:
    """The pattern that the next forward of this owner uses."""
    used, upcoming = owner.fast_lora_pattern, owner.fast_lora_upcoming
    return used if upcoming is None or _waiting.get(owner) else upcoming  # type: ignore[no-any-return]


_thread = threading.local()


def open_scopes() -> list[Scope]:
    """The open scopes of this thread, the innermost last."""
    if not hasattr(_thread, "scopes"):
        _thread.scopes = []
    return _thread.scopes  # type: ignore[no-any-return]


def scope_of(layer: Any) -> Scope | None:
    """The innermost open scope, if it is one of the layer's owner."""
    if torch.compiler.is_compiling():
        return None
    scopes = open_scopes()
    return scopes[-1] if scopes and id(layer) in scopes[-1].names else None


def _state(call: Call) -> Any:
    """All that an output depends on. It is taken only if nothing of that changed since it was computed."""
    tensors = [(id(tensor), tensor._version, tensor.requires_grad) for _, tensor in call.tensors()]
    scalings = [id(s) if isinstance(s, Tensor) else s for s in (term.scaling for term in call.terms)]
    return torch.is_grad_enabled(), call.autocast, call.layer.training, tensors, scalings


@dataclass
class Pending:
    """An output that was computed for a member that has not been called yet."""

    x: Tensor
    state: Any  # all that the output depends on
    output: Tensor


@dataclass
class Scope:
    """One run of an owner's forward."""

    owner: Any
    names: Mapping[int, str]  # of the owner's fast layers, by identity
    pattern: Pattern
    calls: list[tuple[str, Tensor, int]] = field(default_factory=list)  # holds the tensors, so identities stay unique
    pending: dict[str, Pending] = field(default_factory=dict)
    mistaken: bool = False
    nodes: list[Any] = field(default_factory=list)  # of the outputs so far

    def call(self, layer: Any, x: Tensor) -> Tensor | None:
        """The layer's output from a node that it shares with its siblings, or None where it must compute alone."""
        name = self.names[id(layer)]
        if type(x) is not Tensor or x.is_inference():  # inference tensors have no version: a change would go unseen
            return None
        first = not any(called == name for called, _, _ in self.calls)
        self.calls.append((name, x, x._version))
        ready = self.pending.pop(name, None)
        if ready is not None:
            call = read_call(layer, x)
            if ready.x is x and why_not_grouped(call) is None and ready.state == _state(call):
                return ready.output
            self.mistaken = True
            return None
        group = self.pattern.group_of(name)
        if group is None or not first or self.pattern.given_up or self.mistaken:
            return None
        return self.compute(name, group, x)

    def compute(self, name: str, group: Group, x: Tensor) -> Tensor | None:
        """Compute what can be computed of a group; keep the outputs of the others until they are called."""
        called = {called for called, _, _ in self.calls if called != name}
        fast = set(self.names.values()) - called
        members = usable_members(self.owner, [member for member in group if member in fast], x)
        if name not in members or len(members) < 2:
            return None
        outputs = lora_group(x, [read_projection(call) for call in members.values()])
        for (member, call), output in zip(members.items(), outputs, strict=True):
            self.pending[member] = Pending(x, _state(call), output)
        return self.pending.pop(name).output

    def watch(self, output: Tensor) -> None:
        """Let the pattern stay as it is until backward came by, where the forward may be run again."""
        node = output.grad_fn
        if node is None or any(node is seen for seen in self.nodes):
            return
        self.nodes.append(node)
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            _wait_for_backward(self.owner, node)

    def learned(self) -> Pattern | None:
        """The pattern that this run suggests for the next one, or None if it is the one that was used."""
        if self.pattern.given_up or not self.calls:
            return None
        seen = self.observed()
        if self.mistaken or self.pending:
            known = self.pattern.groups or ()
            kept = (tuple(n for n in group if n in old) for group in seen for old in known)
            return Pattern(tuple(group for group in kept if len(group) > 1) or None, self.pattern.mistakes + 1)
        if self.pattern.mistakes and self.pattern.groups is not None:
            return None
        old = tuple(g for g in self.pattern.groups or () if not any(set(g) & set(group) for group in seen))
        groups = tuple(sorted((*old, *seen)))
        return None if groups == self.pattern.groups else Pattern(groups, self.pattern.mistakes)

    def observed(self) -> list[Group]:
        """The groups of children that were called once, with one tensor at one version."""
        readers: dict[tuple[int, int], list[str]] = {}
        names = [name for name, _, _ in self.calls]
        for name, x, version in self.calls:
            if names.count(name) == 1:
                readers.setdefault((id(x), version), []).append(name)
        return [tuple(group) for group in readers.values() if len(group) > 1]


def usable_members(owner: Any, group: Iterable[str], x: Tensor | None) -> dict[str, Call]:
    """The members of a group that can be computed together now; the others compute alone, each for its own reason."""
    layers = {name: owner._modules.get(name) for name in group}
    calls = {name: read_call(layer, x) for name, layer in layers.items() if hasattr(layer, "fast_lora_options")}
    return {name: call for name, call in calls.items() if why_not_grouped(call) is None}
