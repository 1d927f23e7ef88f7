"""Text for a terminal."""

from __future__ import annotations

import math

_CONTROLS = {c: "\ufffd" for c in (*range(0x20), *range(0x7F, 0xA0)) if chr(c) not in "\t\n"}


def printable(text: str) -> str:
    """`text` with U+FFFD for control characters: what a model or a file says must not steer the terminal."""
    return text.translate(_CONTROLS)


def with_unit(num_bytes: float) -> str:
    """A size for people: "92.7 MiB"."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} bytes"
    power = min(int(math.log2(num_bytes)) // 10, 4)
    return f"{num_bytes / 1024**power:.1f} {' KMGT'[power]}iB"
