"""A pytest plugin that runs PEFT's own tests for one arm of `peft_suite.py`, stock or fast.

The fast arm puts `FastLoraConfig` in the place of `peft.LoraConfig` before any test module is imported, since the
tables of parametrized tests hold the class itself. Both arms keep only the tests that concern LoRA, switch the
network off, seed every test by its name, and write what happened to a JSON file.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import json
import random
import socket
import sys
import types
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# What `test_decoder_models.py` adapts; its LoRA configurations leave the choice to PEFT, which takes q and v only.
ALL_SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

# Exceptions that say that a test wants something from the hub, as type or in the message, anywhere in the chain of a
# failure.
HUB_ERRORS = ("NetworkIsOff", "OfflineModeIsEnabled", "LocalEntryNotFoundError")

# Modules where PEFT defines `hub_online_once`, which would switch the hub's offline mode off: 0.21 and 0.15.
HUB_SWITCHES = ("tests.testing_utils", "tests.testing_common")


class NetworkIsOff(OSError):
    """A test tried to reach another machine."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("peft_suite")
    group.addoption("--suite-arm", choices=("stock", "fast"), help="whose LoraConfig the tests get")
    group.addoption("--suite-report", help="the JSON file to write")
    group.addoption("--suite-sample", type=float, default=1.0, help="the share of tests of each file to run")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.suite_arm is not None:
        config.pluginmanager.register(Suite(config), "peft_suite")


def stock_id(test_id: str) -> str:
    """The name of a test with the stock configuration in it, so that the two arms can be compared."""
    return test_id.replace("FastLora", "Lora")


def stable_hash(text: str) -> int:
    """A number that is the same in every process, unlike `hash`."""
    return zlib.crc32(text.encode())


class Suite:
    """The hooks of one arm. Under pytest-xdist the workers count and the controller writes the report."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.arm = config.option.suite_arm
        self.tests: dict[str, dict[str, Any]] = {}
        self.counts: Counter[str] = Counter()
        switch_network_off()
        stand_in_for_diffusers()
        if self.arm == "fast":
            put_fast_config_in_place()
            count_fast_layers(self.counts)
        keep_hub_offline()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        chosen = sample([item for item in items if concerns_lora(item)], config.option.suite_sample)
        kept = set(map(id, chosen))
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
        items[:] = chosen
        for item in items:
            if item.path.name == "test_decoder_models.py":
                adapt_all_seven(item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        seed_everything(stable_hash(stock_id(item.nodeid)))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
        report = yield
        if call.excinfo is not None and needs_hub(call.excinfo.value):
            report.user_properties.append(("needs_hub", True))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self.tests.setdefault(stock_id(report.nodeid), {"outcome": "passed", "seconds": 0.0})
        test["seconds"] += report.duration
        outcome = outcome_of(report)
        if outcome != "passed":
            test["outcome"], test["message"] = outcome, str(report.longreprtext)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.counts.update(getattr(node, "workeroutput", {}).get("suite_counts", {}))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.arm == "stock" and "peft_fastlora" in sys.modules:
            raise pytest.UsageError("the stock arm imported peft_fastlora, so it says nothing about stock PEFT")
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["suite_counts"] = dict(self.counts)
        elif self.config.option.suite_report:
            report = {"tests": self.tests, "counts": dict(self.counts)}
            Path(self.config.option.suite_report).write_text(json.dumps(report, indent=1, sort_keys=True))


def outcome_of(report: pytest.TestReport) -> str:
    """What one phase of a test came to."""
    if dict(report.user_properties).get("needs_hub"):
        return "needs hub"
    return "xfailed" if hasattr(report, "wasxfail") else report.outcome


def put_fast_config_in_place() -> None:
    """Give test modules `FastLoraConfig` as `peft.LoraConfig`, the only name by which PEFT's tests import it.

    PEFT's own modules keep the stock class. Configurations that PEFT reads from disk are fast, too.
    """
    import peft

    import peft_fastlora

    peft_fastlora.register(default=True)
    peft.LoraConfig = peft_fastlora.FastLoraConfig


def count_fast_layers(counts: Counter[str]) -> None:
    """Count the layers that become fast, and the forwards that compute a result in our code."""
    import peft_fastlora
    from peft_fastlora import functions

    seen: weakref.WeakSet[Any] = weakref.WeakSet()
    inject = peft_fastlora.FastLoraModel.inject_adapter

    def counting_inject(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        result = inject(self, model, *args, **kwargs)
        new = [m for m in model.modules() if isinstance(m, peft_fastlora.FastLoraLayer) and m not in seen]
        seen.update(new)
        counts["fast layers built"] += len(new)
        return result

    peft_fastlora.FastLoraModel.inject_adapter = counting_inject
    # what the autograd functions and the paths without grad call
    for name in ("group_forward", "mlp_forward"):
        setattr(functions, name, counted(getattr(functions, name), counts, "fused forwards"))
    for name in ("LoraGroupFunction", "LoraGatedMLPFunction"):
        node = getattr(functions, name)
        node.backward = staticmethod(counted(node.backward, counts, "fused backwards"))


def counted(function: Callable[..., Any], counts: Counter[str], name: str) -> Callable[..., Any]:
    """The function, counting its calls."""

    @functools.wraps(function)
    def counting(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return function(*args, **kwargs)

    return counting


def keep_hub_offline() -> None:
    """Replace PEFT's `hub_online_once`: it opens the hub, and tests would wait for minutes where there is none."""
    for name in HUB_SWITCHES:
        module = importlib.import_module(name)
        if hasattr(module, "hub_online_once"):
            module.hub_online_once = lambda model_id: contextlib.nullcontext()


