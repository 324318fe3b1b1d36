"""Recurrent layers of a sequence over 2 and 4 processes against one process."""

from __future__ import annotations

import pytest
import workers
from processes import run


@pytest.fixture(scope="module", params=[2, 4])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run(tmp_path_factory.mktemp("group"), request.param, "rnn_cases")


@pytest.mark.parametrize("case", workers.rnn_case_list())
def test_as_one_process(outcomes: dict[str, str], case: str) -> None:
    assert not outcomes[case], outcomes[case]
