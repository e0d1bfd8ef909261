"""What was fused, and why the rest was not: computed by the guards that decide at each call."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from .call import read_call
from .gated_mlp import FastLoraGatedMLP, read_block, why_not_block
from .guards import why_not
from .install import FORWARD_REPLACED, forward_replaced, lora_layers, why_not_installed
from .layer import FastLoraLayer
from .scope import next_pattern, usable_members
from .shared_input import FastLoraSharedInput, fast_children

NOT_WRAPPED = (
    "no LoRA layer found in {}: wrap the model first, get_peft_model(model, FastLoraConfig(...)), or pass the model "
    "that get_peft_model returned"
)


@dataclass(frozen=True)
class FusionRow:
    """One adapted layer, or one block of them that runs as one node."""

    name: str
    kind: str  # "gated_mlp", "shared_input" or "linear"
    path: str  # "fused" or "stock"
    reason: str | None  # stock: completes "the fused path was not used because ..."; fused: why no larger node has it
    members: tuple[str, ...]


@dataclass(frozen=True)
class FusionReport:
    """Every adapted layer of a model, each in exactly one row."""

    rows: tuple[FusionRow, ...]

    @property
    def counts(self) -> dict[tuple[str, str], int]:
        """How many rows there are of each (kind, path)."""
        return dict(Counter((row.kind, row.path) for row in self.rows))

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and lists, for JSON. The totals have keys like "linear/fused"."""
        counts = {f"{kind}/{path}": n for (kind, path), n in self.counts.items()}
        return {"rows": [{**asdict(row), "members": list(row.members)} for row in self.rows], "counts": counts}

    def __str__(self) -> str:
        cells = [("name", "kind", "path", "reason")]
        cells += [(row.name, row.kind, row.path, row.reason or "") for row in self.rows]
        name, kind, path, _ = (max(map(len, column)) for column in zip(*cells, strict=True))
        lines = [f"{a:{name}}  {b:{kind}}  {c:{path}}  {d}".rstrip() for a, b, c, d in cells]
        totals = ", ".join(f"{n} {kind} {path}" for (kind, path), n in self.counts.items())
        return "\n".join([*lines, f"total: {totals}"])


def fusion_report(model: nn.Module) -> FusionReport:
    """Say for every adapted layer whether the next call will be fused, and if not, why.

    What depends on the input of a call (its dtype, its device) is not known here and is decided at the call.

    Raises:
        ValueError: the model has no LoRA layer.
    """
    layers = lora_layers(model)
    if not layers:
        raise ValueError(NOT_WRAPPED.format(type(model).__name__))
    rows: list[FusionRow] = []
    notes: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, FastLoraSharedInput) and not forward_replaced(module):
            rows += _owner_rows(name, module, notes)
    covered = {member for row in rows for member in row.members}
    rows += [_layer_row(name, layer, notes.get(name)) for name, layer in layers if name not in covered]
    order = {name: position for position, (name, _) in enumerate(layers)}
    return FusionReport(tuple(sorted(rows, key=lambda row: order[row.members[0]])))


def _owner_rows(name: str, owner: Any, notes: dict[str, str]) -> list[FusionRow]:
    """The rows of nodes that this owner runs for several layers; `notes` gets what the others may say about it."""
    prefix = f"{name}." if name else ""
    layers = [child for child, _ in fast_children(owner)]
    note = None
    if isinstance(owner, FastLoraGatedMLP):
        refusal = why_not_block(read_block(owner))
        if refusal is None:
            return [FusionRow(name, "gated_mlp", "fused", None, tuple(prefix + child for child in layers))]
        note = f"not as one block: {refusal.reason}"
    pattern = next_pattern(owner)
    if not owner.fast_lora_options.fuse_qkv:
        note = note or "fuse_qkv is False"
    elif pattern.groups is None and not pattern.given_up:
        note = note or "not yet observed: the first forward shows which projections read one tensor"
    elif pattern.mistakes:
        note = note or "its owner called it with other tensors than its siblings from time to time"
    notes.update((prefix + child, note) for child in layers if note)
    usable = owner.fast_lora_options.fuse_qkv and not pattern.given_up
    groups = [list(usable_members(owner, group, None)) for group in pattern.groups or ()] if usable else []
    groups = [group for group in groups if len(group) > 1]
    names = [name] if len(groups) == 1 else [f"{name}[{', '.join(group)}]" for group in groups]
    return [
        FusionRow(label, "shared_input", "fused", None, tuple(prefix + child for child in group))
        for label, group in zip(names, groups, strict=True)
    ]


def _layer_row(name: str, layer: Any, note: str | None) -> FusionRow:
    """The row of a layer that runs alone; a fused one may still say why it is not part of a larger node."""
    reason = _reason(layer)
    if reason is not None:
        return FusionRow(name, "linear", "stock", reason, (name,))
    return FusionRow(name, "linear", "fused", note, (name,))


def _reason(layer: Any) -> str | None:
    if not isinstance(layer, FastLoraLayer):
        return why_not_installed(layer) or "the layer is stock PEFT's; fuse(model) makes it fast"
    if forward_replaced(layer):
        return FORWARD_REPLACED
    refusal = why_not(read_call(layer))
    return refusal.reason if refusal is not None else None
