"""Fine-tune a model twice, with LoraConfig and with FastLoraConfig, and compare losses, memory, time and the adapters.

Each arm runs in a process of its own, so that its memory is its own. A third process, without peft_fastlora, loads the
adapter that the fast arm saved. Ends with exit status 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from demo_model import DEFAULT_MODEL, ROOT, Settings, environment
from demo_report import Check, largest_difference, plot, print_report, write_report
from rich.console import Console

SCRIPTS = ROOT / "scripts"
ADAPTER_FILE = "adapter_model.safetensors"

# What rounding may change, by the base model's dtype. The arms compute the same products in the same dtypes and
# differ in the order of sums: nearly nothing in float32. In bfloat16 (and over 4-bit weights computed in it) one
# rounding is 2^-9 of a value, and dozens of layers and all earlier steps lie between it and a loss: over 30 steps of
# the default model, stock PEFT in bfloat16 was 2.6e-2 away from itself in float32, and 2.5e-2 from the fast arm.
LOSS_BOUNDS = {"float32": 1e-4, "bfloat16": 5e-2}
LOGIT_BOUNDS = {"float32": ("max_difference", 1e-4), "bfloat16": ("relative_difference", 2e-2)}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="demo.sh",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, help="folder, or name on the hub, of a causal language model")
    add("--data", default=str(SCRIPTS / "data" / "lora_questions.jsonl"), help="JSON lines with question and answer")
    add("--steps", type=positive, default=30, help="optimizer steps of each arm")
    add("--rank", type=positive, default=16, help="rank of the adapters; alpha is twice that")
    dtypes = ("auto", "bfloat16", "float32")
    add("--dtype", choices=dtypes, default="auto", help="of the base model; auto: bfloat16 where it is fast")
    add("--load-in-4bit", action="store_true", help="quantise the base model to NF4 with bitsandbytes")
    add("--batch-size", type=positive, default=4, help="rows in a step")
    add("--max-length", type=positive, default=256, help="tokens in a row; longer ones are cut")
    add("--learning-rate", type=float, default=1e-3, help="of AdamW, constant")
    add("--seed", type=int, default=0, help="of the new adapter, the order of the data, and dropout")
    add("--lora-dropout", type=float, default=0.0, help="dropout probability in the adapters")
    add("--use-dora", action="store_true", help="DoRA, which runs on the stock path: shows that this is reported")
    add("--gradient-checkpointing", action="store_true", help="keep only the input of each decoder layer")
    add("--arms", nargs="+", choices=("stock", "fast"), default=["stock", "fast"], help="which of the two to train")
    add("--output", type=Path, default=ROOT / "demo_output", help="folder for everything that is written")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    """A positive integer from the command line."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def suitable_dtype() -> str:
    """bfloat16 where the machine multiplies it natively.

    Without that, PyTorch's products of bfloat16 matrices are 5 to 20 times slower than those of float32 on a CPU.
    """
    import torch

    if torch.cuda.is_available():
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    return "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"


def settings_from(args: argparse.Namespace) -> Settings:
    values = {field.name: getattr(args, field.name) for field in fields(Settings)}
    if args.dtype == "auto":
        values["dtype"] = suitable_dtype()
    for name in ("data", "model"):
        # the other processes may run in another folder
        if Path(values[name]).exists():
            values[name] = str(Path(values[name]).resolve())
    return Settings(**values)


def run_script(settings: Settings, name: str, *arguments: str) -> None:
    """Run one of the demo's other scripts; its progress and errors go to the terminal.

    Raises:
        SystemExit: it failed.
    """
    command = [sys.executable, str(SCRIPTS / name), *arguments]
    status = subprocess.run(command, env=environment(settings)).returncode
    if status != 0:
        raise SystemExit(f"{name} failed with exit status {status}")


