"""The table op x platform of docs/ops.md, from the registered ops themselves. Usage: scripts/ops_table [--check]"""

from __future__ import annotations

import argparse
import pkgutil
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import inferax.ops
from inferax.kernels import cpu
from inferax.ops.op import Op

PAGE = Path(__file__).resolve().parent.parent / "docs" / "ops.md"
# Platforms get a column once an op has a lowering for them; this one has it always.
ALWAYS = ("cpu",)

HEAD = """\
# Ops

The vocabulary that models are written in, and who computes it. `scripts/ops_table` writes this page; a test keeps it
current. **native** is a kernel of the platform's own, which may decline a dtype or layout and leave it to the column
"elsewhere": what runs where there is no kernel, in plain JAX. Every cell passes the same suite, `tests/ops/suite.py`,
against float64 oracles: values, jit, vmap, grad, grad of vmap, and `shard_map`.

"""


def modules() -> list[ModuleType]:
    return [import_module(m.name) for m in pkgutil.iter_modules(inferax.ops.__path__, "inferax.ops.")]


def ops() -> Iterator[tuple[Op[..., Any], ModuleType]]:
    """Every op, once, with the module that defines it."""
    for module in modules():
        for value in vars(module).values():
            if isinstance(value, Op) and value.reference.__module__ == module.__name__:
                yield value, module


def row(op: Op[..., Any], module: ModuleType, platforms: list[str]) -> list[str]:
    summary = (vars(module)[op.name].__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
    here = module.__name__.removeprefix("inferax.").replace(".", "/") + ".py"
    cells = ["native" if platform in op.platforms else "-" for platform in platforms]
    elsewhere = "reference" if op.default is op.reference else f"`{op.default.__name__}`"  # type: ignore[attr-defined]
    return [f"`{op.name}`", " ".join(summary.split()), f"`{here}`", *cells, elsewhere, "folds" if op.rows else "loops"]


def page() -> str:
    found = sorted(ops(), key=lambda pair: pair[0].name)
    platforms = sorted({p for op, _ in found for p in op.platforms} | set(ALWAYS))
    header = ["op", "meaning", "file", *platforms, "elsewhere", "`vmap` over rows"]
    table = [header, ["---"] * len(header), *(row(op, module, platforms) for op, module in found)]
    return HEAD + "\n".join("| " + " | ".join(cells) + " |" for cells in table) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the page is out of date")
    options = parser.parse_args(arguments)
    if not cpu.available():
        print("the native kernels are not built, so the table would not show them; install a C++ compiler first")
        return 2
    if options.check:
        if PAGE.read_text(encoding="utf-8") != page():
            print(f"{PAGE.name} is out of date: run scripts/ops_table")
            return 1
        return 0
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
