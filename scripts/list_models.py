"""Write docs/models.md: the MLP classes of the installed transformers, and which of them are fused.

    python scripts/list_models.py

Detection runs over every class of every model folder. What it matches is looked at in a real module where the model
can be built from its default configuration with two layers, on the meta device, so nothing is downloaded or allocated;
elsewhere the source of `__init__` says what the children are. Takes a few minutes.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
import re
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import AutoModel, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from peft_fastlora.activations import FUNCTIONS, Activation, activation_of
from peft_fastlora.detect import Block, _block_of_function, block_of
from peft_fastlora.guards import is_linear

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
FUNCTION_NAMES = {"torch", "nn", "functional", "F", "chunk", *(function.__name__ for function in FUNCTIONS)}
# Names that the projections of an MLP usually have: such a class is listed with its reason if it is no block.
USUAL = [{"gate_proj", "up_proj", "down_proj"}, {"w1", "w2", "w3"}, {"gate_up_proj", "down_proj"}]
USUAL += [{"fc1", "fc2"}, {"up_proj", "down_proj"}]
NO_MLP = re.compile(r"Layer|Block|Attention|Encoder|Decoder|Model|Experts|Mixer|Predictor")
# What a child is made with: nn.Linear(...), ACT2FN[...], get_activation(...), SomeMLP(...).
CHILD = re.compile(r"(nn\.|ACT2|get_activation|[A-Z])")
SIZES = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "depth")
FUSED = "fused"


class Row(NamedTuple):
    """One class."""

    model: str  # the folder
    name: str
    form: str  # of a block; empty for what is none
    activation: str
    path: str  # "fused", or the reason why not
    built: bool  # looked at in a real module


def mlp_classes() -> Iterator[tuple[str, type]]:
    """(model folder, class) of every module class that transformers defines for a model."""
    models = Path(transformers.models.__file__).parent
    for path in sorted(models.glob("*/modeling_*.py")):
        try:
            module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        except (ImportError, AttributeError):  # other frameworks, missing packages
            continue
        for cls in vars(module).values():
            if isinstance(cls, type) and issubclass(cls, nn.Module) and cls.__module__ == module.__name__:
                yield path.parent.name, cls


def class_block(cls: type) -> Block | str:
    """Detection on a class; a name is a child if `__init__` sets it to something else than a value."""
    code = getattr(cls.forward, "__code__", None)
    if code is None:
        return "its forward is not a plain function"
    made = {name: written_child(cls, name) for name in code.co_names if name not in FUNCTION_NAMES}
    return _block_of_function(cls.forward, frozenset(name for name, by in made.items() if CHILD.match(by)))


def looks_like_mlp(cls: type) -> bool:
    names = set(getattr(getattr(cls.forward, "__code__", None), "co_names", ()))
    return not NO_MLP.search(cls.__name__) and any(usual <= names for usual in USUAL)


def written_child(cls: type, name: str) -> str:
    """What `__init__` of the class, or of one it inherits from, makes the child with; empty if that is not found."""
    for base in cls.__mro__:
        found = re.search(rf"self\.{name}\s*(?::[^=]+)?=\s*([\w.]+)", source_of_init(base))
        if found:
            return found[1]
    return ""


@cache
def source_of_init(cls: type) -> str:
    if cls.__module__.partition(".")[0] != "transformers" or "__init__" not in cls.__dict__:
        return ""
    try:
        return inspect.getsource(cls.__dict__["__init__"])
    except (OSError, TypeError):  # generated, as that of a dataclass
        return ""


def written_row(model: str, cls: type, block: Block) -> Row | None:
    """What the source says about a class that matched; None if its children are no Linear layers."""
    kinds = [written_child(cls, name) for name in block.projections]
    if not all(kind.endswith("Linear") for kind in kinds):
        return None
    other = next((kind for kind in kinds if kind != "nn.Linear"), None)
    path = FUSED if other is None else f"the base layer is a {other}"
    return Row(model, cls.__name__, block.form, function_name(block), path, built=False)


def function_name(block: Block) -> str:
    return block.activation.name if isinstance(block.activation, Activation) else ""


def built_row(model: str, module: nn.Module) -> Row | None:
    """What a real module says; None if its children are no Linear layers."""
    cls = type(module)
    block = block_of(module)
    if isinstance(block, str):
        return Row(model, cls.__name__, "", "", block, built=True)
    children = [module._modules[name] for name in block.projections]
    if not all(isinstance(child, nn.Linear) for child in children):
        return None
    path, activation = FUSED, function_name(block)
    if isinstance(block.activation, str):
        held = module._modules[block.activation]
        known = activation_of(held) if held is not None else None
        activation = known.name if known is not None else type(held).__name__
        path = FUSED if known is not None else f"the activation {activation} is not known"
    other = next((child for child in children if not is_linear(child)), None)
    if other is not None:
        path = f"the base layer is a {type(other).__name__}"
    return Row(model, cls.__name__, block.form, activation, path, built=True)


def two_layers(config: Any) -> Any:
    """The configuration with two layers wherever it says how many there are."""
    config = copy.deepcopy(config)
    for part in [config, *(value for value in vars(config).values() if isinstance(value, PretrainedConfig))]:
        for size in SIZES:
            if isinstance(getattr(part, size, None), int):
                try:
                    setattr(part, size, min(2, getattr(part, size)))
                    if isinstance(getattr(part, "layer_types", None), list):
                        part.layer_types = part.layer_types[:2]
                except Exception:  # a property, or checked against something else
                    continue
    return config


def built_modules(classes: set[type]) -> dict[type, list[nn.Module]]:
    """Modules of these classes from every model type that can be built."""
    found: dict[type, list[nn.Module]] = defaultdict(list)
    for name, config_class in list(CONFIG_MAPPING.items()):
        for prepare in (two_layers, lambda config: config):
            try:
                with torch.device("meta"):
                    model = AutoModel.from_config(prepare(config_class()))
            except Exception as error:  # many types need arguments or packages; the source is asked instead
                print(f"  {name}: not built ({type(error).__name__})", file=sys.stderr)
                continue
            for module in model.modules():
                if type(module) in classes and len(found[type(module)]) < 50:
                    found[type(module)].append(module)
            break
    return found


def rows() -> list[Row]:
    blocks = {cls: (model, class_block(cls)) for model, cls in mlp_classes()}
    wanted = {cls for cls, (_, block) in blocks.items() if isinstance(block, Block) or looks_like_mlp(cls)}
    modules = built_modules(wanted)
    result: list[Row] = []
    for cls in wanted:
        model, block = blocks[cls]
        if modules[cls]:
            candidates = {built_row(model, module) for module in modules[cls]}
            if not looks_like_mlp(cls):  # it matched by chance, as a convolution, a norm and an activation do
                candidates = {row for row in candidates if row is not None and row.form}
        else:
            written = written_row(model, cls, block) if isinstance(block, Block) else None
            candidates = {Row(model, cls.__name__, "", "", block, False) if isinstance(block, str) else written}
        result += [row for row in candidates if row is not None]
    return sorted(result)


INTRODUCTION = """\
# MLP blocks of transformers

