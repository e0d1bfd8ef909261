"""Break the package in one place at a time and see the named test go red.

    python scripts/check_mutants.py                # all mutants
    python scripts/check_mutants.py stale scaling  # those whose name contains one of the words

The mutants are data (`mutants.py`): a line of the package, what replaces it, and the test that must notice. A mutant
that survives means that a test protects nothing, so the script fails; it also fails when a line is not found or not
unique, or when a named test does not pass on the unbroken package. Each mutant runs in a forked process on a copy.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import shutil
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import peft
import pytest
import torch
import transformers
from mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "peft_fastlora"
SURVIVED, KILLED, BROKEN = "SURVIVED", "killed", "BROKEN"


def run_tests(folder: Path, tests: list[str]) -> tuple[int, str]:
    """Exit code and output of pytest in `folder`, in this process: call it in a fork."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line", *tests])
    return int(code), output.getvalue()


def copy_project(target: Path) -> None:
    for name in (PACKAGE, "tests", "scripts"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, target / name)


def break_file(folder: Path, mutant: Mutant) -> str | None:
    """Apply the mutant to a copy of the project; a message if that is not possible."""
    path = folder / PACKAGE / mutant.file
    source = path.read_text()
    found = source.count(mutant.original)
    if found != 1:
        return f"the original text occurs {found} times in {mutant.file}, not once"
    path.write_text(source.replace(mutant.original, mutant.replacement))
    return None


def try_mutant(mutant: Mutant) -> tuple[str, str]:
    """What became of the mutant, and a detail. Runs in a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_project(folder)
        problem = break_file(folder, mutant)
        if problem is not None:
            return BROKEN, problem
        code, output = run_tests(folder, [mutant.test])
        os.chdir(ROOT)
    last = output.strip().splitlines()[-1] if output.strip() else ""
    if code == pytest.ExitCode.TESTS_FAILED:
        return KILLED, last
    return (SURVIVED if code == pytest.ExitCode.OK else BROKEN), f"pytest exit {int(code)}: {last}"


def check_unbroken(tests: list[str]) -> tuple[int, str]:
    with tempfile.TemporaryDirectory() as name:
        copy_project(Path(name))
        result = run_tests(Path(name), tests)
        os.chdir(ROOT)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="run only mutants whose name contains one of these")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    chosen = [m for m in MUTANTS if not args.words or any(word in m.name for word in args.words)]
    print(f"torch {torch.__version__}, peft {peft.__version__}, transformers {transformers.__version__}")
    # fork: the children inherit the imports above, which take longer than most tests
    with multiprocessing.get_context("fork").Pool(args.jobs, maxtasksperchild=1) as pool:
        code, output = pool.apply(check_unbroken, (sorted({m.test for m in chosen}),))
        if code != 0:
            print(output, "\nthe named tests must pass on the unbroken package first")
            return 1
        outcomes = []
        for mutant, (state, detail) in zip(chosen, pool.imap(try_mutant, chosen), strict=True):
            print(f"{state:8}  {mutant.name}  ({mutant.file})  {'' if state == KILLED else detail}", flush=True)
            outcomes.append(state)
    killed, survived, broken = (outcomes.count(state) for state in (KILLED, SURVIVED, BROKEN))
    print(f"{killed} mutants killed, {survived} survived, {broken} broken")
    return 0 if outcomes and all(state == KILLED for state in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
