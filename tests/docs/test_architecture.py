"""docs/architecture.md carries the exact signatures of the five interfaces."""

import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/architecture.md").read_text()
SIGNATURES = re.findall(r"^(inferax[\w.]+)(\(.*\))$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("name", "written"), SIGNATURES, ids=[name for name, _ in SIGNATURES])
def test_signature(name: str, written: str) -> None:
    parts = name.split(".")
    module = next(
        importlib.import_module(".".join(parts[:n])) for n in range(4, 2, -1) if _is_module(".".join(parts[:n]))
    )
    thing = module
    for part in parts[len(module.__name__.split(".")) :]:
        thing = getattr(thing, part)
    signature = inspect.signature(thing)
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    assert str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)) == written


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_there_are_signatures_of_all_five() -> None:
    assert len(re.findall(r"^### \d\. ", PAGE, re.MULTILINE)) == 5
    assert len(SIGNATURES) >= 18