Generated by `python scripts/list_models.py` with transformers {version}; do not edit.

Every class in `transformers.models` whose forward is a block (gated, packed or plain, see
[how it works](how_it_works.md)) over Linear layers, and every other class whose forward uses the usual names of an MLP
(`gate_proj`, `up_proj`, `down_proj`; `w1`, `w2`, `w3`; `gate_up_proj`; `fc1`, `fc2`), with the reason why it is no
block. Its projections are then fused one by one, or as projections that read one tensor. Names decide nothing: a class
of your own is recognised by the same rules.

A row comes from a real module where the model could be built from its default configuration (`yes`), else from the
source of the class; then the activation is known only at run time. A class may have several rows.

| form | classes | model folders | seen in a built model |
| --- | --- | --- | --- |
{counts}

| model | class | form | activation | path | built |
| --- | --- | --- | --- | --- | --- |
"""


def count_line(title: str, chosen: list[Row]) -> str:
    built = len({(row.model, row.name) for row in chosen if row.built})
    classes = len({(row.model, row.name) for row in chosen})
    return f"| {title} | {classes} | {len({row.model for row in chosen})} | {built} |"


def page(found: list[Row]) -> str:
    lines = [
        count_line(f"{form}, fused", [row for row in found if row.form == form and row.path == FUSED])
        for form in ("gated", "packed", "plain")
    ]
    lines.append(count_line("a block, not fused", [row for row in found if row.form and row.path != FUSED]))
    lines.append(count_line("no block", [row for row in found if not row.form]))
    head = INTRODUCTION.format(version=transformers.__version__, counts="\n".join(lines))
    body = [
        f"| {row.model} | `{row.name}` | {row.form} | {row.activation} | {escaped(row.path)} | "
        f"{'yes' if row.built else ''} |\n"
        for row in found
    ]
    return head + "".join(body)


def escaped(text: str) -> str:
    # without the addresses of objects
    return re.sub(r" at 0x[0-9a-f]+", "", text).replace("|", "\\|").replace("<", "\\<")


def main() -> int:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found = rows()
    PAGE.write_text(page(found))
    print(Counter((row.form, "fused" if row.path == FUSED else "not fused") for row in found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
