"""Lets tox environments that name the same ``env_dir`` share it.

A virtual environment with torch takes more than a gigabyte. ``lint``, ``mutants`` and the runs of PEFT's tests need
exactly what ``newest`` has installed, but tox remembers the name of the environment that made a folder and makes the
folder anew for any other name. The runner below forgets the name. tox itself loads this file.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from tox.plugin import impl
from tox.tox_env.api import ToxEnv
from tox.tox_env.info import Info
from tox.tox_env.python.virtual_env.runner import VirtualEnvRunner
from tox.tox_env.register import ToxEnvRegister


class NamelessInfo(Info):
    """What tox remembers of a folder, without the name of the environment."""

    def compare(self, value: Any, section: str, sub_section: str | None = None) -> AbstractContextManager[Any]:
        if section == ToxEnv.__name__:
            value = {key: entry for key, entry in value.items() if key != "name"}
        return super().compare(value, section, sub_section)


class SharedVirtualEnvRunner(VirtualEnvRunner):
    """A virtual environment that tox environments of several names may use."""

    @staticmethod
    def id() -> str:
        return "shared-virtualenv"

    @property
    def cache(self) -> Info:
        return NamelessInfo(self.env_dir)


@impl
def tox_register_tox_env(register: ToxEnvRegister) -> None:
    register.add_run_env(SharedVirtualEnvRunner)
