"""Where inferax keeps files of its own."""

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """The user's cache folder for inferax; it may not exist yet.

    `$XDG_CACHE_HOME/inferax` or `~/.cache/inferax`; on macOS `~/Library/Caches/inferax`; on Windows
    `%LOCALAPPDATA%\\inferax`.
    """
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        base = Path(local) if local else Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        # The XDG specification has relative values ignored.
        xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
        base = xdg if xdg.is_absolute() else Path.home() / ".cache"
    return base / "inferax"
