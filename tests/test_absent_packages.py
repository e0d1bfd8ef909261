"""The package without bitsandbytes, triton and accelerate.

PEFT imports accelerate when it is imported, so nothing of PEFT runs without it; what is checked is that this package
does not import it itself. bitsandbytes and triton are hidden in a process of its own, which then trains a step.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import peft_fastlora

SOURCES = sorted(Path(peft_fastlora.__file__).parent.glob("*.py"))
OPTIONAL = {"bitsandbytes", "triton", "accelerate"}

WITHOUT = """
import importlib.machinery
import sys

HIDDEN = {"bitsandbytes", "triton"}
found = importlib.machinery.PathFinder.find_spec


def find_spec(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in HIDDEN else found(name, path, target)


importlib.machinery.PathFinder.find_spec = classmethod(find_spec)

import importlib.util

import torch
from peft import get_peft_model
from torch import nn

from peft_fastlora import FastLoraConfig, fuse, fusion_report, layer, unfuse

assert all(importlib.util.find_spec(name) is None for name in HIDDEN)
config = FastLoraConfig(r=4, target_modules=["0"], init_lora_weights=False)
model = get_peft_model(nn.Sequential(nn.Linear(24, 16)), config)
y = model(torch.randn(3, 24))
assert y.grad_fn.name() == "LoraGroupFunctionBackward", y.grad_fn
y.square().sum().backward()
assert sum(p.grad is not None and bool(p.grad.any()) for p in model.parameters()) == 2
unfuse(model)
assert fuse(model).counts == {("linear", "fused"): 1}
try:
    layer.FastLoraLinear4bit
except ImportError:
    pass
else:
    raise AssertionError("there is no Linear4bit without bitsandbytes")
assert not HIDDEN & set(sys.modules)
print("trained")
"""


def imported(source: Path) -> dict[str, bool]:
    """Top-level packages that a source file imports, and whether only inside functions."""
    tree = ast.parse(source.read_text())
    top = {id(node) for node in tree.body}
    names: dict[str, bool] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            packages = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            packages = [node.module or ""]
        else:
            continue
        for package in packages:
            name = package.partition(".")[0]
            names[name] = names.get(name, True) and id(node) not in top
    return names


def test_without_bitsandbytes_and_triton_a_step_is_trained() -> None:
    root = str(Path(__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "trained"


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_optional_packages_are_imported_late_and_in_one_place(source: Path) -> None:
    """Only `quant.py` names bitsandbytes, inside its functions; nothing names triton or accelerate."""
    optional = {name: late for name, late in imported(source).items() if name in OPTIONAL}
    assert optional == ({"bitsandbytes": True} if source.name == "quant.py" else {})


def test_sources_were_found() -> None:
    assert {"quant.py", "layer.py", "install.py", "guards.py"} <= {source.name for source in SOURCES}
