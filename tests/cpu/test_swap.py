"""`torch.nn.LSTM = seqkern.nn.LSTM` and so on, for everything of the same name: models run as they did on torch's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_everything_in_the_place_of_torchs():
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", str(ROOT / "tests" / "cpu" / "swap_program.py")]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
