"""The calls of the GPU-marked tests of Triton kernels, through the compile-only driver (triton_driver.py).

    python tests/triton/triton_launches.py ARCH quick|all [SLICE ...]

Forward and backward as on a GPU, without a look at the numbers: nothing was launched. Every call is made, what fails is
told at the end. "quick" makes a few calls that together meet every kernel and option, each for one architecture in
turn.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import test_attention_triton as attention
import test_rnn_triton as rnn
import torch
import triton
from triton.errors import TritonError
from triton_driver import DEVICES, compile_only

import seqkern
from seqkern import testing
from seqkern._slices import SLICES
from seqkern.ops.ffn import ACTIVATIONS
from seqkern.reference.conv1d import ACTIVATIONS as ACTIVATIONS_OF_MAX
from seqkern.reference.highway import ACTIVATIONS as ACTIVATIONS_OF_HIGHWAY
from seqkern.reference.sequence_pool import KINDS
from seqkern.testing import rnn_calls as layers
from seqkern.testing.attention_calls import CASES, OpCase, sample
from seqkern.testing.attention_calls import call as call_attention
from seqkern.testing.option_sets import ATTENTION_OPTIONS, ATTENTION_SHAPES, PACKED_LENGTHS, PACKED_OPTIONS

CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")  # of single steps
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MASKED_DROPOUT = OpCase(lengths=((33, 70),) * 2, mask="added", dropout_p=0.3, dtype=torch.float64)
Call = tuple[str, Callable[[], Any]]


def through_autograd(case: testing.Case, dtype: torch.dtype) -> None:
    """What `check_case` runs of ours: dispatch, forward and backward."""
    inputs = {name: t.to(dtype) for name, t in case.inputs(torch.Generator().manual_seed(0)).items()}
    testing.run(case.ours, inputs, names=case.outputs, differentiate=case.differentiable)


# Of the cases by name, those of the quick tests.
QUICK = (
    "everything", "decoding", "key lengths", "bool mask by key", "alibi in float16", "mask shared by packed sequences",
    "LSTM", "peepholes", "everything, GRU",
)  # fmt: skip


def attention_calls(quick: bool) -> Iterator[Call]:
    for dtype in [torch.bfloat16] if quick else DTYPES:
        yield f"attention rows of stride 1 {dtype}", partial(rows_of_stride_1, dtype)
    for name, case in CASES.items():
        if quick and name not in QUICK:
            continue
        for dtype in [case.dtype] if quick else DTYPES:
            yield f"attention {name} {dtype}", partial(call_attention, replace(case, dtype=dtype))
    if quick:
        yield "attention float64, masked dropout of 64", partial(call_attention, replace(MASKED_DROPOUT, head_dim=64))
        return
    for seed in [*attention.RANDOM, *attention.MORE]:
        yield f"attention sample {seed}", partial(call_attention, sample(seed), seed)
    shapes = [(f"shape {name}", {}, shape) for name, shape in ATTENTION_SHAPES.items()]
    shapes += [(name, {"queries": 130, "head_dim": 32}, case) for name, case in ATTENTION_OPTIONS.items()]
    packed = {"packed": PACKED_LENGTHS, "head_dim": 32}
    shapes += [(f"packed {name}", packed, case) for name, case in PACKED_OPTIONS.items()]
    for name, least, case in shapes:
        for dtype in DTYPES:
            made: Any = testing.attention_case(**least | case)  # type: ignore[arg-type]
            yield f"attention {name} {dtype}", partial(through_autograd, made, dtype)
    for dim in (8, 64, 128, 256):
        for mask in ("added", "bool"):
            case = replace(MASKED_DROPOUT, head_dim=dim, value_dim=dim, mask=mask)
            yield f"attention float64, {mask} masked dropout of {dim}", partial(call_attention, case)


def rows_of_stride_1(dtype: torch.dtype) -> None:
    """A head dimension of 1, and a row seen through a transpose; the rows that a decoder's cache has."""
    for queries in (70, 1):
        column = torch.randn(2, 2, queries, 1, dtype=dtype).requires_grad_()
        seqkern.attention(column, column, column, causal=True).sum().backward()
        row = torch.randn(2, 2, 1, queries, dtype=dtype).transpose(-1, -2).requires_grad_()
        seqkern.attention(row, row, row).sum().backward()


