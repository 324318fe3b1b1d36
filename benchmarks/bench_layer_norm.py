"""Layer norm and RMS norm, alone and after a residual addition, against torch's, eager and compiled."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import seqkern
from benchmarks.harness import Contest, compete, forward_backward, forward_only
from seqkern.ops._autograd import Cost
from seqkern.ops.layer_norm import cost
from seqkern.testing import add_layer_norm_case, check_case, layer_norm_case

SHAPES = [(8, 64), (64, 768), (4096, 768), (8192, 1024), (2048, 4096), (256, 16384)]


def theirs(op, columns, dropout_p=0.0):
    """The same in torch: dropout, addition and norm one after the other; pre-norm, so both results are used."""
    if op == "layer_norm":
        return lambda x, w, b: F.layer_norm(x, (columns,), w, b)
    if op == "rms_norm":
        return lambda x, w: F.rms_norm(x, (columns,), w, 1e-5)

    def add_norm(x, r, *parameters):
        total = (F.dropout(x, dropout_p) if dropout_p else x) + r
        if op == "add_layer_norm":
            return F.layer_norm(total, (columns,), *parameters), total
        return F.rms_norm(total, (columns,), parameters[0], 1e-5), total

    return add_norm


def ours(op, columns, dropout_p=0.0):
    if op == "rms_norm":
        return lambda x, w: seqkern.rms_norm(x, (columns,), w, 1e-5)
    if op == "layer_norm":
        return lambda x, w, b: seqkern.layer_norm(x, (columns,), w, b)
    function = getattr(seqkern, op)
    return lambda x, r, *parameters: function(x, r, (columns,), *parameters, eps=1e-5, dropout_p=dropout_p)


@pytest.mark.parametrize(("rows", "columns"), SHAPES, ids=[f"{r}x{c}" for r, c in SHAPES])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"])
def test_norm(benchmark, op, rows, columns, dtype, mode, device):
    contest(benchmark, op, rows, columns, dtype, mode, device)


@pytest.mark.parametrize("op", ["add_layer_norm"])
def test_norm_with_dropout(benchmark, op, dtype, mode, device):
    contest(benchmark, op, 4096, 768, dtype, mode, device, dropout_p=0.1)


def contest(benchmark, op, rows, columns, dtype, mode, device, dropout_p=0.0):
    centred, add = op.endswith("layer_norm"), op.startswith("add")
    shapes = [(rows, columns)] * (1 + add) + [(columns,)] * (1 + centred)
    inputs = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    eager = theirs(op, columns, dropout_p)
    functions = {"seqkern": ours(op, columns, dropout_p), "torch": eager, "torch.compile": torch.compile(eager)}
    make = forward_only if mode == "forward" else forward_backward
    calls = {name: make(function, inputs) for name, function in functions.items()}
    work = cost(rows, columns, dtype, add=add, centred=centred)
    if mode == "forward+backward":
        back = cost(rows, columns, dtype, backward=True, add=add, centred=centred)
        work = Cost(work.flops + back.flops, work.bytes + back.bytes)
    checked = min(rows, 512)
    case = (
        add_layer_norm_case(checked, columns, dropout_p=dropout_p, centred=centred)
        if add
        else layer_norm_case(checked, columns, centred=centred)
    )
    compete(
        benchmark,
        Contest(
            op=f"{op} dropout" if dropout_p else op,
            shape=f"{rows} x {columns}",
            mode=mode,
            dtype=dtype,
            device=device,
            ours=calls.pop("seqkern"),
            peers=calls,
            gate=lambda: check_case(case, dtype, device=device),
            cost=work,
        ),
    )
