"""What the demo shows in the end: a table, the fusion report, the answers, the checks, and a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from rich import box
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

NAMES = {"stock": "LoraConfig", "fast": "FastLoraConfig"}
COLORS = {"stock": "#8a8f98", "fast": "#d9480f"}
SHOWN_ROWS = 5  # of the fusion report in the terminal; a file has all of them


@dataclass(frozen=True)
class Check:
    """One thing that has to hold, and what was measured."""

    name: str
    passed: bool
    measured: str


def largest_difference(arms: dict[str, dict[str, Any]]) -> float | None:
    """The largest difference between the two loss curves; None with one arm only."""
    if len(arms) < 2:
        return None
    return max(abs(a - b) for a, b in zip(arms["stock"]["losses"], arms["fast"]["losses"], strict=True))


def results_table(arms: dict[str, dict[str, Any]]) -> Table:
    """One column for each arm, and how the fast one compares."""
    table = Table(box=box.ROUNDED, title="The same training with stock PEFT and with peft_fastlora")
    table.add_column("")
    for arm in arms:
        table.add_column(NAMES[arm], justify="right")
    if len(arms) == 2:
        table.add_column("difference", justify="right")
    rows = (
        ("final loss", "losses", "{:.5f}", False),
        ("saved activations, MiB", "saved_activation_mib", "{:,.1f}", True),
        ("peak over the model, MiB", "peak_mib", "{:,.1f}", True),
        ("median step, s", "median_step_seconds", "{:.3f}", True),
    )
    for label, key, form, relative in rows:
        values = [_last(arm[key]) for arm in arms.values()]
        cells = [form.format(value) for value in values]
        if len(values) == 2:
            cells.append(_difference(*values, relative=relative))
        table.add_row(label, *cells)
    largest = largest_difference(arms)
    if largest is not None:
        table.add_row("largest loss difference", "", "", f"{largest:.2e}")
    return table


def _last(value: Any) -> float:
    return float(value[-1] if isinstance(value, list) else value)


def _difference(stock: float, fast: float, relative: bool) -> str:
    return f"{fast / stock - 1:+.1%}" if relative and stock > 0 else f"{fast - stock:+.1e}"


def fusion_lines(fusion: dict[str, Any]) -> list[str]:
    """Totals and the first rows of a fusion report, without the reasons' repetition over hundreds of layers."""
    totals = ", ".join(f"{count} {key.replace('/', ' ')}" for key, count in fusion["counts"].items())
    rows = fusion["rows"]
    lines = [f"Fusion report: {totals}"]
    for row in rows[:SHOWN_ROWS]:
        reason = f": {row['reason']}" if row["reason"] else ""
        lines.append(f"  {row['path']:5}  {row['kind']}  {row['name']}{reason}")
    if len(rows) > SHOWN_ROWS:
        lines.append(f"  ... {len(rows) - SHOWN_ROWS} more in fusion_report.txt")
    return lines


def print_report(console: Console, arms: dict[str, dict[str, Any]], checks: list[Check], notes: list[str]) -> None:
    """Print everything that the user should read."""
    for note in notes:
        console.print(note, markup=False, highlight=False)
    console.print(results_table(arms))
    if "fast" in arms:
        for line in fusion_lines(arms["fast"]["fusion"]):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print()
        labels = {"question": "Question", "before": "Before training", "after": "After training"}
        for key, label in labels.items():
            console.print(f"{label}: {arms['fast']['answer'][key]}", markup=False, highlight=False)
        console.print()
    for check in checks:
        style, word = ("green", "ok  ") if check.passed else ("bold red", "FAIL")
        console.print(f"[{style}]{word}[/] {check.name}: {check.measured}", highlight=False)


def write_report(path: Path, arms: dict[str, dict[str, Any]], checks: list[Check], notes: list[str]) -> None:
    """The same as in the terminal, as plain text."""
    with path.open("w", encoding="utf-8") as file:
        print_report(Console(file=file, width=119), arms, checks, notes)


def plot(path: Path, arms: dict[str, dict[str, Any]], title: str) -> None:
    """Draw the loss curves, and bars for memory."""
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), width_ratios=(1.5, 1), layout="constrained")
    figure.suptitle(title, fontsize=11)
    _plot_losses(left, arms)
    _plot_memory(right, arms)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _plot_losses(axes: Axes, arms: dict[str, dict[str, Any]]) -> None:
    # the curves lie on each other, so the first is a wide band and the second a thin line on it
    styles: dict[str, dict[str, Any]] = {"stock": {"linewidth": 6, "alpha": 0.55}, "fast": {"linewidth": 1.6}}
    for arm, result in arms.items():
        steps = range(1, len(result["losses"]) + 1)
        axes.plot(steps, result["losses"], color=COLORS[arm], label=NAMES[arm], solid_capstyle="round", **styles[arm])
    largest = largest_difference(arms)
    axes.set_title("Training loss" if largest is None else f"Training loss (largest difference {largest:.1e})")
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False, loc="upper right")


def _plot_memory(axes: Axes, arms: dict[str, dict[str, Any]]) -> None:
    quantities = {"saved_activation_mib": "kept for\nbackward", "peak_mib": "peak over\nthe loaded model"}
    width = 0.8 / len(arms)
    for place, (arm, result) in enumerate(arms.items()):
        positions = [index + (place - (len(arms) - 1) / 2) * width for index in range(len(quantities))]
        bars = axes.bar(positions, [result[key] for key in quantities], width * 0.94, color=COLORS[arm])
        axes.bar_label(bars, fmt="{:,.0f}", padding=2)
    axes.set_xticks(range(len(quantities)), list(quantities.values()))
    axes.tick_params(axis="x", length=0)
    axes.margins(y=0.12)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.set_title("Memory, MiB")
