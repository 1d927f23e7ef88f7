"""A GGUF model in other types: written in float32 by the `gguf` package, quantized from there by llama.cpp.

    python benchmarks/quantized.py Q4_0 Q4_K_M BF16 [--model FILE]

Files are kept in the cache folder, under names that hold the hash of what they were made from. Needs llama-cpp-python.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
from pathlib import Path

import gguf
import numpy as np
from llama import library

from inferax.loaders.cache import cache_folder
from inferax.loaders.sources import resolve

# llama.cpp's numbers of file types (enum llama_ftype of llama.h).
FILE_TYPES = {
    "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_S": 11, "Q3_K_M": 12,
    "Q3_K_L": 13, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30,
    "BF16": 32,
}  # fmt: skip


def quantized(source: Path, file_type: str) -> Path:
    """`source` with its weights in `file_type`: "F32", or one of FILE_TYPES. What it has already in the type of the
    file is quantized anew from its float32 values."""
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    folder = cache_folder().with_name("inferax-tests") / "quantized"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{digest}.{file_type}.gguf"
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        made = Path(temporary) / path.name
        if file_type == "F32":
            _write_float32(source, made)
        else:
            _quantize(quantized(source, "F32"), made, FILE_TYPES[file_type])
        os.replace(made, path)
    return path


def _write_float32(source: Path, path: Path) -> None:
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind, inner = field.types[0], field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, inner)
    writer.add_file_type(0)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _quantize(source: Path, path: Path, number: int) -> None:
    params = library().llama_model_quantize_default_params()
    params.ftype, params.nthread = number, os.cpu_count() or 1
    code = library().llama_model_quantize(os.fsencode(source), os.fsencode(path), params)
    if code != 0:
        raise RuntimeError(f"llama.cpp could not quantize {source} (it returned {code})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="+", choices=["F32", *FILE_TYPES], metavar="type")
    parser.add_argument("--model", help="a GGUF file (default: the built-in model)")
    args = parser.parse_args()
    for file_type in args.types:
        path = quantized(resolve(args.model), file_type)
        print(f"{path.stat().st_size / 1e6:8.1f} MB  {path}")


if __name__ == "__main__":
    main()