def switch_network_off() -> None:
    """Make every connection to another machine fail at once, whatever a library thinks of its offline switch."""
    connect, getaddrinfo = socket.socket.connect, socket.getaddrinfo

    def local_connect(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise NetworkIsOff(f"the tests run without network, connection to {address[0]} refused")
        connect(self, address)

    def local_getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host not in (None, "", "127.0.0.1", "::1", "localhost", socket.gethostname()):
            raise NetworkIsOff(f"the tests run without network, {host} not looked up")
        return getaddrinfo(host, *args, **kwargs)

    socket.socket.connect = local_connect  # type: ignore[method-assign]
    socket.getaddrinfo = local_getaddrinfo


def stand_in_for_diffusers() -> None:
    """Let modules of PEFT's tests be imported without diffusers, of which they only need a class and a version.

    The tests that use a pipeline want a model from the hub, so they cannot run here anyway.
    """
    if importlib.util.find_spec("diffusers") is not None:
        return
    module: Any = types.ModuleType("diffusers")
    module.__spec__ = importlib.machinery.ModuleSpec("diffusers", None)
    module.__version__ = "0"
    module.StableDiffusionPipeline = type("StableDiffusionPipeline", (), {})
    sys.modules["diffusers"] = module


def concerns_lora(item: pytest.Item) -> bool:
    """Whether a test may run a LoRA layer: it does not if all configurations that it gets are of other methods."""
    import peft

    configs = [config for value in parameters(item) for config in config_classes(value)]
    return not configs or peft.LoraConfig in configs


def parameters(item: pytest.Item) -> list[Any]:
    """The values that a test is parametrized with, by pytest or by the package parameterized."""
    if hasattr(item, "callspec"):
        return list(item.callspec.params.values())
    cells = getattr(getattr(item, "function", None), "__closure__", None) or ()
    return [value for cell in cells for value in getattr(cell.cell_contents, "args", ())]


def config_classes(value: Any) -> list[type]:
    """The classes of PEFT configurations in a parameter: a class, an instance, or a list with some."""
    import peft

    if isinstance(value, (list, tuple)):
        return [config for part in value for config in config_classes(part)]
    cls = value if isinstance(value, type) else type(value)
    return [cls] if issubclass(cls, peft.PeftConfig) else []


def sample(items: list[pytest.Item], share: float) -> list[pytest.Item]:
    """A share of the tests of each file, at least one, the same ones in every run and in both arms."""
    if share >= 1:
        return items
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    chosen: set[int] = set()
    for tests in files.values():
        ranked = sorted(tests, key=lambda item: stable_hash(stock_id(item.nodeid)))
        chosen.update(id(item) for item in ranked[: max(1, round(share * len(ranked)))])
    return [item for item in items if id(item) in chosen]


def adapt_all_seven(item: pytest.Item) -> None:
    """Let the LoRA configuration of a test target every projection of a decoder layer."""
    import peft

    values = parameters(item)
    if peft.LoraConfig in values:
        for kwargs in values:
            if isinstance(kwargs, dict) and kwargs.get("target_modules") is None:
                kwargs["target_modules"] = list(ALL_SEVEN)


def seed_everything(seed: int) -> None:
    """The same random numbers for a test in both arms, so that a difference is not luck."""
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def needs_hub(error: BaseException | None) -> bool:
    """Whether a failure comes from the hub being off."""
    while error is not None:
        if any(name in f"{type(error).__name__} {error}" for name in HUB_ERRORS):
            return True
        error = error.__cause__ or error.__context__
    return False
