"""Fixtures shared by all tests: one thread, passive waits, and the folder of golden cases."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

HERE = Path(__file__).resolve().parent


def golden_root() -> Path:
    """The project's shared folder of golden cases beside the checkout, else the small copies under tests/."""
    named = os.environ.get("NEMOTRON_ULTRA_GOLDEN")
    candidates = [Path(named)] if named else []
    candidates += [parent / "shared" / "golden" for parent in HERE.parents]
    for folder in candidates:
        if (folder / "model").is_dir():
            return folder
    return HERE / "golden" / "data"


@pytest.fixture(scope="session")
def golden() -> Path:
    return golden_root()
