"""Cases of the norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import seqkern
from seqkern import reference
from seqkern.testing._checks import Case, normal


def layer_norm_case(
    rows: int = 130,
    columns: int = 257,
    *,
    mean: float = 0.0,
    std: float = 1.0,
    centred: bool = True,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> Case:
    """A layer norm, or an RMS norm if not centred; the last two options are an RMS norm's alone."""

    def make(g: torch.Generator) -> dict[str, Tensor]:
        tensors = {"input": normal(g, rows, columns, scale=std) + mean, "weight": normal(g, columns)}
        return tensors | ({"bias": normal(g, columns)} if centred else {})

    shape, eps = (columns,), 1e-5
    if centred:
        return Case(
            inputs=make,
            ours=lambda input, weight, bias: seqkern.layer_norm(input, shape, weight, bias, eps),
            torch=lambda input, weight, bias: torch.nn.functional.layer_norm(input, shape, weight, bias, eps),
            reference=lambda input, weight, bias: reference.layer_norm(input, weight, bias, eps),
        )
    if weight_offset or round_before_weight:
        flavour: dict[str, Any] = {"weight_offset": weight_offset, "round_before_weight": round_before_weight}
        return Case(
            inputs=make,
            ours=lambda input, weight: seqkern.rms_norm(input, shape, weight, eps, **flavour),
            # In reverse, as below.
            torch=lambda input, weight: _as_models_do(input.flip(0, 1), weight.flip(0), eps, **flavour).flip(0, 1),
            reference=lambda input, weight: reference.layer_norm(input, weight, None, eps, False, **flavour),
        )
    return Case(
        inputs=make,
        ours=lambda input, weight: seqkern.rms_norm(input, shape, weight, eps),
        # Sums over rows and columns in reverse: in float64 torch would otherwise round exactly like the oracle.
        torch=lambda input, weight: torch.nn.functional.rms_norm(input.flip(0, 1), shape, weight.flip(0), eps).flip(
            0, 1
        ),
        reference=lambda input, weight: reference.layer_norm(input, weight, None, eps, False),
    )


def _as_models_do(input: Tensor, weight: Tensor, eps: float, weight_offset: float, round_before_weight: bool) -> Tensor:
    """The ops of which models of transformers compose their RMS norms."""
    accumulate = torch.promote_types(input.dtype, torch.float32)
    wide = input.to(accumulate)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if round_before_weight and not weight_offset:  # Llama
        return weight * wide.to(input.dtype)
    if round_before_weight:
        wide = wide.to(input.dtype).to(accumulate)
    return (wide * (weight_offset + weight.to(accumulate))).to(input.dtype)  # Gemma


def add_layer_norm_case(
    rows: int = 130,
    columns: int = 257,
    *,
    dropout_p: float = 0.1,
    mean: float = 0.0,
    centred: bool = True,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> Case:
    """Dropout, residual addition and norm: the normalised sum and the sum. torch's dropout gets the same mask."""
    seed, shape, eps = torch.tensor(2**40 + 7), (columns,), 1e-5
    flavour: dict[str, Any] = {}
    if weight_offset or round_before_weight:
        flavour = {"weight_offset": weight_offset, "round_before_weight": round_before_weight}
    case = layer_norm_case(rows, columns, centred=centred, **flavour)
    keep = reference.keep_mask(seed, dropout_p, rows, columns)
    scale = 1 / (1 - dropout_p) if dropout_p < 1 else 0.0

    def make(g: torch.Generator) -> dict[str, Tensor]:
        return {"residual": normal(g, rows, columns) + mean} | case.inputs(g)

    def ours(residual: Tensor, input: Tensor, **parameters: Tensor) -> Any:
        function: Any = seqkern.add_layer_norm if centred else seqkern.add_rms_norm
        options = {"dropout_p": dropout_p, "seed": seed.to(input.device)} if dropout_p else {}
        options |= flavour
        return function(input, residual, shape, eps=eps, **parameters, **options)

    def composed(norm: Callable[..., Tensor]) -> Any:
        def function(residual: Tensor, input: Tensor, **parameters: Tensor) -> Any:
            dropped = input * scale * keep.to(input.device) if dropout_p else input
            return norm(total := dropped + residual, **parameters), total

        return function

    return Case(
        inputs=make,
        ours=ours,
        torch=composed(case.torch),
        reference=composed(case.reference),
        outputs=("output", "sum"),
    )
