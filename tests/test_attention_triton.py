"""The Triton attention kernels with every option against the formula in float64: interpreted here, compiled on a GPU.

The launchers are called as the dispatcher calls them, with the ops' own arguments. The interpreter has to be chosen
before the kernels are imported, so a process of its own (this file, run) does the work.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import CASES, Case, as_type, build, formula, sample
from torch import Tensor

from seqkern.testing import poison


def call(case: Case, seed: int = 0) -> tuple[dict[str, Any], Tensor, Tensor, Tensor, Tensor | None, Sequence[Tensor]]:
    """One call forward and backward: (arguments, out, lse, grad_out, grad_lse, grads)."""
    kernels = importlib.import_module(case.kernels)
    arguments = build(case, seed)
    generator = torch.Generator().manual_seed(seed)
    with poison():
        out, lse = kernels.attention_fwd(**arguments)
        grad_out = torch.randn(out.shape, generator=generator).to(out)
        grad_lse = torch.randn(lse.shape, generator=generator).to(lse) if case.grad_lse else None
        if case.strided:
            grad_out = grad_out[..., :1].expand(grad_out.shape)
        backward = {name: value for name, value in arguments.items() if name != "sinks"}
        grads = kernels.attention_bwd(
            grad_out, grad_lse, **backward | {"out": out, "lse": lse, "need_mask": case.need_mask,
                                              "need_slopes": case.need_slopes}
        )  # fmt: skip
    return arguments, out, lse, grad_out, grad_lse, grads


def check(case: Case, seed: int = 0) -> None:
    """One call forward and backward, against the formula."""
    arguments, out, lse, grad_out, grad_lse, grads = call(case, seed)
    exact = as_type(arguments, torch.float64)
    leaves = [exact[name].requires_grad_() for name in ("query", "key", "value")]
    if case.need_mask:
        leaves.append(exact["attn_mask"].requires_grad_())
    right_out, right_lse, scores = formula(**exact)
    loss = (right_out * grad_out.cpu().double()).sum()
    if grad_lse is not None:
        loss = loss + torch.where(right_lse.isinf(), 0, right_lse * grad_lse.cpu().double()).sum()
    if loss.requires_grad:
        wanted = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True, materialize_grads=True)
    else:
        wanted = [torch.zeros_like(leaf) for leaf in leaves]
    shape = "packed" if case.varlen else "dense"
    for t in (out, *grads[:3]):
        assert (t.squeeze(0).transpose(0, 1) if case.varlen else t).is_contiguous(), shape
    assert lse.is_contiguous()
    names = ["out", "lse", "grad_query", "grad_key", "grad_value", "grad_mask"]
    pairs = list(zip(names, (out, lse, *grads[:4]), (right_out, right_lse, *wanted), strict=False))
    if case.need_slopes:
        distance = torch.zeros_like(right_lse)
        pieces = [z for z, _ in scores.values()]
        dz = (
            torch.autograd.grad(loss, pieces, allow_unused=True, materialize_grads=True)
            if loss.requires_grad
            else pieces
        )
        starts = arguments["query_starts"]
        for ((s, h), (z, far)), grad in zip(scores.items(), dz, strict=True):
            b, first = (s, 0) if starts is None else (0, int(starts[s]))
            if loss.requires_grad:
                distance[b, h, first : first + len(z)] = (torch.where(z.isinf(), 0, grad) * far).sum(1)
        pairs.append(("grad_distance", grads[4], distance))
    else:
        assert grads[4].shape == (0,)
    if not case.need_mask:
        assert grads[3].shape == (0,)
    unit = {torch.float64: 1e-13, torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
    for name, ours, right in pairs:
        assert ours.shape == right.shape, (name, ours.shape, right.shape)
        ours_dtype = ours.dtype
        ours, right = ours.detach().cpu().double(), right.detach()
        assert torch.equal(ours.isinf(), right.isinf()), (name, "infinities")
        finite = ~right.isinf()
        bound = (
            (10 if case.extreme else 1)
            * case.slack
            * max(unit[case.dtype], 1e-7 * (ours_dtype == torch.float32))
            * max(1.0, float(right[finite].abs().max()) if finite.any() else 0.0)
        )
        error = float((ours - right)[finite].abs().max()) if finite.any() else 0.0
        assert error <= bound, (name, error, bound)  # a NaN fails


def sequences_apart(device: str = "cpu", module: str = Case.kernels) -> None:
    """A sequence has the same bits alone, in a batch, packed, and with a longer cache around it."""
    kernels = importlib.import_module(module)
    lengths = ((33, 70), (5, 9), (50, 40))
    batch = build(Case(lengths=((50, 70),) * 3, heads=4, device=device), 0)
    packed = build(Case(lengths=lengths, heads=4, varlen=True, right=0, left=21, device=device), 0)
    starts = [[0, *torch.tensor([pair[k] for pair in lengths]).cumsum(0).tolist()] for k in range(2)]
    for s in range(len(lengths)):
        for name, k in (("query", 0), ("key", 1), ("value", 1)):
            packed[name][0, :, starts[k][s] : starts[k][s + 1]] = batch[name][s, :, : lengths[s][k]]
    out, lse = kernels.attention_fwd(**packed)
    grads = kernels.attention_bwd(
        out,
        lse,
        **{k: v for k, v in packed.items() if k != "sinks"},
        out=out,
        lse=lse,
        need_mask=False,
        need_slopes=False,
    )
    for s, (nq, nk) in enumerate(lengths):
        alone = packed | {"query_starts": None, "key_starts": None, "max_queries": nq, "max_keys": nk}
        alone |= {"query": batch["query"][s : s + 1, :, :nq]}
        alone |= {name: batch[name][s : s + 1, :, :nk] for name in ("key", "value")}
        if nq * 2 <= 64 and nq <= 16:
            continue  # few queries alone are decoding, which splits the keys elsewhere
        mine, my_lse = kernels.attention_fwd(**alone)
        mine_bwd = kernels.attention_bwd(
            mine, my_lse, **{k: v for k, v in alone.items() if k != "sinks"}, out=mine, lse=my_lse, need_mask=False,
            need_slopes=False,
        )  # fmt: skip
        rows, keys = slice(*starts[0][s : s + 2]), slice(*starts[1][s : s + 2])
        pairs = [(out[:, :, rows], mine), (lse[:, :, rows], my_lse), (grads[0][:, :, rows], mine_bwd[0])]
        pairs += [(grads[i][:, :, keys], mine_bwd[i]) for i in (1, 2)]
        assert all(torch.equal(a, b) for a, b in pairs), s

    cache = build(
        Case(lengths=((2, 700),) * 2, heads=4, key_lengths=(100, 600), lower_right=True, right=0, device=device), 1
    )
    out, lse = kernels.attention_fwd(**cache)
    for s, nk in enumerate((100, 600)):
        alone = cache | {"query": cache["query"][s : s + 1], "key_lengths": None, "max_keys": nk}
        alone |= {name: cache[name][s : s + 1, :, :nk] for name in ("key", "value")}
        mine, my_lse = kernels.attention_fwd(**alone)
        assert torch.equal(out[s : s + 1], mine)
        assert torch.equal(lse[s : s + 1], my_lse)


def most_negative_numbers(device: str = "cpu", module: str = Case.kernels) -> None:
    """Rows of nothing but the most negative number, as transformers pads: uniform, and every gradient finite."""
    kernels = importlib.import_module(module)
    arguments = build(Case(lengths=((33, 70),), mask="additive", need_mask=True, device=device), 0)
    arguments["attn_mask"][:] = torch.finfo(torch.float32).min
    out, lse = kernels.attention_fwd(**arguments)
    torch.testing.assert_close(out, arguments["value"].mean(2, keepdim=True).expand_as(out))
    arguments.pop("sinks")
    grads = kernels.attention_bwd(out, None, **arguments, out=out, lse=lse, need_mask=True, need_slopes=False)
    assert all(t.isfinite().all() for t in grads)


RANDOM = range(1000, 1006)  # seeds of `sample`, beside the cases by name
MORE = range(1006, 1030)


def test_interpreted(interpreted: Callable[..., None]) -> None:
    interpreted(__file__)


@pytest.mark.slow
def test_interpreted_random(interpreted: Callable[..., None]) -> None:
    interpreted(__file__, MORE.start, MORE.stop)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_compiled(name: str, dtype: torch.dtype) -> None:
    check(replace(CASES[name], dtype=dtype, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [*RANDOM, *MORE])
def test_compiled_random(seed: int) -> None:
    check(sample(seed, "cuda"), seed)


@pytest.mark.gpu
def test_compiled_sequences_apart() -> None:
    sequences_apart("cuda")


@pytest.mark.gpu
def test_compiled_most_negative_numbers() -> None:
    most_negative_numbers("cuda")


def main(first: int = RANDOM.start, last: int = RANDOM.stop) -> None:
    """Everything that `check` is asked, or the samples first ... last - 1 alone."""
    cases = [(case, 0) for case in CASES.values()] if first == RANDOM.start else []
    if cases:
        sequences_apart()
        most_negative_numbers()
    for case, seed in [*cases, *((sample(seed), seed) for seed in range(first, last))]:
        try:
            check(case, seed)
        except BaseException:
            print(seed, case, flush=True)
            raise


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
