"""Settings that several folders share: where things live on disk."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """The user's cache folder: models converted once, kernels compiled once.

    ``$BLINK_REF_CACHE`` wins, then ``$XDG_CACHE_HOME/blink_ref``, then ``~/.cache/blink_ref``.
    """
    if chosen := os.environ.get("BLINK_REF_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "blink_ref"
