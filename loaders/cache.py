"""Where inferax keeps files of its own."""

import os
import sys
from pathlib import Path

from inferax.errors import SourceError


def cache_folder() -> Path:
    """The user's cache folder for inferax; it may not exist yet.

    `$XDG_CACHE_HOME/inferax` or `~/.cache/inferax`; on macOS `~/Library/Caches/inferax`; on Windows
    `%LOCALAPPDATA%\\inferax`. Raises SourceError where the user has no home.
    """
    try:
        return _base() / "inferax"
    except RuntimeError as error:
        raise SourceError("the user's cache folder", f"cannot be found ({error})", "Set HOME") from error


def _base() -> Path:
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return Path(local) if local else Path.home() / "AppData" / "Local"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    # The XDG specification has relative values ignored.
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return xdg if xdg.is_absolute() else Path.home() / ".cache"
