"""Layer norm and RMS norm in CUDA C++: in the host executor (tests/simt), and the same cases on a GPU where one is.

Every `check_*` runs cases on a device: "cpu" in a process whose CPU tensors stand for the GPU's memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cuda_checks import (
    assert_same_digest,
    checks_of,
    gpu_bits_test,
    gpu_test,
    moved,
    print_digest,
    run_words,
)
from torch import Tensor

import seqkern
from seqkern import reference
from seqkern.testing import add_layer_norm_case, assert_passed, check_case, compare, layer_norm_case

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
RESULTS = ("output", "sum", "mean", "rstd", "grad_residual", "grad_input", "grad_weight", "grad_bias")
# Most columns that a block holds in registers: beyond are clusters, and rows that are read twice.
BLOCK = {torch.float64: 4096, torch.float32: 8192, torch.bfloat16: 8192, torch.float16: 8192}


# ---- one call of both ops ------------------------------------------------------------------------------------------


class NormCase:
    """The arguments of both ops, made on the CPU. Rows of the matrices are `pad` elements longer than they are read."""

    def __init__(
        self,
        rows: int,
        columns: int,
        dtype: torch.dtype,
        *,
        residual: bool = False,
        dropout_p: float | None = None,
        centred: bool = True,
        weight: torch.dtype | None = torch.float32,
        bias: torch.dtype | None = torch.float32,
        grad_sum: bool = True,
        needs: tuple[bool, bool] = (True, True),
        pad: int = 0,
        mean: float = 0.0,
        seed: int = 2**40 + 7,
        weight_offset: float = 0.0,
        round_before_weight: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(rows * 1009 + columns)

        def matrix(shift: float = 0.0) -> Tensor:
            values = torch.randn(rows, columns + pad, dtype=torch.float64, generator=generator) + shift
            return values.to(dtype)[:, :columns]

        def vector(of: torch.dtype | None) -> Tensor | None:
            return None if of is None else torch.randn(columns, dtype=torch.float64, generator=generator).to(of)

        self.input = matrix(mean)
        self.residual = matrix() if residual else None
        self.weight, self.bias = vector(weight), vector(bias)
        self.seed = None if dropout_p is None else torch.tensor([seed])
        self.dropout_p = dropout_p or 0.0
        self.centred, self.needs, self.flavour = centred, needs, (weight_offset, round_before_weight)
        self.grad_output, self.grad_sum = matrix(), matrix() if grad_sum else None

    def run(self, ops: object, device: str = "cpu", eps: float = 1e-5) -> dict[str, Tensor]:
        """Forward, then backward with what forward gave."""
        tensors = [moved(t, device) for t in (self.input, self.residual, self.weight, self.bias, self.seed)]
        input, residual, weight, bias, seed = tensors
        before = [None if t is None else t.clone() for t in tensors]
        forward = ops.layer_norm_fwd(
            input, residual, weight, bias, seed, eps, self.dropout_p, self.centred, *self.flavour
        )
        _, total, mean, rstd = forward
        backward = ops.layer_norm_bwd(
            moved(self.grad_output, device), moved(self.grad_sum, device), input if residual is None else total, mean,
            rstd, weight, seed, self.dropout_p, self.centred, self.flavour[0], *self.needs,
        )  # fmt: skip
        assert all(
            a is None or torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, tensors, strict=True)
        )
        return {name: t.cpu() for name, t in zip(RESULTS, (*forward, *backward), strict=True)}

    def exact(self, total: Tensor, eps: float = 1e-5) -> dict[str, Tensor]:
        """The equations in float64, of the rounded sum that the kernels normalise."""
        x = (total if self.residual is not None else self.input).double()
        weight = None if self.weight is None else self.weight.double() + self.flavour[0]
        bias = None if self.bias is None else self.bias.double()
        mean = x.mean(1) if self.centred else x.new_zeros(len(x))
        d = x - mean[:, None]
        rstd = 1 / (d.square().mean(1) + eps).sqrt()
        xhat, dy = d * rstd[:, None], self.grad_output.double()
        g = dy if weight is None else dy * weight
        along = (g * xhat).mean(1, keepdim=True)
        ds = (g - xhat * along - (g.mean(1, keepdim=True) if self.centred else 0.0)) * rstd[:, None]
        if self.grad_sum is not None:
            ds = ds + self.grad_sum.double()
        self.largest = x.abs().amax(1) if x.numel() else x.new_zeros(len(x))
        exact = {
            "output": reference.layer_norm(x, weight, bias, eps, self.centred), "rstd": rstd, "grad_residual": ds,
        }  # fmt: skip
        if self.centred:
            exact["mean"] = mean
        if self.seed is not None:
            keep = reference.keep_mask(self.seed, self.dropout_p, *x.shape)
            exact["grad_input"] = ds * keep / (1 - self.dropout_p)
        if self.needs[0]:
            exact["grad_weight"] = (dy * xhat).sum(0)
        if self.needs[1]:
            exact["grad_bias"] = dy.sum(0)
        return exact

    def check(self, device: str, *about: object) -> dict[str, Tensor]:
        """The error rule with the CPU kernels as the peer; the sum is the CPU kernels' bit for bit."""
        ours = self.run(torch.ops.seqkern_cuda, device)
        peer = self.run(torch.ops.seqkern)
        exact = self.exact(peer["sum"])
        for name in RESULTS:
            assert ours[name].shape == peer[name].shape, (name, about)
            assert ours[name].dtype == peer[name].dtype, (name, about)
        assert torch.equal(ours["sum"], peer["sum"]), about
        if self.centred:  # as exact as the numbers it is the mean of, not as itself: they may cancel
            error = (ours["mean"] - exact.pop("mean")).abs()
            assert (error <= torch.finfo(ours["mean"].dtype).eps * self.largest).all(), (*about, error)
        assert_passed([compare(ours[name], peer[name], exact[name], name=name) for name in exact], *about)
        return ours


