"""docs/ops.md is the table that scripts/ops_table writes today."""

import subprocess
import sys
from pathlib import Path

import pytest

from inferax.kernels import cpu

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not cpu.available(), reason="the table shows an installation with the native kernels")
def test_ops_table_is_current() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts/ops_table.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