def norm_calls(quick: bool) -> Iterator[Call]:
    for columns in [1024] if quick else [1, 63, 768, 1024, 5120, 16384]:
        for dtype in [torch.float32, torch.bfloat16] if quick else DTYPES:
            for centred in [dtype == torch.float32] if quick else [True, False]:
                cases = [testing.layer_norm_case(130, columns, centred=centred)]
                cases += [
                    testing.add_layer_norm_case(130, columns, centred=centred, dropout_p=p)
                    for p in ([0.3] if quick else [0.0, 0.3])
                ]
                for case in cases:
                    yield f"{case.outputs} {columns} {dtype} {centred}", partial(through_autograd, case, dtype)


def glu_calls(quick: bool) -> Iterator[Call]:
    for op, options in (("swiglu", {}), ("geglu", {}), ("geglu", {"approximate": "tanh"})):
        for dtype in [torch.bfloat16] if quick else DTYPES:
            for shape in [(33, 129)] if quick else [(1, 1), (1, 64), (33, 129), (130, 2816)]:
                yield f"{op} {shape} {dtype}", partial(through_autograd, testing.glu_case(op, *shape, **options), dtype)
            yield f"{op} of halves {dtype}", partial(halves, op, options, dtype)


def halves(op: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    gate, up = torch.randn(7, 2 * 129, dtype=dtype).requires_grad_().chunk(2, -1)
    getattr(seqkern, op)(gate, up, **options).sum().backward()


def rope_calls(quick: bool) -> Iterator[Call]:
    for interleaved, wide in [(False, False)] if quick else [(i, w) for i in (False, True) for w in (False, True)]:
        for dtype in [torch.bfloat16] if quick else DTYPES:
            for dim, rotary_dim in [(128, 128)] if quick else [(2, 2), (64, 64), (80, 32), (256, 256)]:
                case = testing.rope_case(dim=dim, rotary_dim=rotary_dim, interleaved=interleaved, wide=wide)
                yield f"rope {dim} {rotary_dim} {interleaved} {wide} {dtype}", partial(through_autograd, case, dtype)


def cross_entropy_calls(quick: bool) -> Iterator[Call]:
    yield from loss_calls(testing.cross_entropy_case, [{}], quick)


def linear_cross_entropy_calls(quick: bool) -> Iterator[Call]:
    yield from loss_calls(testing.linear_cross_entropy_case, [{}, {"bias": True}], quick)


def loss_calls(make: Callable[..., testing.Case], more: list[dict[str, Any]], quick: bool) -> Iterator[Call]:
    full = {"class_weight": True, "label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0, "return_lse": True}
    for reduction in ("mean", "none"):
        for dtype in [torch.bfloat16] if quick else DTYPES:
            for shape in [(70, 8200)] if quick else [(1, 1), (3, 100), (70, 8200)]:
                for options in more if quick else [*more, full | more[-1]]:
                    case = make(*shape, reduction=reduction, **options)
                    yield (
                        f"{make.__name__} {shape} {options} {reduction} {dtype}",
                        partial(through_autograd, case, dtype),
                    )


def sample_calls(quick: bool) -> Iterator[Call]:
    every: dict[str, Any] = {"top_k": 50, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.9, "temperature": 0.8}
    of_rows = {name: torch.full((3,), value) for name, value in every.items()}
    history = {"history": torch.randint(50, (3, 7)), "repetition_penalty": 1.2}
    for order in ("transformers", "vllm", "llama.cpp"):
        for dtype in [torch.bfloat16] if quick else DTYPES:
            for classes in [50] if quick else [1, 50, 8200]:
                for name, options in {"no": {}, "numbers": every, "of rows": of_rows | history}.items():
                    z = torch.randn(3, classes, dtype=dtype)
                    options = {"order": order} | options
                    yield f"sample {classes} {order} {name} {dtype}", partial(drawn, z, options)


def drawn(logits: torch.Tensor, options: dict[str, Any]) -> None:
    seqkern.sample(logits, seed=3, position=5, return_logprob=True, **options)
    seqkern.filter_logits(logits, **options)


def ffn_calls(quick: bool) -> Iterator[Call]:
    for activation in ["geglu"] if quick else ACTIVATIONS:
        for dtype in [torch.bfloat16] if quick else DTYPES:
            for width in [130] if quick else [1, 130, 2100]:
                case = testing.ffn_case(activation, width=width, recompute=width == 1)
                yield f"ffn {activation} {width} {dtype}", partial(through_autograd, case, dtype)


def sgns_loss_calls(quick: bool) -> Iterator[Call]:
    for columns in [33] if quick else [1, 33, 100, 1030]:
        for dtype in [torch.bfloat16] if quick else DTYPES:
            case = testing.sgns_loss_case(columns=columns)
            yield f"sgns_loss {columns} {dtype}", partial(through_autograd, case, dtype)


def embedding_calls(quick: bool) -> Iterator[Call]:
    kinds: list[dict[str, Any]] = [
        {"dropout_p": 0.1}, {"norm": False}, {"positions": None, "norm": False},
        {"positions": "sinusoidal", "columns": 34, "offset": torch.tensor([0, 5, 3])},
        {"offset": torch.tensor([0, 5, 3]), "columns": 700},
    ]  # fmt: skip
    for number, options in enumerate(kinds[:1] if quick else kinds):
        for dtype in [torch.bfloat16] if quick else DTYPES:
            case = testing.embedding_case(**options)
            yield f"embedding {number} {dtype}", partial(through_autograd, case, dtype)


def additive_calls(quick: bool) -> Iterator[Call]:
    kinds: list[dict[str, Any]] = [
        {"mask": "added", "return_weights": True, "return_lse": True}, {"mask": "bool"},
        {"bias": False, "lengths": False},
    ]  # fmt: skip
    for number, options in enumerate(kinds[:1] if quick else kinds):
        for dtype in [torch.bfloat16] if quick else DTYPES:
            for shape in [(3, 13, 50)] if quick else [(3, 13, 50), (1, 1, 1), (2, 70, 1100)]:
                case = testing.additive_attention_case(*shape, **options)
                yield f"additive_attention {number} {shape} {dtype}", partial(through_autograd, case, dtype)


def decoder_calls(quick: bool) -> Iterator[Call]:
    kinds: list[dict[str, Any]] = [
        {"order": "luong", "mask": True}, {"cell": "gru"}, {"order": "luong", "score": "dot", "bias": False},
        {"cell": "gru", "score": "projected", "lengths": False},
    ]  # fmt: skip
    for number, options in enumerate(kinds[:1] if quick else kinds):
        for dtype in [torch.bfloat16] if quick else DTYPES:
            for shape in [(3, 2, 11)] if quick else [(3, 2, 11), (1, 1, 1), (2, 2, 1100)]:
                case = testing.attention_rnn_case(*shape, **options)
                yield f"attention_rnn {number} {shape} {dtype}", partial(through_autograd, case, dtype)


def highway_calls(quick: bool) -> Iterator[Call]:
    for activation in ("tanh",) if quick else ACTIVATIONS_OF_HIGHWAY:
        for dtype in [torch.bfloat16] if quick else DTYPES:
            for shape in [(33, 129)] if quick else [(1, 1), (33, 129), (130, 525)]:
                case = testing.highway_case(*shape, activation=activation)
                yield f"highway {activation} {shape} {dtype}", partial(through_autograd, case, dtype)


def pool_calls(quick: bool) -> Iterator[Call]:
    for kind in ["max"] if quick else KINDS:
        for dtype in [torch.bfloat16] if quick else DTYPES:
            for packed in [False] if quick else [False, True]:
                for columns in [34] if quick else [2, 34, 256]:
                    case = testing.sequence_pool_case(kind, columns=columns, packed=packed)
                    yield f"sequence_pool {kind} {columns} {packed} {dtype}", partial(through_autograd, case, dtype)


LENGTHS = (40, 2, 0, 17)


def convolution_calls(quick: bool) -> Iterator[Call]:
    for activation in ["relu"] if quick else ACTIVATIONS_OF_MAX:
        for dtype in [torch.bfloat16] if quick else DTYPES:
            for packed in [False] if quick else [False, True]:
                for columns, width, filters in [(33, 4, 37)] if quick else [(33, 4, 37), (1, 1, 1), (128, 5, 100)]:
                    case = testing.conv1d_max_case(
                        LENGTHS, columns, width, filters, packed=packed, activation=activation
                    )
                    name = f"conv1d_max {activation} {columns} {width} {filters} {packed} {dtype}"
                    yield name, partial(through_autograd, case, dtype)
    steps: list[dict[str, Any]] = [{"stride": 2, "padding": (4, 1), "dilation": 3}, {}, {"padding": "causal"}]
    for number, options in enumerate(steps[:1] if quick else steps):
        for dtype in [torch.bfloat16] if quick else DTYPES:
            for columns, width, filters in [(33, 4, 37)] if quick else [(33, 4, 37), (1, 1, 1), (128, 5, 100)]:
                case = testing.conv1d_case(LENGTHS, columns, width, filters, **options)
                yield f"conv1d {number} {columns} {width} {filters} {dtype}", partial(through_autograd, case, dtype)


def beam_calls(quick: bool) -> Iterator[Call]:
    for dtype in [torch.bfloat16] if quick else DTYPES:
        for classes in [50] if quick else [1, 50, 8200]:
            case = testing.beam_step_case(classes=classes, candidates=min(8, 4 * classes))
            yield f"beam_step {classes} {dtype}", partial(through_autograd, case, dtype)


def rnn_calls(quick: bool) -> Iterator[Call]:
    for name, case in rnn.CASES.items():
        if quick and name not in QUICK:
            continue
        for dtype in [case.dtype] if quick else DTYPES:
            yield f"rnn {name} {dtype}", partial(layers.call, replace(case, dtype=dtype))
    for cell in range(6):
        for hidden in [] if quick else [31, 32, 64, 100, 128, 200, 256]:
            for dtype in DTYPES:
                case = layers.OpCase(cell=cell, steps=9, batch=33, hidden=hidden, directions=2, dtype=dtype)
                yield f"rnn {cell} of {hidden} {dtype}", partial(layers.call, case)
    for seed in [] if quick else [*rnn.RANDOM, *range(1100, 1180)]:
        yield f"rnn sample {seed}", partial(layers.call, layers.sample(seed), seed)
    for cell in [] if quick else [*CELLS, "additive_rnn", "interpolated_rnn"]:
        for dtype in DTYPES:
            for shape in [(1, 1, 1, 64), (65, 33, 7, 129), (65, 8, 64, 256)]:
                case = testing.rnn_case(cell, *shape)
                yield f"{cell} {shape} {dtype}", partial(through_autograd, case, dtype)


def cell_calls(quick: bool) -> Iterator[Call]:
    for cell in ["gru"] if quick else CELLS:
        for dtype in [torch.float16] if quick else DTYPES:
            for shape in [(33, 7, 129)] if quick else [(1, 1, 64), (33, 7, 129), (8, 64, 256)]:
                case = testing.rnn_cell_case(cell, *shape)
                yield f"{cell}_cell {shape} {dtype}", partial(through_autograd, case, dtype)


def tree_calls(quick: bool) -> Iterator[Call]:
    for kind in ("child_sum",) if quick else ("child_sum", "nary"):
        for dtype in [torch.bfloat16] if quick else DTYPES:
            for hidden in [33] if quick else [1, 33, 300]:
                case = testing.tree_lstm_case(kind, hidden=hidden)
                yield f"tree_lstm {kind} {hidden} {dtype}", partial(through_autograd, case, dtype)


def seconds() -> float:
    """Processor time so far, with ptxas's."""
    return sum(os.times()[:4])


PARTS = {
    "attention": attention_calls,
    "layer_norm": norm_calls,
    "glu": glu_calls,
    "ffn": ffn_calls,
    "highway": highway_calls,
    "embedding": embedding_calls,
    "sgns_loss": sgns_loss_calls,
    "additive_attention": additive_calls,
    "attention_rnn": decoder_calls,
    "sequence_pool": pool_calls,
    "conv1d": convolution_calls,
    "rope": rope_calls,
    "cross_entropy": cross_entropy_calls,
    "linear_cross_entropy": linear_cross_entropy_calls,
    "sample": sample_calls,
    "beam_step": beam_calls,
    "rnn": rnn_calls,
    "rnn_cell": cell_calls,
    "tree_lstm": tree_calls,
}
assert PARTS.keys() == SLICES.keys()


def main(arch: int, quick: bool, parts: list[str]) -> None:
    failed: dict[str, str] = {}
    counts: dict[str, Any] = {"triton": triton.__version__, "arch": arch, "calls": 0}
    with compile_only(arch) as driver, seqkern.use_backend("triton"):
        calls = [call for part in parts or PARTS for call in PARTS[part](quick)]
        for name, call in calls[sorted(DEVICES).index(arch) :: len(DEVICES)] if quick else calls:
            print(name, flush=True)  # the last one that is told, where a compiler aborts
            counts["calls"] += 1
            try:
                call()
            except (TritonError, RuntimeError, TypeError, ValueError) as error:
                failed[name] = f"{type(error).__name__}: {error}"
    counts |= {"launches": driver.launches, "specialisations": driver.compiled, "kernels": len(driver.names)}
    for name, error in failed.items():
        print(f"\n{name}: {error}")
    print(json.dumps(counts | {"failed": len(failed), "seconds": round(seconds())}))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "quick", sys.argv[3:])
