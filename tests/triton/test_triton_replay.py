"""Calls of the Triton kernels that are like an earlier one (kernels/_replay.py): planned once, and right every time.

Kernels are interpreted, so the numbers of replayed calls are compared; what Triton's JIT would have bound is looked at
through the compile-only driver. Both need a process of their own (this file, run).
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from test_triton_driver import OLDEST, metadata, python
from torch import Tensor

import seqkern
from seqkern.testing import poison

ROOT = Path(__file__).parents[2]


def same(mine: Any, theirs: Any) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b), (a, b)


def attention(*tensors: Tensor, **options: Any) -> list[Tensor]:
    """Output and gradients of self-attention of one tensor, or of query, key and value."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = seqkern.attention(*(leaves * 3)[:3] if len(leaves) == 1 else leaves, **options)
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


def norm(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    out = seqkern.layer_norm(leaves[0], [x.size(-1)], *leaves[1:])
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


def cell(x: Tensor, zh: Tensor, h: Tensor, c: Tensor) -> list[Tensor]:
    kernels = importlib.import_module("seqkern.kernels.rnn_cell")
    h_new, c_new, activated = kernels.rnn_cell_fwd(x, zh, h, c, 0)
    return [h_new, c_new, activated, kernels.rnn_cell_bwd(h_new, c_new, h, c, c_new, activated, 0)[0]]


def anew(call: Callable[..., list[Tensor]], *tensors: Tensor, **options: Any) -> list[Tensor]:
    """The call, planned from the beginning."""
    importlib.import_module("seqkern.kernels._replay").forget()
    return call(*tensors, **options)


def numbers() -> None:
    """A replayed call has the bits of one that is planned, whatever came before it."""
    replay = importlib.import_module("seqkern.kernels._replay")
    planned = mock.Mock(wraps=replay._planned)
    calls: list[tuple[Callable[..., list[Tensor]], list[tuple[int, ...]], dict[str, Any]]] = [
        (attention, [(2, 2, 20, 8)] * 3, {"causal": True}),
        (attention, [(2, 4, 1, 8), (2, 2, 600, 8), (2, 2, 600, 8)], {}),  # decoding, in chunks
        (attention, [(2, 2, 20, 8)] * 3, {"softcap": 5.0, "scale": -0.3}),  # the query is copied
        (norm, [(5, 40), (40,), (40,)], {}),
        (norm, [(5, 33), (33,), (33,)], {}),  # one of two partial sums begins off 16 bytes
        (norm, [(0, 40), (40,), (40,)], {}),
        (cell, [(3, 32), (3, 32), (3, 8), (3, 8)], {}),
    ]
    with poison(), seqkern.use_backend("triton"), mock.patch.object(replay, "_planned", planned):
        for call, shapes, options in calls:
            first, second = ([torch.randn(shape) for shape in shapes] for _ in range(2))
            expected = anew(call, *second, **options)
            anew(call, *first, **options)
            planned.reset_mock()
            same(call(*second, **options), expected)
            assert planned.call_count == 0
        x = torch.randn(2, 2, 20, 8)
        q, k, v = torch.randn(3, 2, 2, 20, 8).unbind(0)
        expected = anew(attention, q, k, v)
        anew(attention, x)  # one tensor in three places, then three
        planned.reset_mock()
        same(attention(q, k, v), expected)
        assert planned.call_count == 0


def kinds() -> None:
    """What makes a call another kind, or keeps it from being kept."""
    replay = importlib.import_module("seqkern.kernels._replay")
    planned = mock.Mock(wraps=replay._planned)

    def plans(call: Callable[[], Any]) -> int:
        planned.reset_mock()
        call()
        return planned.call_count

    with seqkern.use_backend("triton"), mock.patch.object(replay, "_planned", planned), torch.no_grad():
        x = torch.randn(2, 2, 40, 8)
        replay.forget()
        assert plans(lambda: seqkern.attention(x, x, x)) == 1
        assert plans(lambda: seqkern.attention(x, x, x)) == 0
        assert plans(lambda: seqkern.attention(x, x, x, scale=0.5)) == 1
        assert plans(lambda: seqkern.attention(x, x, x, causal=True)) == 1
        assert plans(lambda: seqkern.attention(x[:, :, ::2], x, x)) == 1
        assert plans(lambda: seqkern.attention(x.double(), x.double(), x.double())) == 1
        before = torch.backends.cuda.matmul.fp32_precision
        torch.backends.cuda.matmul.fp32_precision = "tf32" if before != "tf32" else "ieee"
        assert plans(lambda: seqkern.attention(x, x, x)) == 1
        torch.backends.cuda.matmul.fp32_precision = before
        assert plans(lambda: seqkern.attention(x, x, x)) == 0
        memory = torch.randn(2 * 2 * 40 * 8 + 1)
        askew = memory[1:].view(2, 2, 40, 8)  # 4 bytes off: what was compiled for 16 does not fit
        expected = seqkern.attention(askew.clone(), x, x)
        for _ in range(2):
            assert plans(lambda: same([seqkern.attention(askew, x, x)], [expected])) == 1
        with mock.patch.object(replay, "MOST", 3):
            for n in range(1, 9):
                seqkern.layer_norm(torch.randn(n, 8), [8])
            assert len(replay._KEPT) == 3
            assert plans(lambda: seqkern.layer_norm(torch.randn(8, 8), [8])) == 0
            assert plans(lambda: seqkern.layer_norm(torch.randn(1, 8), [8])) == 1


def strangers() -> None:
    """A plan that uses a tensor of its own would read freed memory when it is replayed: it raises at once."""
    replay = importlib.import_module("seqkern.kernels._replay")

    def plan(memory: Any, x: Tensor) -> Any:
        return (x.clone(),), []

    with pytest.raises(RuntimeError, match="neither an argument nor from its Memory"):
        replay.planned(plan, (torch.zeros(3),), (), torch.device("cpu"))


def bindings() -> None:
    """A replayed launch gives the kernel what the JIT gave it: the same kernel, grid and numbers, other pointers."""
    from triton_driver import compile_only

    replay = importlib.import_module("seqkern.kernels._replay")
    x = torch.randn(2, 2, 70, 64, dtype=torch.bfloat16)
    rows, weight = torch.randn(130, 768, dtype=torch.bfloat16), torch.randn(768, dtype=torch.bfloat16)
    with compile_only(90) as driver:
        seen: list[Any] = []
        make = driver.launcher_cls

        def launcher(source: Any, metadata: Any) -> Any:
            launch = make(source, metadata)

            def spy(*given: Any) -> None:
                launch(*given)
                assert metadata.enable_fp_fusion  # said, because its default will change
                numbers = [a for a in given[9:] if not isinstance(a, Tensor)]
                seen.append((metadata.name, given[:3], len(given), numbers))

            return spy

        driver.launcher_cls = launcher

        def everything() -> list[Any]:
            seen.clear()
            with seqkern.use_backend("triton"):
                attention(x, causal=True)
                attention(x[:, :, :1].contiguous(), x, x)
                norm(rows, weight, weight)
                cell(rows[:, :256].contiguous(), rows[:, :256].contiguous(), rows[:, :64].contiguous(),
                     rows[:, :64].contiguous())  # fmt: skip
            return list(seen)

        replay.forget()
        first, launches = everything(), driver.launches
        assert len({name for name, *_ in first}) >= 8
        assert everything() == first
        assert driver.launches == 2 * launches


@pytest.mark.parametrize("name", ["numbers", "kinds", "strangers"])
def test_interpreted(name: str, interpreted: Callable[..., None]) -> None:
    interpreted(__file__, name)


@pytest.mark.parametrize("version", [metadata.version("triton"), OLDEST])
def test_a_replay_binds_what_the_jit_bound(version: str) -> None:
    result = python(version, "test_triton_replay.py", "bindings")
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_call_made_before_costs_the_host_less(tmp_path: Path) -> None:
    """Half of a new one's time at most; it is a 5th to a 7th. A recurrent step's launch: a quarter; it is an 11th."""
    file = tmp_path / "host.json"
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.host_time", "--quick", "--json", str(file)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 8
    for row in rows:
        assert row["made_before_us"] < row["new_us"] / (4 if "step" in row["call"] else 2), row


if __name__ == "__main__":
    for word in sys.argv[1:]:
        {"numbers": numbers, "kinds": kinds, "strangers": strangers, "bindings": bindings}[word]()
