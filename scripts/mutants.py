"""The mutants that `check_mutants.py` tries: one deliberate mistake each, with the test that must notice it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str  # in the package
    original: str  # occurs exactly once in the file
    replacement: str
    test: str  # pytest node id


MUTANTS: tuple[Mutant, ...] = ()
