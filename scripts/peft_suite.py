"""Run PEFT's own LoRA tests with `FastLoraConfig` in place of `LoraConfig` and compare with stock PEFT.

    python scripts/peft_suite.py                        all tests, both arms
    python scripts/peft_suite.py --sample --jobs 2      a sample for every day
    python scripts/peft_suite.py -k merge --reuse-stock

The tests come with the source distribution of the installed PEFT, which is downloaded to `.cache/` once. Models that
the tests load from the hub are made on this machine, tiny and with random weights; the hub is off. A test that passes
for stock and does not pass for us is a new failure: exit status 1, as when hardly anything ran through fast layers.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peft_suite_models import ensure_hub
from peft_suite_source import ensure_tests

SCRIPTS = Path(__file__).resolve().parent
CACHE = SCRIPTS.parent / ".cache"

# Test files with LoRA tests that run without a hub, or with the models of `peft_suite_models.py`.
FILES = (
    "test_arrow.py",
    "test_bdlora.py",
    "test_config.py",
    "test_custom_models.py",
    "test_decoder_models.py",
    "test_helpers.py",
    "test_initialization.py",
    "test_lora_conversion.py",
    "test_lora_ga.py",
    "test_lora_intruders.py",
    "test_lora_variants.py",
    "test_lorafa.py",
    "test_loraplus.py",
    "test_low_level_api.py",
    "test_mapping.py",
    "test_mixed.py",
    "test_other.py",
    "test_riemannian_lora.py",
    "test_target_parameters.py",
    "test_trainable_tokens.py",
    "test_tuners_utils.py",
    "test_velora.py",
    "test_xlora.py",
)

# Tests that pass for stock and cannot pass for us, since they compare the name of a class with a literal one.
KNOWN_DIFFERENCES = {
    "test_custom_models.py::TestLayerRepr::test_repr_lora_linear": "expects the repr to start with 'lora.Linear'",
    "test_custom_models.py::TestLayerRepr::test_repr_lora_conv1d": "expects the repr to start with 'lora.Linear'",
    "test_lora_conversion.py::TestLoraConversion::test_fixed_rank_lora_config": (
        "checks that PEFT converts to our class; PEFT makes a stock configuration, whatever its tests import"
    ),
    **{
        f"test_tuners_utils.py::TestModelAndLayerStatus::{name}": "expects the type name 'LoraModel'"
        for name in (
            "test_adapter_model_type_large",
            "test_adapter_model_type_small",
            "test_model_status_with_modules_to_save",
            "test_model_status_with_trainable_tokens",
            "test_model_target_parameters",
            "test_model_target_parameters_and_target_modules",
        )
    },
    **{
        f"test_tuners_utils.py::TestModelAndLayerStatus::{name}": "expects the type name 'lora.Linear'"
        for name in ("test_module_type_large", "test_module_type_small", "test_target_parameters_and_target_modules")
    },
}

# What counts as well for a test; expected failures are PEFT's own affair.
GOOD = ("passed", "xfailed")

SAMPLE_SHARE = 0.1

# With less than this per test that passed, our layers were not what was tested.
LEAST_PER_TEST = {"fast layers built": 1.0, "fused forwards": 1.0}

Tests = dict[str, dict[str, Any]]


def main() -> int:
    options = parse_arguments()
    root = ensure_tests(CACHE, importlib.metadata.version("peft"))
    hub = ensure_hub(CACHE)
    arms = ("stock", "fast") if options.arm == "both" else (options.arm,)
    reports = {arm: run_arm(arm, options, root, hub) for arm in arms}
    failures: dict[str, str] = {}
    if options.arm == "both":
        failures = new_failures(reports["stock"]["tests"], reports["fast"]["tests"])
    print("\n" + table(reports))
    print_failures(failures, reports)
    shortages = too_few(reports["fast"]) if "fast" in arms and options.expression is None else []
    for shortage in shortages:
        print(f"\nThe tests did not test the fast path: {shortage}.")
    if options.json:
        Path(options.json).write_text(json.dumps(summary(options, reports, failures), indent=2) + "\n")
    return 1 if failures or shortages else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sample", action="store_true", help=f"run {SAMPLE_SHARE:.0%} of the tests of each file")
    parser.add_argument("--arm", choices=("stock", "fast", "both"), default="both", help="default: both, and compare")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes that run tests")
    parser.add_argument("-k", dest="expression", metavar="EXPR", help="only tests that match, as for pytest")
    parser.add_argument("--reuse-stock", action="store_true", help="take stock's outcomes from an earlier run if any")
    parser.add_argument("--json", metavar="FILE", help="write the counts of the closing table")
    options = parser.parse_args()
    if options.arm != "stock" and importlib.util.find_spec("peft_fastlora") is None:
        parser.error('peft_fastlora is not installed; run `pip install -e ".[test]"` in the project first')
    return options


def run_arm(arm: str, options: argparse.Namespace, root: Path, hub: Path) -> dict[str, Any]:
    """Run the tests of one arm, or find what they came to in an earlier run; returns the plugin's report."""
    CACHE.joinpath("peft_suite").mkdir(exist_ok=True)
    file = CACHE / "peft_suite" / f"{arm}-{fingerprint(options)}.json"
    if arm == "stock" and options.reuse_stock and file.is_file():
        print(f"== stock: outcomes of an earlier run, {file}")
        return json.loads(file.read_text())
    print(f"== {arm}: PEFT {importlib.metadata.version('peft')}", flush=True)
    file.unlink(missing_ok=True)
    start = time.monotonic()
    status = subprocess.run(pytest_command(arm, options, root, file), cwd=root, env=environment(root, hub)).returncode
    if status not in (0, 1):
        raise SystemExit(f"pytest stopped with status {status} in the {arm} arm; see its output above")
    report = json.loads(file.read_text())
    report["seconds"] = round(time.monotonic() - start)
    file.write_text(json.dumps(report, indent=1, sort_keys=True))
    return report


