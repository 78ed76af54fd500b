"""What a figure was measured with, to be printed beside it."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

import torch

__all__ = ["environment"]


def environment() -> dict[str, str]:
    """Versions and machine of this run."""
    return {
        "contextmem": version("contextmem"),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
