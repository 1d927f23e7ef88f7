"""XlaBackend beside jax's own compilation cache: a program that came from there must not be kept serialized."""

import shutil
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
from pathlib import Path
import jax
import jax.numpy as jnp
from inferax.engine.backend import XlaBackend

folder = Path(sys.argv[1])
jax.config.update("jax_compilation_cache_dir", str(folder / "xla"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
backend = XlaBackend(programs=folder / "programs")
x = jnp.ones((64, 64))
program = backend.compile(lambda x: (jnp.sort(jnp.sin(x) @ x, axis=0).sum(),), x, name="f")
print(backend.stats.compiled, backend.stats.restored, float(program(x)[0]))
"""


def start(folder: Path) -> list[str]:
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()


def test_programs_from_jax_cache_still_run(tmp_path: Path) -> None:
    compiled, restored, value = start(tmp_path)
    assert (compiled, restored) == ("1", "0")
    assert start(tmp_path) == ["0", "1", value]
    shutil.rmtree(tmp_path / "programs")  # as a change of inferax's code does
    assert list((tmp_path / "xla").iterdir())
    for _ in range(2):
        assert start(tmp_path)[2] == value
