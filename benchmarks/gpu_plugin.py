"""For the workers of stage 2 (`pytest -p benchmarks.gpu_plugin`): one bad test takes no other along.

A worker ends after a test that left the GPU's context unusable, and during one that takes longer than its limit;
pytest-xdist counts that as a failure of this very test and starts another worker for the rest.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterator

import pytest
import torch

LOST = 70  # exit code
_errors = os.dup(2)  # before pytest captures it


def context_lost() -> bool:
    """After an illegal access, say, every call of this process fails."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    faulthandler.dump_traceback_later(float(os.environ["SEQKERN_TEST_LIMIT"]), exit=True, file=_errors)
    result = yield
    faulthandler.cancel_dump_traceback_later()
    if context_lost():
        os.write(_errors, f"{item.nodeid} left the GPU's context unusable\n".encode())
        sys.stdout.flush()
        os._exit(LOST)
    return result