# ---- cases ---------------------------------------------------------------------------------------------------------


def check_error_rule(device: str, columns: tuple[int, ...] = (1, 3, 63, 64, 65, 257, 768, 1024)) -> None:
    """Through the public functions and their gradients, against the reference and torch."""
    with seqkern.use_backend("cuda"):
        for dtype, n in itertools.product(FLOATS, columns):
            rows = 33 if n < 300 else 5
            cases = [layer_norm_case(rows, n), add_layer_norm_case(rows, n, dropout_p=0.3)]
            if not (n == 1 and dtype == torch.float64):  # torch rounds one column just as the oracle does
                cases += [layer_norm_case(rows, n, centred=False)]
                cases += [add_layer_norm_case(rows, n, dropout_p=0.0, centred=False)]
            for i, case in enumerate(cases):
                assert_passed(check_case(case, dtype, device=device), dtype, n, i)


def check_flavours(device: str) -> None:
    """RMS norms of models: an offset of the weight, a rounding before it."""
    for dtype, (offset, rounds), columns in itertools.product(
        FLOATS, ((0.0, True), (1.0, False), (0.5, True)), (64, 257)
    ):
        flavour = {"weight_offset": offset, "round_before_weight": rounds}
        NormCase(5, columns, dtype, residual=True, centred=False, **flavour).check(device, dtype, columns, flavour)
    for dtype in (torch.float32, torch.bfloat16):  # rows that are walked, and a weight in the rows' dtype
        problem = NormCase(2, 8200, dtype, centred=False, weight=dtype, weight_offset=1.0, round_before_weight=True)
        problem.check(device, dtype)


def check_wide(device: str) -> None:
    """Rows for one block."""
    for dtype in FLOATS:
        wide(device, dtype, (1536, 5120, BLOCK[dtype]))


def check_widest(device: str) -> None:
    """Rows for several blocks, or beyond: what the device's limits make of them."""
    for dtype in FLOATS:
        wide(device, dtype, (BLOCK[dtype] + 8, 2 * BLOCK[dtype] + 1000, 3 * BLOCK[dtype] + 3))


