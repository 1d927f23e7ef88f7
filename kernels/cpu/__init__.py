"""Native CPU kernels (C++ behind XLA FFI). Absent where inferax was installed without a C++ compiler."""

from importlib import import_module
from importlib.util import find_spec

import jax


def available() -> bool:
    """Whether the native extension was built into this installation."""
    return find_spec("inferax.kernels.cpu._native") is not None


def register() -> bool:
    """Registers every FFI target with XLA; returns whether there was an extension to register. Safe to call again."""
    if not available():
        return False
    for name, handler in import_module("inferax.kernels.cpu._native").registrations().items():
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
    return True
