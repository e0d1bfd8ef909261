"""Fixtures that every test runs under."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def aten_kernels() -> Iterator[None]:
    """Matrix products on ATen's own kernels.

    oneDNN takes half-precision paths on CPU that older or virtual CPUs cannot run, and others again on newer ones;
    without it, green means green everywhere.
    """
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """The shapes are tiny: handing them to threads costs more than it saves."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