def wide(device: str, dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
    for columns, (rows, centred) in itertools.product(lengths, ((3, True), (1, False))):
        problem = NormCase(rows, columns, dtype, residual=centred, dropout_p=0.25 if centred else None, centred=centred)
        problem.check(device, dtype, columns, centred)


def check_options(device: str) -> None:
    """What may be absent, parameters of every dtype, strided rows, and every combination of needs."""
    for dtype, columns in itertools.product(FLOATS, (24, 43)):
        about = (dtype, columns)
        for pad in (8, 16, 3):
            NormCase(33, columns, dtype, residual=True, dropout_p=0.5, pad=pad).check(device, *about, "pad", pad)
        for centred, needs in itertools.product((True, False), itertools.product((True, False), repeat=2)):
            ours = NormCase(9, columns, dtype, needs=needs, centred=centred).check(device, *about, needs)
            assert [ours[name].numel() > 0 for name in RESULTS[-2:]] == list(needs)
            assert ours["mean"].shape == ((9,) if centred else (0,))
        for weight, bias in itertools.product((None, *FLOATS), repeat=2):
            if weight == bias or weight is None or bias is None:
                NormCase(5, columns, dtype, weight=weight, bias=bias).check(device, *about, weight, bias)
        NormCase(5, columns, dtype, grad_sum=False).check(device, *about, "no grad_sum")
        NormCase(5, columns, dtype, residual=True, dropout_p=0.5, grad_sum=False).check(device, *about, "no grad_sum")
        for rows in (0, 1, 2):
            NormCase(rows, columns, dtype, residual=True, dropout_p=0.1).check(device, *about, "rows", rows)
    for rows in (0, 3):
        ours = NormCase(rows, 0, torch.float32, residual=True).run(torch.ops.seqkern_cuda, device)
        assert ours["output"].shape == ours["grad_residual"].shape == (rows, 0)
        assert ours["rstd"].shape == (rows,)


def close(ours: Tensor, right: Tensor) -> None:
    """Within a last place."""
    eps = torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours, right, rtol=eps, atol=eps)


def check_layouts(device: str) -> None:
    """Strided rows are read in place, other layouts copied, expanded gradients as they are: the same numbers."""
    for dtype, columns in itertools.product((torch.float32, torch.bfloat16), (40, 33)):
        dense = NormCase(6, columns, dtype, residual=True)
        expected = dense.run(torch.ops.seqkern_cuda, device)
        for make in (
            lambda t: torch.stack([t, t], 1).flatten(0, 1)[::2],
            lambda t: t.t().contiguous().t(),
            lambda t: torch.cat([t[:, :1], t], 1)[:, 1:],
            lambda t: torch.cat([t, t], 1).as_strided(t.shape, (2 * t.size(1), 1)),
        ):
            other = NormCase(6, columns, dtype, residual=True)
            for name in ("input", "residual", "grad_output", "grad_sum"):
                setattr(other, name, make(getattr(dense, name)))
            for name, result in other.check(device, dtype, columns).items():
                close(result, expected[name])  # not always the same kernel
        for expanded in (torch.ones(()).expand(6, columns), torch.arange(columns).expand(6, columns)):
            dense.grad_output = expanded.to(dtype).contiguous()
            expected = dense.check(device, dtype, columns)
            dense.grad_output = expanded.to(dtype)
            for name, result in dense.check(device, dtype, columns).items():
                close(result, expected[name])


def check_many_rows(device: str) -> None:
    """More rows than the grid has teams at once, and a number that no team divides."""
    for dtype, rows, columns in (
        (torch.bfloat16, 1031, 16),
        (torch.float32, 1031, 3),
        (torch.float64, 700, 8),
        (torch.float16, 331, 1032),
        (torch.float32, 97, 2050),
    ):
        NormCase(rows, columns, dtype, residual=True, dropout_p=0.1).check(device, dtype, rows, columns)
    for columns in (1, 4):  # sums of many equal numbers, which round the same way every time
        problem = NormCase(20000, columns, torch.float32, centred=False, weight=None, bias=None, grad_sum=False)
        problem.input.fill_(1)
        problem.grad_output.fill_(0.1)
        grads = problem.run(torch.ops.seqkern_cuda, device)
        exact = 20000 * torch.tensor(0.1).double()
        for name, each in (("grad_bias", exact), ("grad_weight", exact / (1 + 1e-5) ** 0.5)):
            error = ((grads[name] - each) / exact).abs().max()
            assert error < 2e-6, (columns, name, error)


