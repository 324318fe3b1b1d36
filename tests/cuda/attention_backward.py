"""A backward pass of attention by the kernels in CUDA C++, and the gradients that it is held against."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from cuda_checks import moved
from torch import Tensor

from seqkern.ops._attention_autograd import lse_dtype
from seqkern.testing import assert_passed, compare
from seqkern.testing.attention_calls import OpCase, as_type, build, formula, spoil

GRADIENTS = ("grad_query", "grad_key", "grad_value", "grad_mask", "grad_distance")


class BackwardCall:
    """A call of the op by a path's kernels: its arguments, made on the CPU, and what the formula says of them.

    What no sequence holds and what lies behind the lengths is NaN.
    """

    def __init__(self, case: OpCase, seed: int = 0, *, path: str, queries: float = 1.0, keys: float = 1.0) -> None:
        self.case, self.seed, self.path = case, seed, path
        self.arguments = build(replace(case, device="cpu"), seed)
        self.arguments["query"] *= queries
        self.arguments["key"] *= keys
        spoil(self.arguments)
        self.forward()

    def forward(self) -> None:
        """Results by the CPU kernels, of the arguments as they are now, and gradients of them."""
        out, lse = torch.ops.seqkern.attention_fwd(*self.arguments.values())
        lse = lse.to(torch.promote_types(out.dtype, torch.float32))  # as on a GPU; the CPU's own is wider
        generator = torch.Generator().manual_seed(self.seed)
        grad_out = torch.randn(out.shape, generator=generator).to(out)
        if self.case.varlen:  # what no sequence holds
            starts = self.arguments["query_starts"]
            grad_out[:, :, : int(starts[0])] = math.nan
            grad_out[:, :, int(starts[-1]) :] = math.nan
        if self.case.strided:
            grad_out = grad_out[..., :1].expand(grad_out.shape)
        grad_lse = torch.randn(lse.shape, generator=generator) if self.case.grad_lse else None
        self.results = {"grad_out": grad_out, "grad_lse": grad_lse, "out": out, "lse": lse}

    def forward_by_path(self, device: str) -> None:
        """Results by the CUDA kernel: of float32 its scores have the backward's bits, and lse their errors."""
        a = [t.to(device) if isinstance(t, Tensor) else t for t in self.arguments.values()]
        out, lse = torch.ops.seqkern_cuda.attention_fwd(*a, False, self.path)
        self.results |= {"out": out.cpu(), "lse": lse.cpu()}

    def run(self, device: str, tf32: bool = False) -> dict[str, Tensor]:
        case = self.case
        a = {name: moved(t, device) for name, t in self.arguments.items() if name != "sinks"}
        r = {name: moved(t, device) for name, t in self.results.items()}
        q, k, v = a.pop("query"), a.pop("key"), a.pop("value")
        grads = torch.ops.seqkern_cuda.attention_bwd(
            r["grad_out"], r["grad_lse"], q, k, v, r["out"], r["lse"], *a.values(), case.need_mask, case.need_slopes,
            tf32, self.path,
        )  # fmt: skip
        for name, grad, like in zip(GRADIENTS, grads, (q, k, v), strict=False):
            assert grad.shape == like.shape, name
            assert grad.dtype == like.dtype, name
            assert (grad.squeeze(0).transpose(0, 1) if case.varlen else grad).is_contiguous(), name
        return {name: grad.cpu() for name, grad in zip(GRADIENTS, grads, strict=True)}

    def gradients(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """By the formula with everything in `dtype`, differentiated."""
        case = self.case
        starts = self.arguments["query_starts"]
        exact = as_type(self.arguments, dtype)
        leaves = [exact[name].requires_grad_() for name in ("query", "key", "value")]
        if case.need_mask:
            leaves.append(exact["attn_mask"].requires_grad_())
        out, lse, scores = formula(**exact)
        loss = (out * self.results["grad_out"].to(dtype)).sum()
        if case.grad_lse:
            loss = loss + torch.where(lse.isinf(), 0, lse * self.results["grad_lse"].to(dtype)).sum()
        rows = [z for z, _ in scores.values()]
        if not loss.requires_grad:
            wanted = [torch.zeros_like(t) for t in (*leaves, *rows)]
        else:
            wanted = torch.autograd.grad(loss, [*leaves, *rows], allow_unused=True, materialize_grads=True)
        result = dict(zip(GRADIENTS, wanted[: len(leaves)], strict=False))
        if case.need_slopes:
            distance = torch.zeros_like(lse)
            for ((s, h), (z, far)), grad in zip(scores.items(), wanted[len(leaves) :], strict=True):
                b, first = (s, 0) if starts is None else (0, int(starts[s]))
                distance[b, h, first : first + len(z)] = (torch.where(z.isinf(), 0, grad) * far).sum(1)
            result["grad_distance"] = distance
        return {name: t.detach() for name, t in result.items()}

    def by_cpu(self) -> dict[str, Tensor]:
        """By the CPU kernels, whose delta comes from the rounded output too."""
        a = {name: t for name, t in self.arguments.items() if name != "sinks"}
        r = dict(self.results)
        for name in ("lse", "grad_lse"):
            r[name] = None if r[name] is None else r[name].to(lse_dtype(self.arguments["query"]))
        grads = torch.ops.seqkern.attention_bwd(
            r["grad_out"], r["grad_lse"], a.pop("query"), a.pop("key"), a.pop("value"), r["out"], r["lse"],
            *a.values(), self.case.need_mask, self.case.need_slopes,
        )  # fmt: skip
        return dict(zip(GRADIENTS, grads, strict=True))

    def vanishes(self, name: str, ours: Tensor, exact: Tensor) -> bool:
        """Whether a 16-bit gradient of scores is 0 because rows see one key, and ours is only what tensor cores cut.

        That is, of dO V^T, half a unit in the last place of float32 for each block of 8 products.
        """
        other = {"grad_query": "key", "grad_key": "query"}.get(name)
        if other is None or self.case.dtype == torch.float32 or exact.numel() == 0 or exact.any():
            return False
        grad, value, factor = (
            t.float().nan_to_num() for t in (self.results["grad_out"], self.arguments["value"], self.arguments[other])
        )
        if not (grad.numel() and value.numel() and factor.numel()):
            return False
        products = float(grad.norm(dim=-1).max() * value.norm(dim=-1).max())
        cut = products * self.case.value_dim / 8 * torch.finfo(torch.float32).eps / 2
        return float(ours.abs().max()) <= cut * abs(self.case.scale) * float(factor.abs().max())

    def check(self, device: str, *about: object) -> dict[str, Tensor]:
        case = self.case
        exact, peer = self.gradients(torch.float64), self.gradients(case.dtype)
        # The CPU kernels' delta comes from the rounded output too, which dropout's scale makes large.
        two_peers = case.dtype == torch.float32 or case.dropout_p > 0
        if two_peers:
            other = self.by_cpu()
        if case.dtype == torch.float32:
            self.forward_by_path(device)
        ours = self.run(device)
        assert ours["grad_mask"].numel() == (self.arguments["attn_mask"].numel() if case.need_mask else 0)
        assert ours["grad_distance"].numel() == (self.results["lse"].numel() if case.need_slopes else 0)
        factor = 3.0 if case.softcap else 2.0
        if case.dtype == torch.float32 and case.dropout_p == 0.9:
            factor *= 3  # products of tf32, times ten
        if two_peers:
            peer = {
                name: max((peer[name], other[name]), key=lambda t, n=name: float((t - exact[n]).abs().max()))
                if right.numel() else peer[name] for name, right in exact.items()
            }  # fmt: skip
        reports = [
            compare(ours[name], peer[name].to(ours[name].dtype), exact[name], factor=factor, name=name)
            for name in exact
            if not self.vanishes(name, ours[name], exact[name])
        ]
        assert_passed(reports, *about, case)
        return ours
