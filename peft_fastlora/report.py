"""What was fused, and why the rest was not: computed by the guards that decide at each call."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from .guards import read_call, why_not
from .install import lora_layers, why_not_installed
from .layer import FastLoraLayer

NOT_WRAPPED = (
    "no LoRA layer found in {}: wrap the model first, get_peft_model(model, FastLoraConfig(...)), or pass the model "
    "that get_peft_model returned"
)


@dataclass(frozen=True)
class FusionRow:
    """One adapted layer, or one block of them that runs as one node."""

    name: str
    kind: str  # "linear"
    path: str  # "fused" or "stock"
    reason: str | None  # completes "the fused path was not used because ..."
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
    return FusionReport(tuple(_row(name, layer) for name, layer in layers))


def _row(name: str, layer: Any) -> FusionRow:
    reason = _reason(layer)
    return FusionRow(name, "linear", "fused" if reason is None else "stock", reason, (name,))


def _reason(layer: Any) -> str | None:
    if isinstance(layer, FastLoraLayer):
        refusal = why_not(read_call(layer))
        return refusal.reason if refusal is not None else None
    return why_not_installed(layer) or "the layer is stock PEFT's; fuse(model) makes it fast"
