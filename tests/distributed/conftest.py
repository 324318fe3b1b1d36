"""The fixture of tests in several processes; its name stands in PROCESSES of tests/conftest.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import processes
import pytest


@pytest.fixture
def gloo(tmp_path: Path) -> Callable[..., Any]:
    """gloo(ranks, function, *args): see processes.run."""
    return functools.partial(processes.run, tmp_path)
