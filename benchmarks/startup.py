"""First and second start to the first token of the default model, and the size of an installation.

    python benchmarks/startup.py [--no-size]

Each start is a process of its own with an empty cache for compiled programs before the first; the model file is there
already. Seconds count from the start of the process. A trace or a backend compile in the second start is a failure.
The size is that of a virtual environment with the required dependencies only, less what a bare one has.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHILD = """
import json, sys, time
started = float(sys.argv[1])
import jax
counts = {"traces": 0, "compiles": 0}
def count(name, seconds, **_):
    counts["traces"] += name == "/jax/core/compile/jaxpr_trace_duration"
    counts["compiles"] += name == "/jax/core/compile/backend_compile_duration"
jax.monitoring.register_event_duration_secs_listener(count)
import inferax
llm = inferax.LLM(compute=sys.argv[2])
loaded = time.time() - started
prompt = llm.render([{"role": "user", "content": "What is the capital city of Japan?"}])
for text, output in llm.stream(prompt, inferax.SamplingParams(temperature=0, max_tokens=1)):
    first = time.time() - started
stats = llm.backend.stats
print(json.dumps({"loaded_s": loaded, "first_token_s": first, "built": stats.compiled, "restored": stats.restored,
                  **counts, "text": text}))
"""


def start(cache: Path, compute: str) -> dict[str, object]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    now = time.time()
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(now), compute], env=environment, capture_output=True, text=True, check=True
    )
    result: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def installed_bytes() -> int:
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        bare = tree_bytes(Path(folder))
        subprocess.run([Path(folder) / "bin" / "pip", "install", "--quiet", str(ROOT)], check=True)
        return tree_bytes(Path(folder)) - bare


def tree_bytes(folder: Path) -> int:
    return sum(f.stat().st_blocks * 512 for f in folder.rglob("*") if f.is_file() and not f.is_symlink())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-size", action="store_true", help="do not measure an installation's size")
    parser.add_argument("--starts", type=int, default=3, help="second starts to measure")
    arguments = parser.parse_args()

    from inferax.kernels import cpu
    from inferax.loaders.sources import resolve

    model = resolve(None)
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")}
    print(
        f"machine: {platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    print(f"python {platform.python_version()}, {versions}, native kernels: {cpu.available()}")
    failed = False
    for compute in ("exact", "fast"):
        with tempfile.TemporaryDirectory() as cache:
            # The model and its stamp only: no compiled program.
            folder = Path(cache) / "inferax"
            folder.mkdir()
            (folder / "models").symlink_to(model.parent)
            first = start(Path(cache), compute)
            later = sorted(
                (start(Path(cache), compute) for _ in range(arguments.starts)), key=lambda r: r["first_token_s"]
            )  # type: ignore[arg-type,return-value]
        print(f"{compute}: first start {json.dumps(first)}")
        for result in later:
            print(f"{compute}: second start {json.dumps(result)}")
            failed |= bool(result["traces"] or result["compiles"] or result["built"])
    if not arguments.no_size:
        print(f"installed size, required dependencies only: {installed_bytes() / 1e6:.0f} MB")
    if failed:
        sys.exit("a second start traced or compiled something")


if __name__ == "__main__":
    main()