def run_all(settings: Settings, arm_names: list[str], output: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Train the arms and load the fast one's adapter elsewhere; returns results by arm, and that of the check."""
    with tempfile.TemporaryDirectory() as work:
        for arm in arm_names:
            run_script(settings, "demo_train.py", arm, settings.to_json(), str(output), work)
        arms = {arm: _read(Path(work) / f"{arm}.json") for arm in arm_names}
        if "fast" not in arm_names:
            return arms, None
        run_script(settings, "demo_check.py", settings.to_json(), str(output / "adapter_fast"), work)
        return arms, _read(Path(work) / "check.json")


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def all_checks(settings: Settings, arms: dict[str, Any], reloaded: dict[str, Any] | None, output: Path) -> list[Check]:
    """Everything that has to hold, as far as the arms that ran can tell."""
    checks = []
    if len(arms) == 2:
        checks += [*check_arms(settings, arms), check_keys(output)]
    # DoRA and active dropout run on the stock path, and another model may have layers that are not covered
    plain = not settings.use_dora and settings.lora_dropout == 0
    if "fast" in arms and settings.model == DEFAULT_MODEL and plain:
        checks.append(check_fused(arms["fast"]["fusion"]))
    if reloaded is not None:
        checks += check_reloaded(settings, reloaded)
    return checks


def check_arms(settings: Settings, arms: dict[str, Any]) -> list[Check]:
    """Both arms start from the same adapter and follow the same curve."""
    same = arms["stock"]["initial_adapter"] == arms["fast"]["initial_adapter"]
    difference = largest_difference(arms)
    bound = LOSS_BOUNDS[settings.dtype]
    assert difference is not None
    return [
        Check("the arms start from the same adapter", same, "equal bytes" if same else "the bytes differ"),
        Check("the loss curves agree", difference <= bound, f"largest difference {difference:.2e}, bound {bound:.0e}"),
    ]


def check_keys(output: Path) -> Check:
    """The two saved adapters have the same tensors: names, shapes and dtypes."""
    from safetensors import safe_open

    found = []
    for arm in ("stock", "fast"):
        with safe_open(output / f"adapter_{arm}" / ADAPTER_FILE, framework="np") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
            found.append({key: (part.get_shape(), part.get_dtype()) for key, part in slices.items()})
    same = found[0] == found[1] and len(found[0]) > 0
    return Check("the saved adapters have the same keys", same, f"{len(found[0])} stock, {len(found[1])} fast")


def check_fused(fusion: dict[str, Any]) -> Check:
    """Every adapted layer of the default model runs fused."""
    total = sum(len(row["members"]) for row in fusion["rows"])
    fused = sum(len(row["members"]) for row in fusion["rows"] if row["path"] == "fused")
    return Check("every adapted layer is fused", fused == total > 0, f"{fused} of {total} layers")


def check_reloaded(settings: Settings, reloaded: dict[str, Any]) -> list[Check]:
    """Stock PEFT computes the fast arm's logits from the adapter that it saved, and others without the adapter."""
    key, bound = LOGIT_BOUNDS[settings.dtype]
    difference, without = reloaded["adapted"][key], reloaded["without_adapter"][key]
    label = "largest difference" if key == "max_difference" else "largest difference / largest logit"
    agreement = f"same next token at {reloaded['adapted']['same_next_token']:.1%} of the positions"
    return [
        Check(
            "stock PEFT without this package loads the fast adapter and gives its logits",
            difference <= bound,
            f"{label} {difference:.2e}, bound {bound:.0e}; {agreement}",
        ),
        # otherwise the comparison above would say nothing
        Check("the adapter changes the logits", without > bound, f"without it, {label} {without:.2e}"),
    ]


def notes_on(settings: Settings, args: argparse.Namespace, arms: dict[str, Any]) -> list[str]:
    """What was run, in a few lines."""
    first = next(iter(arms.values()))
    base = "4-bit NF4, computing in " * settings.load_in_4bit + settings.dtype
    slow = args.dtype == "auto" and settings.dtype == "float32"
    reason = " (this machine has no fast bfloat16 products)" if slow else ""
    return [
        f"model {settings.model}, base {base}{reason}, rank {settings.rank}, {settings.steps} steps of "
        f"{settings.batch_size} rows, {first['tokens_per_step']:.0f} tokens a step, seed {settings.seed}",
        f"machine {first['machine']['gpu'] or first['machine']['cpu']}, {first['machine']['torch_threads']} threads; "
        + ", ".join(f"{name} {version}" for name, version in first["versions"].items() if version),
    ]


def main() -> int:
    args = parse_arguments()
    settings = settings_from(args)
    output = args.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    if settings.model == DEFAULT_MODEL:
        run_script(settings, "demo_model.py")
    arms, reloaded = run_all(settings, sorted(set(args.arms), reverse=True), output)
    checks = all_checks(settings, arms, reloaded, output)
    notes = notes_on(settings, args, arms)

    plot(output / "loss_curves.png", arms, f"{settings.model}, {settings.dtype}, rank {settings.rank}")
    write_report(output / "report.txt", arms, checks, notes)
    results = {
        "settings": asdict(settings),
        "arms": arms,
        "largest_loss_difference": largest_difference(arms),
        "reloaded_with_stock_peft": reloaded,
        "checks": [asdict(check) for check in checks],
    }
    (output / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    console = Console()
    console.print()
    print_report(console, arms, checks, notes)
    console.print(f"\nwritten to {output}: " + ", ".join(sorted(path.name for path in output.iterdir())))
    return 0 if all(check.passed for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
