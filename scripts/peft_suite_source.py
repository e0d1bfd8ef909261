"""PEFT's own tests, taken from the source distribution of a release."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from peft_suite_models import DECODERS

# The lists of hub models in `test_decoder_models.py`: for all models, and for the smaller grid of tests.
MODEL_LIST = re.compile(r'\[\s*(?:"[\w.-]+/[\w.-]+",\s*){4,}\]')


def ensure_tests(cache: Path, version: str) -> Path:
    """The folder that holds PEFT's `tests`, downloaded unless it is there already."""
    root = cache / f"peft-{version}"
    if root.is_dir():
        return root
    cache.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        archive = download(version, folder)
        with tarfile.open(archive) as tar:
            members = [member for member in tar if member.name.startswith(f"peft-{version}/tests/")]
            tar.extractall(folder, members, filter="data")
        unpacked = Path(folder) / f"peft-{version}"
        prepare(unpacked)
        return unpacked.rename(root)


def download(version: str, folder: str) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-binary", "peft", "--dest", folder, f"peft=={version}"]
    if subprocess.run(command).returncode:
        raise SystemExit(f"pip found no source distribution of PEFT {version}; a release of PEFT must be installed")
    return next(Path(folder).glob("*.tar.gz"))


def prepare(root: Path) -> None:
    """Make the tests a package, out of reach of other pytest settings, with our models for the decoder tests."""
    (root / "tests" / "__init__.py").touch()
    (root / "pytest.ini").write_text("[pytest]\n")
    decoders = root / "tests" / "test_decoder_models.py"
    source, replaced = MODEL_LIST.subn(json.dumps(DECODERS), decoders.read_text())
    if replaced != 2:
        raise SystemExit(f"{decoders.name} has {replaced} lists of models instead of 2: adapt `MODEL_LIST`")
    decoders.write_text(source)
