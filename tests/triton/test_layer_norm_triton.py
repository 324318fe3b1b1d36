"""Norms of long rows in Triton, interpreted; how many programs the backward pass gets, in the compile-only driver."""

from __future__ import annotations

import importlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import seqkern
from seqkern.testing import add_layer_norm_case, check_case, layer_norm_case, poison

ROOT = Path(__file__).parents[2]
MANY = {torch.float32: 4099, torch.bfloat16: 8200}  # columns: more than a program keeps


def long_rows() -> None:
    """By the error rule, where the cache is large enough to read x and dy once, and where it is not."""
    kernels = importlib.import_module("seqkern.kernels.layer_norm")
    replay = importlib.import_module("seqkern.kernels._replay")
    launched: list[str] = []
    launch = replay.launch

    def keep(step: Any) -> Any:
        launched.append(step.name)
        return launch(step)

    for cache, centred, (dtype, columns) in itertools.product((0, 1 << 30), (True, False), MANY.items()):
        case = layer_norm_case(9, columns, centred=False)
        if centred:
            case = add_layer_norm_case(9, columns, dropout_p=0.3)
        room = mock.patch.object(kernels, "room", return_value=kernels.Room(2, 2, cache))
        with poison(), seqkern.use_backend("triton"), room, mock.patch.object(replay, "launch", keep):
            launched.clear()
            replay.forget()
            for report in check_case(case, dtype):
                assert report.passed, (cache, columns, dtype, str(report))
        assert "layer_norm_backward_long_once" in launched if cache else "layer_norm_columns" in launched


def groups() -> None:
    """The parameters' gradients of whole numbers are exact: every row counts once, whoever adds it."""
    kernels = importlib.import_module("seqkern.kernels.layer_norm")
    common = importlib.import_module("seqkern.kernels._common")
    for rows, need_weight, need_bias in ((21, True, True), (5, True, False), (5, False, True)):
        x, dy = torch.randint(-3, 4, (2, rows, 4099)).float()  # more than a program keeps
        ones = torch.ones(rows)
        for cache in (1 << 30,) if rows == 5 else (0, 1 << 30):
            room = kernels.Room(2, 2, cache)
            arguments = (dy, None, x, 0 * ones, ones, None, None, 0.0, 0.0, need_weight, need_bias, room)
            with poison():
                (_, _, *grads), plan = kernels._plan_backward(kernels.Memory(), *arguments)
                common.run(plan, x.device)
            x_hat = x - x.double().mean(1, keepdim=True)
            if need_weight:
                assert (grads[0] - (dy * x_hat).sum(0)).abs().max() <= 2**-16 * rows
            if need_bias:
                assert torch.equal(grads[1], dy.sum(0))


def programs() -> None:
    """Multiprocessors times what their registers hold; the kernel that is asked is the one that is launched."""
    from triton_driver import compile_only

    kernels = importlib.import_module("seqkern.kernels.layer_norm")
    common = importlib.import_module("seqkern.kernels._common")
    x, weight, mean = torch.zeros(8192, 768, dtype=torch.bfloat16), torch.zeros(768), torch.zeros(8192)
    arguments = (x, None, x, mean, mean, weight, None, 0.0, 0.0, True, True)
    for registers, at_once in ((40, 4), (96, 2), (128, 2), (129, 1), (255, 1)):
        with compile_only(90) as driver:
            properties = driver.device
            driver.utils.load_binary = lambda *about, n=registers: (object(), object(), n, 0, 1024)
            kernels._PROGRAMS.clear()
            for _ in range(2):
                room = kernels._occupied(arguments, kernels.room(x.device))
                _, plan = kernels._plan_backward(kernels.Memory(), *arguments, room)
                common.run(plan, x.device)
            assert [launch.grid for launch in plan] == [(at_once * properties.multiprocessors,), (12, 2)]
            assert (driver.compiled, driver.launches) == (2, 4)


def run(*arguments: str, **environment: str) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables |= {"PYTHONPATH": str(ROOT)} | environment
    command = [sys.executable, "-W", "ignore", __file__, *arguments]
    result = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_interpreted_long_rows(interpreted: Callable[..., None]) -> None:
    interpreted(__file__, "groups")


@pytest.mark.slow
def test_interpreted_long_rows_error_rule(interpreted: Callable[..., None]) -> None:
    interpreted(__file__, "long_rows")


def test_programs_fill_the_multiprocessors() -> None:
    run("programs")


if __name__ == "__main__":
    for word in sys.argv[1:]:
        {"long_rows": long_rows, "groups": groups, "programs": programs}[word]()
