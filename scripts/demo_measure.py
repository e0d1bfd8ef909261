"""What a training run costs: bytes kept for backward, the peak of memory, and the machine it ran on."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import resource
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

MIB = 2**20
PACKAGES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "peft_fastlora")


class SavedActivations:
    """Counts the bytes that autograd keeps for backward, each storage once and the model's own tensors not at all."""

    def __init__(self, model: nn.Module) -> None:
        self._own = {_storage_key(tensor) for tensor in _tensors_of(model)}
        self._storages: dict[tuple[str, int], int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> Tensor:
        key = _storage_key(tensor)
        if key not in self._own:
            self._storages[key] = tensor.untyped_storage().nbytes()
        return tensor

    def __enter__(self) -> SavedActivations:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    @property
    def mib(self) -> float:
        return sum(self._storages.values()) / MIB


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


def _storage_key(tensor: Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers, and the statistics of quantised weights, which belong to the weights as well."""
    yield from model.buffers()
    for parameter in model.parameters():
        yield parameter
        yield from _statistics(getattr(parameter, "quant_state", None))


def _statistics(state: Any) -> Iterable[Tensor]:
    if state is None:
        return
    for value in vars(state).values():
        if isinstance(value, Tensor):
            yield value
    yield from _statistics(getattr(state, "state2", None))


class PeakMemory:
    """The growth of memory at its peak, over what was in use at the start: GPU memory if there is a GPU."""

    def __init__(self, model: nn.Module) -> None:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.method = "torch.cuda.max_memory_allocated"
            self._start = torch.cuda.memory_allocated()
            return
        for parameter in model.parameters():
            # weights may be mapped from the checkpoint: read them now, so that they do not count as growth later
            parameter.detach().flatten().view(torch.uint8).sum()
        _trim_heap()
        self.method = "VmHWM of /proc/self/status" if _reset_high_water_mark() else "ru_maxrss"
        # without a reset the mark still holds the peak of loading the model; the growth is then a lower bound
        self._start = _resident_bytes() if self.method.startswith("VmHWM") else _max_rss()

    def growth_mib(self) -> float:
        if torch.cuda.is_available():
            return (torch.cuda.max_memory_allocated() - self._start) / MIB
        peak = _status_bytes("VmHWM") if self.method.startswith("VmHWM") else _max_rss()
        return (peak - self._start) / MIB


def _reset_high_water_mark() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status_bytes("VmHWM") <= _resident_bytes() + MIB
    except (OSError, KeyError):
        return False


def _resident_bytes() -> int:
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)[name].split()[0]) * 1024


def _max_rss() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _trim_heap() -> None:
    """Give freed memory back to the system, so that it cannot hide growth."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def versions() -> dict[str, str | None]:
    """The releases that the figures depend on."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def machine() -> dict[str, Any]:
    """The hardware that the figures depend on."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