def check_same_mask(device: str) -> None:
    for dtype, columns, seed in itertools.product(FLOATS, (1, 5, 64, 130), (0, -1, 2**62 + 12345)):
        problem = NormCase(37, columns, dtype, residual=True, dropout_p=0.5, seed=seed)
        problem.input.fill_(1)
        problem.residual.fill_(0)
        problem.grad_output.fill_(0)
        problem.grad_sum.fill_(1)
        keep = torch.where(reference.keep_mask(problem.seed, 0.5, 37, columns), 2.0, 0.0).to(dtype)
        ours = problem.run(torch.ops.seqkern_cuda, device)
        assert torch.equal(ours["sum"], keep)
        assert torch.equal(ours["grad_input"], keep)
        for p, kept in ((0.0, 1.0), (1.0, 0.0)):
            problem.dropout_p = p
            assert torch.equal(problem.run(torch.ops.seqkern_cuda, device)["sum"], torch.full_like(keep, kept))


def check_numbers(device: str) -> None:
    """Means far from zero, constant rows, squares that overflow, NaN and infinity."""
    for columns, dtype in itertools.product((64, 65, 2000, 20000), (torch.float32, torch.float64)):
        about = (columns, dtype)
        for mean in (1e2, 1e4, -1e6):
            NormCase(3, columns, dtype, mean=mean).check(device, *about, mean)
        outliers = NormCase(3, columns, dtype)
        outliers.input[:, :40] += 1e3
        outliers.check(device, *about, "outliers")

        for value in (0.0, 7.0, -1e4, 3e38):
            constant = NormCase(2, columns, dtype)
            constant.input.fill_(value)
            output = constant.run(torch.ops.seqkern_cuda, device)["output"]
            assert torch.equal(output, constant.bias.to(dtype).expand(2, columns)), (*about, value)
        for outlier, centred in itertools.product((2e18, 3e37), (True, False)):
            huge = NormCase(3, columns, dtype, centred=centred, weight=None, bias=None)
            huge.input[:, :3] = outlier
            huge.input[1, :32] = outlier
            output = huge.run(torch.ops.seqkern_cuda, device)["output"]
            exact = reference.layer_norm(huge.input.double(), None, None, 1e-5, centred)
            bound = torch.finfo(dtype).eps * max(64, 4 * exact.abs().max())
            assert (output - exact).abs().max() < bound, (*about, outlier, bound)
        bad = NormCase(4, columns, dtype)
        clean = bad.run(torch.ops.seqkern_cuda, device)["output"]
        bad.input[1, 5], bad.input[2, 7] = float("nan"), float("inf")
        for centred in (True, False):
            bad.centred = centred
            output = bad.run(torch.ops.seqkern_cuda, device)["output"]
            assert output[1].isnan().all(), about
            assert output[2, 7].isnan(), about
            if centred:
                assert torch.equal(output[[0, 3]], clean[[0, 3]]), about
    constant = NormCase(2, 100003, torch.float32, centred=False, weight=None, bias=None)
    constant.input.fill_(3.7)  # every addition rounds the same way
    output = constant.run(torch.ops.seqkern_cuda, device)["output"]
    exact = reference.layer_norm(constant.input.double(), None, None, 1e-5, False)
    assert (output - exact).abs().max() < 1.3e-7


def check_rows_alone(device: str) -> None:
    """A row's result does not depend on the batch."""
    for dtype, columns in ((torch.float32, 130), (torch.bfloat16, 96), (torch.bfloat16, 2048), (torch.float32, 9000)):
        problem = NormCase(21, columns, dtype)
        batch = problem.run(torch.ops.seqkern_cuda, device)
        for name in ("input", "grad_output", "grad_sum"):
            setattr(problem, name, getattr(problem, name)[17:18].clone())
        alone = problem.run(torch.ops.seqkern_cuda, device)
        for name in ("output", "mean", "rstd", "grad_residual"):
            assert torch.equal(alone[name], batch[name][17:18]), (dtype, columns, name)


