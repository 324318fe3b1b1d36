"""Matrix products around GPU kernels, by torch, with results in the accumulator's dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from seqkern._tensors import accumulator


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a @ b, matrices or batches of them, in the accumulator's dtype, without rounding to a shorter one in between."""
    acc = accumulator(a.dtype)
    if out is None:  # always passes `out`, which autocast (it may be on in a backward pass) leaves alone
        out = a.new_empty((*a.shape[:-1], b.size(-1)), dtype=acc)
    if 0 in (*a.shape, b.size(-1)):  # an empty sum or an empty result
        return out.zero_()
    multiply = torch.mm if a.dim() == 2 else torch.bmm
    if a.dtype == acc:
        return multiply(a, b, out=out)
    if a.is_cuda:
        return multiply(a, b, out_dtype=acc, out=out)
    return multiply(a.to(acc), b.to(acc), out=out)  # interpreter: torch has no mixed product on CPU


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b for matrices; total has the accumulator's dtype."""
    if 0 in (*a.shape, b.size(-1)):
        return
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, out=total)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), out=total)
