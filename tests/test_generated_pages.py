"""Pages that scripts generate are what the scripts would generate now."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_reasons_page_is_current() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "list_reasons.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
