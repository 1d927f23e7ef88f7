"""Golden blocks of the ggml types that the gguf package cannot dequantize, made by ggml itself.

    python scripts/golden_ggml.py

writes tests/golden/ggml.json. Needs llama-cpp-python, whose libggml-base it calls through ctypes. Nothing of inferax is
imported here.
"""

from __future__ import annotations

import base64
import ctypes
import json
import platform
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden" / "ggml.json"
HALVES = np.array([0, 0x8000, 1, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF, 0x2A66, 0xB123], np.uint16)
FLOATS = np.array(
    [0, 1 << 31, 1, 0x80000001, 0x1234, 0x7FFFFF, 0x80654321, 0x800000, 0x3C1F2E3D, 0xBF123456], np.uint32
)


def encode(x: np.ndarray) -> str:
    return base64.b64encode(x.tobytes()).decode()


def main() -> None:
    found = find_spec("llama_cpp")
    if found is None or found.origin is None:
        raise SystemExit("llama-cpp-python is not installed: pip install llama-cpp-python")
    ggml = ctypes.CDLL(str(next((Path(found.origin).parent / "lib").glob("libggml-base.*"))))
    ggml.ggml_version.restype = ggml.ggml_commit.restype = ctypes.c_char_p
    rng = np.random.default_rng(20)

    def call(function: str, source: np.ndarray, target: np.ndarray, weights: int) -> None:
        getattr(ggml, function)(
            ctypes.c_void_p(source.ctypes.data), ctypes.c_void_p(target.ctypes.data), ctypes.c_int64(weights)
        )

    types = {}
    for name, block, block_bytes, scales in (
        ("q1_0", 128, 18, HALVES),
        ("q2_0", 64, 18, HALVES),
        ("q8_K", 256, 292, FLOATS),
    ):
        blocks = rng.integers(0, 256, (len(scales), block_bytes), dtype=np.uint8)
        blocks[:, : scales.itemsize] = scales.view(np.uint8).reshape(len(scales), -1)
        values = np.empty((len(scales), block), np.float32)
        call(f"dequantize_row_{name}", blocks, values, values.size)
        types[name.upper()] = {"blocks": encode(blocks), "values": encode(values)}

    # ggml quantizes to Q8_1 for its dot products and never back: the golden is what went in.
    values = (rng.standard_normal((4, 32)) * [[1e-3], [1], [7], [100]]).astype(np.float32)
    blocks = np.zeros((4, 36), np.uint8)
    call("quantize_row_q8_1_ref", values, blocks, values.size)
    types["Q8_1"] = {"blocks": encode(blocks), "quantized_from": encode(values)}

    content = {
        "command": "python scripts/golden_ggml.py",
        "versions": {
            "llama-cpp-python": version("llama-cpp-python"),
            "ggml": f"{ggml.ggml_version().decode()} ({ggml.ggml_commit().decode()})",
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "encoding": "base64 of little-endian uint8[n, block_bytes] and float32[n, block]",
        "types": types,
    }
    GOLDEN.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
