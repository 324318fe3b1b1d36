"""Attention of a sequence over 2 and 4 processes against one process."""

from __future__ import annotations

from typing import Any

import pytest
import workers
from processes import assert_nothing_wrong


@pytest.mark.parametrize("ranks", [2, 4])
def test_as_one_process(gloo: Any, ranks: int) -> None:
    """Every case of workers.every_case, in one start of the processes."""
    assert_nothing_wrong(gloo(ranks, "attention_cases"), workers.every_case())