def check_refusals(device: str) -> None:
    x, row = torch.randn(4, 8, device=device), torch.randn(4, device=device)
    seed = torch.tensor([1], device=device)
    forward, backward = torch.ops.seqkern_cuda.layer_norm_fwd, torch.ops.seqkern_cuda.layer_norm_bwd
    plain, drop = (1e-5, 0.0, True, 0.0, False), (1e-5, 0.5, True, 0.0, False)
    for words, call in (
        ("input must have 2 dimensions, got 1", lambda: forward(row, None, None, None, None, *plain)),
        ("weight must have size 8 in dimension 0", lambda: forward(x, None, row, None, None, *plain)),
        ("residual must have ScalarType", lambda: forward(x, x.double(), None, None, None, *plain)),
        ("dropout needs a residual", lambda: forward(x, None, None, None, seed, *drop)),
        ("round_before_weight is RMS norm's", lambda: forward(x, None, None, None, None, 1e-5, 0.0, True, 0.0, True)),
        ("needs a seed", lambda: forward(x, x, None, None, None, *drop)),
        ("must be a probability", lambda: forward(x, x, None, None, seed, 1e-5, 1.5, *plain[2:])),
        ("rstd must have size 4", lambda: backward(x, None, x, row, row[:3], None, None, 0.0, True, 0.0, True, True)),
        ("mean must have ScalarType",
         lambda: backward(x, None, x, row.double(), row, None, None, 0.0, True, 0.0, True, True)),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=words):
            call()


def problems() -> Iterator[NormCase]:
    for dtype, columns in itertools.product(FLOATS, (33, 64, 1032, 2 * BLOCK[torch.float64])):
        yield NormCase(37 if columns < 2000 else 3, columns, dtype, residual=True, dropout_p=0.3)


def check_digest(device: str) -> None:
    """Prints a digest of the bits of all results: the same for every schedule and run."""
    results = (problem.run(torch.ops.seqkern_cuda, device) for problem in problems())
    print_digest((t for each in results for t in each.values()), finite=True)


CHECKS = checks_of(globals())
HERE = Path(__file__)


# ---- in the host executor ------------------------------------------------------------------------------------------

WIDE = ["check_wide", "check_widest", "arch=80", "check_widest", "arch=90", "cluster=2", "check_widest"]


def test_executor_error_rule(simt):
    simt(HERE, "check_error_rule", seed=1)


def test_executor_options_and_wide_rows(simt):
    quick = [
        "check_options",
        "check_flavours",
        "check_layouts",
        "check_same_mask",
        "check_rows_alone",
        "check_refusals",
    ]
    simt(HERE, *quick, *WIDE, seed=2)


def test_executor_numbers_and_bits(simt):
    """The same bits for every schedule."""
    digests = ["seed=1", "check_digest", "seed=2", "check_digest", "seed=3", "check_digest"]
    rows = ["check_many_rows", "multiprocessors=1", "check_many_rows"]
    assert_same_digest(simt(HERE, "check_numbers", *rows, *digests), 3)


def test_executor_finds_no_race(simt):
    simt(HERE, "check_digest", seed=7, race=True)


@pytest.mark.slow
def test_executor_finds_no_race_anywhere(simt):
    simt(HERE, *CHECKS, seed=8, race=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("limits", [{}, {"arch": 80}, {"multiprocessors": 1}], ids=str)
def test_executor_everything(limits, seed, simt):
    simt(HERE, *CHECKS, seed=seed, **limits)


# ---- on a GPU ------------------------------------------------------------------------------------------------------

test_gpu = gpu_test(CHECKS)
test_gpu_same_bits_every_run = gpu_bits_test(check_digest, times=3)


if __name__ == "__main__":
    run_words(CHECKS, "cpu")