def pytest_command(arm: str, options: argparse.Namespace, root: Path, report: Path) -> list[str]:
    present = [name for name in FILES if (root / "tests" / name).is_file()]
    absent = sorted(set(FILES) - set(present))
    if absent:
        print(f"not in this release of PEFT: {', '.join(absent)}", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--no-summary", "--disable-warnings"]
    command += ["-p", "no:cacheprovider", "-p", "peft_suite_plugin", "--suite-arm", arm, "--suite-report", str(report)]
    if options.sample:
        command += ["--suite-sample", str(SAMPLE_SHARE)]
    if options.expression:
        command += ["-k", options.expression]
    if options.jobs > 1:
        command += ["-n", str(options.jobs)]
    return command + [f"tests/{name}" for name in present]


def environment(root: Path, hub: Path) -> dict[str, str]:
    """The environment of the tests: no hub, no cache or token of the user, the same order of sets in all processes."""
    ours = ("HF_", "HUGGINGFACE_", "TRANSFORMERS_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    paths = [str(root), str(SCRIPTS), *filter(None, [kept.get("PYTHONPATH")])]
    return {
        "OMP_NUM_THREADS": "1",  # the models are tiny, and several processes may run
        "TOKENIZERS_PARALLELISM": "false",
        **kept,
        "HF_HOME": str(CACHE / "peft_suite" / "hf_home"),
        "HF_HUB_CACHE": str(hub),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join(paths),
    }


def fingerprint(options: argparse.Namespace) -> str:
    """Stands for everything that stock's outcomes depend on."""
    versions = [importlib.metadata.version(name) for name in ("peft", "transformers", "torch", "accelerate")]
    sources = [(SCRIPTS / name).read_text() for name in ("peft_suite_plugin.py", "peft_suite_models.py")]
    selection = [options.sample and SAMPLE_SHARE, options.expression, FILES]
    return hashlib.sha256(json.dumps([versions, sources, selection]).encode()).hexdigest()[:12]


def new_failures(stock: Tests, fast: Tests) -> dict[str, str]:
    """Tests that are good for stock and not for us, with what they came to."""
    outcomes = {name: fast.get(name, {}).get("outcome", "vanished") for name in stock}
    return {
        name: outcomes[name]
        for name, test in stock.items()
        if test["outcome"] in GOOD and outcomes[name] not in GOOD and not is_known(name)
    }


def is_known(name: str) -> bool:
    return name.removeprefix("tests/").split("[")[0] in KNOWN_DIFFERENCES


def too_few(report: Mapping[str, Any]) -> list[str]:
    """What ran too rarely through our code for the outcomes to mean anything."""
    passed = outcome_counts(report)["passed"]
    counts = report["counts"]
    return [
        f"{counts.get(name, 0)} {name} in {passed} tests that passed, at least {least * passed:.0f} expected"
        for name, least in LEAST_PER_TEST.items()
        if counts.get(name, 0) < least * passed
    ]


def outcome_counts(report: Mapping[str, Any]) -> Counter[str]:
    return Counter(test["outcome"] for test in report["tests"].values())


def table(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """What each arm came to, one row for each outcome, then what ran of ours."""
    columns = {
        arm: {**dict(outcome_counts(report)), **report["counts"], "seconds": report["seconds"]}
        for arm, report in reports.items()
    }
    outcomes = ["passed", "failed", "skipped", "xfailed", "needs hub"]
    counted = sorted({name for report in reports.values() for name in report["counts"]})
    rows = [["", *columns]]
    rows += [[name, *(str(column.get(name, 0)) for column in columns.values())] for name in [*outcomes, "seconds"]]
    rows += [[name, *(str(column.get(name, "-")) for column in columns.values())] for name in counted]
    return "\n".join(f"{row[0]:32}" + "".join(f"{cell:>10}" for cell in row[1:]) for row in rows)


def print_failures(failures: Mapping[str, str], reports: Mapping[str, Mapping[str, Any]]) -> None:
    """The new failures with the last line of each error, and the known differences that were met."""
    if len(reports) < 2:
        return
    stock, fast = reports["stock"]["tests"], reports["fast"]["tests"]
    known = [name for name in stock if is_known(name) and stock[name]["outcome"] in GOOD]
    for name in known:
        outcome = fast.get(name, {}).get("outcome", "vanished")
        print(f"known difference ({outcome}): {name}: {KNOWN_DIFFERENCES[name.removeprefix('tests/').split('[')[0]]}")
    print(f"\n{len(failures)} new failures")
    for name, outcome in failures.items():
        print(f"  {outcome}: {name}\n      {last_error(fast.get(name, {}))}")


def last_error(test: Mapping[str, Any]) -> str:
    lines = [line for line in test.get("message", "").splitlines() if line.startswith("E ")]
    return lines[-1][1:].strip() if lines else ""


def summary(
    options: argparse.Namespace, reports: Mapping[str, Mapping[str, Any]], failures: Mapping[str, str]
) -> dict[str, Any]:
    """The counts of the closing table, for the documentation."""
    return {
        "versions": {name: importlib.metadata.version(name) for name in ("peft", "transformers", "torch")},
        "sample": options.sample,
        "expression": options.expression,
        "arms": {
            arm: {"outcomes": outcome_counts(report), "counts": report["counts"], "seconds": report["seconds"]}
            for arm, report in reports.items()
        },
        "new_failures": dict(failures),
    }


if __name__ == "__main__":
    sys.exit(main())
