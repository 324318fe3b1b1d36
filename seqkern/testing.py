"""Verification: the error rule, and every op run against the float64 oracle and against torch.

The oracle is the reference in float64 on the same, already rounded, inputs. A result passes when

    max|x - oracle| <= 2 * max|torch - oracle| + 2 * unit,    unit = max|(oracle + 0.3 - 0.3) - oracle| in the dtype,

so that the bound scales with the problem and the dtype, and no tolerance is picked by hand. A few numbers can come
through that sum unharmed by luck: the unit is never less than half a last place of the largest number. In float64 the
oracle is rounded as much as the result, and both count: the bound is twice as wide. Where a case allows a gradient more
than twice torch's error, it says why: `Case.factors`.

Example:
    >>> import torch
    >>> from seqkern.testing import verify
    >>> all(report.passed for report in verify("layer_norm", torch.float32))
    True
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import seqkern
from seqkern import _library, reference
from seqkern.ops import attention as attention_ops
from seqkern.ops._rnn_checks import CELLS, GATES, GRU, LSTM, RNN_RELU, RNN_TANH


@dataclass(frozen=True)
class ErrorReport:
    """The error of one tensor beside torch's own: absolute maximum, the bound it must keep, and relative L2."""

    error: float
    torch_error: float
    unit: float
    bound: float
    relative_l2: float
    torch_relative_l2: float
    passed: bool
    name: str = ""

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        return (
            f"{self.name or 'tensor'} {verdict}: error {self.error:.3g}, bound {self.bound:.3g} "
            f"(torch {self.torch_error:.3g}, unit {self.unit:.3g}); "
            f"relative L2 {self.relative_l2:.3g}, torch {self.torch_relative_l2:.3g}"
        )


def compare(
    actual: Tensor, torch_result: Tensor, oracle: Tensor, *, factor: float = 2.0, name: str = ""
) -> ErrorReport:
    """Applies the error rule.

    Args:
        actual: the result under test; its dtype sets the unit.
        torch_result: torch's result in the same dtype, same shape.
        oracle: the float64 result, same shape. Where it is infinite or NaN, `actual` must be exactly that.
        factor: how many times torch's error is allowed.

    Raises:
        ValueError: the shapes differ.
    """
    if not actual.shape == torch_result.shape == oracle.shape:
        raise ValueError(f"shapes differ: {tuple(actual.shape)}, {tuple(torch_result.shape)}, {tuple(oracle.shape)}")
    dtype = actual.dtype
    actual, torch_result, oracle = (t.detach().cpu() for t in (actual, torch_result, oracle))
    wide, theirs, oracle = actual.double(), torch_result.double(), oracle.double()
    finite = oracle.isfinite()
    same_elsewhere = bool(((wide == oracle) | (wide.isnan() & oracle.isnan()))[~finite].all())
    exact, wide = oracle[finite], wide[finite]
    # Where torch itself is not finite, it sets no standard.
    theirs = torch.where(theirs[finite].isfinite(), theirs[finite], exact)

    rounded = exact.to(dtype)
    half_last_place = torch.finfo(dtype).eps / 2 * _max_abs(exact)
    unit = max(_max_abs((rounded + 0.3 - 0.3).double() - rounded.double()), half_last_place)
    error, torch_error = _max_abs(wide - exact), _max_abs(theirs - exact)
    bound = (factor * torch_error + 2 * unit) * (2 if dtype == torch.float64 else 1)
    norm = exact.norm().item() or 1.0
    return ErrorReport(
        error=error,
        torch_error=torch_error,
        unit=unit,
        bound=bound,
        relative_l2=(wide - exact).norm().item() / norm,
        torch_relative_l2=(theirs - exact).norm().item() / norm,
        passed=same_elsewhere and error <= bound,  # a NaN error fails
        name=name,
    )


def _max_abs(t: Tensor) -> float:
    return t.abs().max().item() if t.numel() else 0.0


@dataclass(frozen=True)
class Case:
    """One op with inputs to run it on: the same call in seqkern, in torch and in the reference.

    `inputs` makes the tensors, in float64; the functions take them by name and return a tensor or a tuple of tensors.
    Where an op is not differentiable, there are no gradients to compare.
    """

    inputs: Callable[[torch.Generator], dict[str, Tensor]]
    ours: Callable[..., Any]
    torch: Callable[..., Any]
    reference: Callable[..., Any]
    factors: Mapping[str, float] = field(
        default_factory=dict, hash=False
    )  # by the tensor's name, where it is not `compare`'s
    outputs: tuple[str, ...] | None = None  # their names, as in `run`
    differentiable: bool = True


def run(
    function: Callable[..., Any],
    inputs: dict[str, Tensor],
    cotangent_dtypes: Sequence[torch.dtype] | None = None,
    cotangent_seed: int = 1,
    names: Sequence[str] | None = None,
    differentiate: bool = True,
) -> dict[str, Tensor]:
    """Outputs of function(**inputs) and the gradients of every input, for fixed random cotangents.

    Cotangents are rounded to `cotangent_dtypes` (default: the outputs' own), so that a float64 run can use those of a
    run in another dtype. `names` are the outputs' (default: output, or output 0 and so on).
    """
    leaves = {
        name: t.detach().clone().requires_grad_(differentiate and t.is_floating_point()) for name, t in inputs.items()
    }
    result = function(**leaves)
    outputs = (result,) if isinstance(result, Tensor) else tuple(result)
    if names is None:
        names = ["output"] if len(outputs) == 1 else [f"output {i}" for i in range(len(outputs))]
    tensors = {name: o.detach() for name, o in zip(names, outputs, strict=True)}
    if not differentiate:
        return tensors
    generator = torch.Generator().manual_seed(cotangent_seed)
    cotangents = [
        torch.randn(o.shape, dtype=torch.float64, generator=generator).to(dtype).to(o)
        for o, dtype in zip(outputs, cotangent_dtypes or [o.dtype for o in outputs], strict=True)
    ]
    wanted = {name: t for name, t in leaves.items() if t.requires_grad}
    grads = torch.autograd.grad(outputs, list(wanted.values()), cotangents, allow_unused=True)
    return tensors | {f"grad {name}": g for name, g in zip(wanted, grads, strict=True) if g is not None}


def check_case(case: Case, dtype: torch.dtype, *, device: str = "cpu", seed: int = 0) -> list[ErrorReport]:
    """Runs a case in `dtype` under the backend in force: one report for every output and gradient."""
    exact = case.inputs(torch.Generator().manual_seed(seed))
    rounded = {name: t.to(dtype).to(device) for name, t in exact.items()}
    options: dict[str, Any] = {"names": case.outputs, "differentiate": case.differentiable}
    ours = run(case.ours, rounded, **options)
    dtypes = [t.dtype for name, t in ours.items() if not name.startswith("grad ")]
    theirs = run(case.torch, rounded, dtypes, **options)
    oracle = run(case.reference, {name: t.double().cpu() for name, t in rounded.items()}, dtypes, **options)
    return [
        compare(ours[name], theirs[name], oracle[name], factor=case.factors.get(name, 2.0), name=name)
        for name in oracle
    ]


def verify(
    op: str, dtype: torch.dtype, *, backend: str = "auto", isa: str | None = None, device: str = "cpu"
) -> list[ErrorReport]:
    """Runs the standard case of `op` against the oracle and torch: one report for every output and gradient.

    Args:
        op: "attention", "attention_varlen", "attention_decode" (no gradients), "layer_norm", "rms_norm",
            "add_layer_norm", "add_rms_norm", "lstm", "gru", "rnn_tanh", "rnn_relu", each of them with "_cell"
            behind, "lstm_options" or "gru_options".
        dtype: float64, float32, bfloat16 or float16.
        backend, isa: as in `seqkern.use_backend`, and the CPU tier to force.
        device: where to run seqkern and torch; the oracle runs on the CPU.

    Raises:
        ValueError: unknown op, backend or tier.
    """
    if op not in CASES:
        raise ValueError(f"op must be one of {', '.join(CASES)}, got {op!r}")
    tier = _library.use_cpu_isa(isa) if isa else contextlib.nullcontext()
    with seqkern.use_backend(backend), tier:
        return [replace(report, name=f"{op} {report.name}") for report in check_case(CASES[op], dtype, device=device)]


@contextlib.contextmanager
def poison() -> Iterator[None]:
    """Fills every tensor that torch allocates uninitialised with NaN: an element that no kernel wrote shows."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    _library._extension.seqkern_pool_set_poison(1)
    try:
        yield
    finally:
        _library._extension.seqkern_pool_set_poison(0)
        torch.use_deterministic_algorithms(deterministic)
        settings.fill_uninitialized_memory = fill


# ---- the standard cases -------------------------------------------------------------------------------------------


def _normal(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=generator) * scale


def layer_norm_case(
    rows: int = 130, columns: int = 257, *, mean: float = 0.0, std: float = 1.0, centred: bool = True
) -> Case:
    """A layer norm; not centred, an RMS norm."""

    def make(g: torch.Generator) -> dict[str, Tensor]:
        tensors = {"input": _normal(g, rows, columns, scale=std) + mean, "weight": _normal(g, columns)}
        return tensors | ({"bias": _normal(g, columns)} if centred else {})

    shape, eps = (columns,), 1e-5
    if centred:
        return Case(
            inputs=make,
            ours=lambda input, weight, bias: seqkern.layer_norm(input, shape, weight, bias, eps),
            torch=lambda input, weight, bias: torch.nn.functional.layer_norm(input, shape, weight, bias, eps),
            reference=lambda input, weight, bias: reference.layer_norm(input, weight, bias, eps),
        )
    return Case(
        inputs=make,
        ours=lambda input, weight: seqkern.rms_norm(input, shape, weight, eps),
        # Sums over rows and columns in the other order: in float64 torch would round just as the oracle does.
        torch=lambda input, weight: torch.nn.functional.rms_norm(input.flip(0, 1), shape, weight.flip(0), eps).flip(
            0, 1
        ),
        reference=lambda input, weight: reference.layer_norm(input, weight, None, eps, False),
    )


def add_layer_norm_case(
    rows: int = 130, columns: int = 257, *, dropout_p: float = 0.1, mean: float = 0.0, centred: bool = True
) -> Case:
    """Dropout, residual addition and norm: the normalised sum and the sum. torch's dropout gets the same mask."""
    seed, shape, eps = torch.tensor(2**40 + 7), (columns,), 1e-5
    case = layer_norm_case(rows, columns, centred=centred)
    keep = reference.keep_mask(seed, dropout_p, rows, columns)
    scale = 1 / (1 - dropout_p) if dropout_p < 1 else 0.0

    def make(g: torch.Generator) -> dict[str, Tensor]:
        return {"residual": _normal(g, rows, columns) + mean} | case.inputs(g)

    def ours(residual: Tensor, input: Tensor, **parameters: Tensor) -> Any:
        function: Any = seqkern.add_layer_norm if centred else seqkern.add_rms_norm
        options = {"dropout_p": dropout_p, "seed": seed.to(input.device)} if dropout_p else {}
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


def attention_case(
    queries: int = 130,
    keys: int | None = None,
    *,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int | None = None,
    head_dim: int = 64,
    value_dim: int | None = None,
    causal: bool = True,
    causal_align: str = "lower_right",
    scale: float | None = None,
    std: float = 1.0,
    mask: str | None = None,
    mask_shape: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    window: tuple[int | None, int | None] | None = None,
    slopes: str | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    dropout_p: float = 0.0,
    packed: Sequence[tuple[int, int]] | None = None,
) -> Case:
    """The output and the log-sum-exp.

    `std` is that of the queries. `mask` is "bool" or "added", of `mask_shape` or (heads, queries, keys), and hides a
    fifth of the scores. `lengths` are those of the keys. `slopes` are "shared", (heads,), or "own", (batch, heads).
    `packed`: the numbers of queries and of keys of the sequences of an `attention_varlen`, instead of batch, queries
    and keys; it has three rows more than the sequences.
    """
    if packed is not None:
        batch, queries, keys = len(packed), max(q for q, _ in packed), max(k for _, k in packed)
    keys, kv_heads, value_dim = keys or queries, kv_heads or heads, value_dim or head_dim
    sizes = packed or [(queries, keys)]
    starts = [torch.tensor([0, *itertools.accumulate(size)]) for size in zip(*sizes, strict=True)]
    seed = torch.tensor(2**40 + 7)
    hidden = torch.rand(mask_shape or (heads, queries, keys), generator=torch.Generator().manual_seed(3)) < 0.2
    options: dict[str, Any] = {"causal": causal, "causal_align": causal_align, "window": window, "softcap": softcap}
    options |= {"scale": scale, "dropout_p": dropout_p, "return_lse": True}

    def make(g: torch.Generator) -> dict[str, Tensor]:
        def tensor(heads: int, length: int, total: Tensor, dim: int) -> Tensor:
            return _normal(g, *((int(total[-1]) + 3, heads, dim) if packed else (batch, heads, length, dim)))

        tensors = {
            "query": tensor(heads, queries, starts[0], head_dim) * std,
            "key": tensor(kv_heads, keys, starts[1], head_dim),
            "value": tensor(kv_heads, keys, starts[1], value_dim),
        }
        if mask == "added":
            tensors["attn_mask"] = _normal(g, *hidden.shape).masked_fill(hidden, -math.inf)
        if slopes:
            shape = (batch, heads) if slopes == "own" else (heads,)
            tensors["alibi_slopes"] = torch.rand(shape, dtype=torch.float64, generator=g) / 16
        return tensors | ({"sinks": _normal(g, heads) + 1} if sinks else {})

    def extra(query: Tensor) -> dict[str, Any]:
        """The options that are tensors without gradients."""
        found = {} if lengths is None else {"key_lengths": torch.tensor(lengths, device=query.device)}
        return found | ({"attn_mask": ~hidden.to(query.device)} if mask == "bool" else {})

    def ours(query: Tensor, key: Tensor, value: Tensor, **tensors: Any) -> Any:
        tensors |= extra(query)
        with mock.patch.object(attention_ops, "_seed", lambda op, p, query: seed.to(query.device) if p else None):
            if packed is None:
                return seqkern.attention(query, key, value, **tensors, **options)
            limits = (*(t.to(query.device) for t in starts), queries, keys)
            function: Any = seqkern.attention_varlen
            return function(query, key, value, *limits, **tensors, **options)

    def with_rows(function: Callable[..., tuple[Tensor, Tensor]]) -> Any:
        """function(one sequence or dense batch, its diagonal, its rows of the dropout matrix) for all sequences."""

        def all_of_them(query: Tensor, key: Tensor, value: Tensor, **tensors: Tensor) -> tuple[Tensor, Tensor]:
            tensors |= extra(query)
            bias = tensors.pop("attn_mask", None)
            if bias is not None:
                bias = bias[(None,) * (4 - bias.dim())]
            if packed is not None:
                query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
            rows = torch.arange(query.shape[:3].numel(), device=query.device).view(query.shape[:3])
            out, lse = [], []
            for s in range(len(sizes)):
                (a, b), (c, d) = (at[s : s + 2].tolist() for at in starts)
                own = dict(tensors)
                if packed is not None and slopes == "own":
                    own["alibi_slopes"] = own["alibi_slopes"][s]
                if bias is not None:
                    part = bias[s : s + 1] if packed is not None and len(bias) > 1 else bias
                    own["attn_mask"] = part[:, :, : b - a, : d - c]
                diagonal = d - c - (b - a) if causal_align == "lower_right" else 0
                parts = query[:, :, a:b], key[:, :, c:d], value[:, :, c:d]
                result = function(*parts, **own, diagonal=diagonal, rows=rows[:, :, a:b])
                out.append(result[0])
                lse.append(result[1])
            if packed is None:
                return out[0], lse[0]
            rest = query.shape[2] - int(starts[0][-1])
            out.append(query.new_zeros(1, heads, rest, value_dim))
            lse.append(lse[0].new_full((1, heads, rest), -math.inf))
            return torch.cat(out, 2)[0].transpose(0, 1), torch.cat(lse, 2)[0].transpose(0, 1)

        return all_of_them

    left, right = (-1 if side is None else side for side in window or (None, None))
    band: dict[str, Any] = {"left": left, "right": 0 if causal else right}

    def expected(query: Tensor, key: Tensor, value: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
        dropped: dict[str, Any] = {"seed": seed.to(query.device), "dropout_p": dropout_p} if dropout_p else {}
        return reference.attention(query, key, value, **rest, **band, **dropped, scale=scale, softcap=softcap or 0.0)

    plain = not (mask or lengths or window or slopes or softcap or sinks or dropout_p)

    def of_torch(
        query: Tensor, key: Tensor, value: Tensor, diagonal: int, rows: Tensor, sinks: Tensor | None = None, **rest: Any
    ) -> tuple[Tensor, Tensor]:
        # Sums over the head dimension in the other order: in float64 torch would round just as the oracle does.
        query, key = query.flip(-1), key.flip(-1)
        wide = torch.promote_types(query.dtype, torch.float32)
        factor = head_dim**-0.5 if scale is None else scale
        z = query.to(wide) @ key.to(wide).repeat_interleave(heads // kv_heads, 1).mT * factor
        if softcap:
            z = softcap * torch.tanh(z / softcap)
        # The rest is added: to scores that are 0, the reference gives what is.
        nothing = torch.zeros_like(query[..., :1], dtype=wide), torch.zeros_like(key[..., :1], dtype=wide)
        z = z + reference.attention_scores(nothing[0], nothing[1], **rest, diagonal=diagonal, **band)
        if sinks is not None:
            z = torch.cat([z, sinks.to(wide)[:, None, None].expand(*z.shape[:3], 1)], -1)
        unseen = z.isneginf().all(-1, keepdim=True)
        z = z.masked_fill(unseen, 0)
        lse = z.logsumexp(-1).masked_fill(unseen[..., 0], -math.inf)
        if plain:
            visible: dict[str, Any] = {"is_causal": causal}
            if causal and diagonal:  # torch knows the upper left alignment only
                visible = {"attn_mask": torch.ones_like(z[0, 0], dtype=torch.bool).tril(diagonal)}
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, scale=scale, enable_gqa=heads != kv_heads, **visible
            ), lse
        weights = z.softmax(-1).masked_fill(unseen, 0)[..., : key.shape[2]]
        if dropout_p:
            kept = reference.keep_mask(seed.to(rows.device), dropout_p, rows.flatten(), key.shape[2]).view(
                weights.shape
            )
            weights = weights * kept / (1 - dropout_p)
        return weights.to(value.dtype) @ value.repeat_interleave(heads // kv_heads, 1), lse

    # Gradients of scores are p (dp - delta). What torch computes here, keeping p, sums delta from the same p and dp;
    # a kernel that does not has the two terms rounded independently (FlashAttention's tests allow gradients three times
    # torch's error). And of a few numbers, each a sum over all queries, torch's error can be small by luck.
    factors = dict.fromkeys(("grad query", "grad key", "grad value", "grad attn_mask"), 2.0 if plain else 4.0)
    factors |= {"grad alibi_slopes": 8.0, "grad sinks": 8.0}
    functions: dict[str, Any] = {"ours": ours, "torch": with_rows(of_torch), "reference": with_rows(expected)}
    return Case(inputs=make, **functions, factors=factors, outputs=("output", "lse"))


def attention_decode_case(
    lengths: Sequence[int] = (5, 130, 64), *, queries: int = 3, heads: int = 8, kv_heads: int = 2, head_dim: int = 64
) -> Case:
    """New tokens of sequences with `lengths` keys in their caches, of which the last are the new tokens'.

    What the caches hold beyond is NaN for seqkern.
    """
    room = max(lengths) + 7

    def make(g: torch.Generator) -> dict[str, Tensor]:
        caches = {name: _normal(g, len(lengths), kv_heads, room, head_dim) for name in ("key_cache", "value_cache")}
        return {"query": _normal(g, len(lengths), heads, queries, head_dim)} | caches

    def ours(query: Tensor, **caches: Tensor) -> Tensor:
        ends = torch.tensor(lengths, device=query.device)
        beyond = (torch.arange(room, device=query.device) >= ends[:, None])[:, None, :, None]
        keys, values = (cache.masked_fill(beyond, math.nan) for cache in caches.values())
        output: Any = seqkern.attention_decode(query, keys, values, ends)
        return output

    def one_by_one(function: Callable[..., Tensor]) -> Any:
        def all_of_them(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> Tensor:
            parts = []
            for b, n in enumerate(lengths):
                parts.append(function(query[b : b + 1], key_cache[b : b + 1, :, :n], value_cache[b : b + 1, :, :n]))
            return torch.cat(parts)

        return all_of_them

    def of_torch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # Sums over the head dimension in the other order: in float64 torch would round just as the oracle does.
        visible = torch.ones(queries, key.shape[2], dtype=torch.bool, device=query.device).tril(key.shape[2] - queries)
        return torch.nn.functional.scaled_dot_product_attention(
            query.flip(-1), key.flip(-1), value, visible, enable_gqa=True
        )

    def expected(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return reference.attention(query, key, value, diagonal=key.shape[2] - queries, right=0)[0]

    return Case(
        inputs=make, ours=ours, torch=one_by_one(of_torch), reference=one_by_one(expected), differentiable=False
    )


def rnn_case(
    cell: str = "lstm",
    steps: int = 65,
    batch: int = 9,
    inputs: int = 33,
    hidden: int = 65,
    *,
    num_layers: int = 1,
    bidirectional: bool = False,
    bias: bool = True,
    projection: int = 0,
    std: float = 1.0,
    lengths: Sequence[int] | None = None,
    norms: bool = False,
    peepholes: bool = False,
    recurrent_dropout: float = 0.0,
    zoneout: tuple[float, float] = (0.0, 0.0),
    training: bool = True,
    resets: bool = False,
    recompute: bool = False,
) -> Case:
    """Output and final state of `seqkern.lstm` and its like; `std` is that of the input, and scales what the gates see.

    torch is torch's own network where it has the options, elsewhere a loop over torch's ops in the same dtype.
    """
    kind, directions, width = CELLS[cell], 2 if bidirectional else 1, projection or hidden
    groups = GATES[kind]
    shapes: dict[str, tuple[int, ...]] = {}
    for run in range(num_layers * directions):
        shapes[f"w_ih {run}"] = groups * hidden, inputs if run < directions else directions * width
        shapes[f"w_hh {run}"] = groups * hidden, width
        if bias:
            shapes[f"b_ih {run}"] = shapes[f"b_hh {run}"] = (groups * hidden,)
        if projection:
            shapes[f"w_hr {run}"] = width, hidden
    for run in range(num_layers * directions):
        sides = ("ih", "hh", "c") if kind == LSTM else ("ih", "hh")
        for name in (f"norm_{side} {part}" for side in sides if norms for part in ("weight", "bias")):
            shapes[f"{name} {run}"] = (hidden if "_c" in name else groups * hidden,)
        if peepholes:
            shapes[f"peephole {run}"] = 3, hidden
    seed = torch.tensor(2**40 + 7)
    borders = torch.rand(steps, batch, generator=torch.Generator().manual_seed(3)) < 0.1
    options: dict[str, Any] = {"num_layers": num_layers, "bidirectional": bidirectional, "training": training}
    options |= {"recurrent_dropout": recurrent_dropout, "recompute": recompute}
    options |= {"zoneout": zoneout if kind == LSTM else zoneout[0]}

    def make(g: torch.Generator) -> dict[str, Tensor]:
        tensors = {"input": _normal(g, steps, batch, inputs, scale=std)}
        for name, size in (("h0", width), ("c0", hidden))[: 2 if kind == LSTM else 1]:
            tensors[name] = _normal(g, num_layers * directions, batch, size, scale=0.5)
        for name, shape in shapes.items():
            tensors[name] = _normal(g, *shape, scale=max(hidden, shape[-1] if name.startswith("w_ih") else 1) ** -0.5)
            if kind == RNN_RELU:  # where it bends, an error of the last place is one of the whole gradient: stay away
                tensors[name] *= 0.25
                if name.startswith("b_ih"):
                    tensors[name] += 4 - 8 * (torch.arange(hidden) % 2)
            if name.startswith("w_hh") and hidden == 1:  # larger ones make gradients grow from step to step
                tensors[name] *= 0.5
            if name.startswith("norm") and "weight" in name:  # one for U h does, too
                tensors[name] += 0.25 if "_hh" in name else 1
        return tensors

    def named(tensors: Mapping[str, Tensor], start: str) -> list[Any]:
        return [t for name, t in tensors.items() if name.startswith(start)]

    def ours(input: Tensor, **tensors: Tensor) -> Any:
        state: Any = (tensors["h0"], tensors["c0"]) if kind == LSTM else tensors["h0"]
        weights = [t for name, t in tensors.items() if name[:2] in ("w_", "b_")]
        extra: dict[str, Any] = {"norms": named(tensors, "norm")} if norms else {}
        if peepholes:
            extra["peepholes"] = named(tensors, "peephole")
        if resets:
            extra["resets"] = borders.to(input.device)
        if training and (recurrent_dropout or any(zoneout)):
            extra["seed"] = seed.to(input.device)
        output, state = getattr(seqkern, cell)(input, state, weights, lengths=lengths, **options, **extra)
        return output, *(state if kind == LSTM else (state,))

    def expected(input: Tensor, h0: Tensor, c0: Tensor | None = None, **tensors: Tensor) -> Any:
        ends = None if lengths is None else torch.tensor(lengths)
        x, states = input, []
        if ends is not None:
            x = torch.where((torch.arange(steps)[:, None] < ends)[..., None], x, 0)
        for layer in range(num_layers):
            runs = range(layer * directions, (layer + 1) * directions)
            lists = {
                name: [tensors[f"{name} {run}"] for run in runs] if f"{name} 0" in tensors else []
                for name in ("w_ih", "w_hh", "b_ih", "b_hh", "w_hr", "peephole", "norm")
            }
            if norms:
                sides = []
                for run, w in zip(runs, lists["w_ih"], strict=True):
                    weight, shift, *others = (
                        t for name, t in tensors.items() if name.endswith(f" {run}") and "norm" in name
                    )
                    side = reference.layer_norm(x @ w.t(), weight, shift, 1e-5)
                    sides.append(side + tensors[f"b_ih {run}"] if bias else side)
                    lists["norm"].append(torch.cat(others))
                x, lists["w_ih"], lists["b_ih"] = torch.cat(sides, -1), [], []
            mask, zone_seed = masks(layer, x.dtype)[0], reference.derived_seed(seed, 3 * layer + 1)
            h, c = (None if t is None else t[runs.start : runs.stop] for t in (h0, c0))
            assert h is not None
            options = (borders if resets else None, mask, zone_seed if training and any(zoneout) else None)
            x, *state = reference.rnn(x, h, c, *lists.values(), ends, *options, *zoneout, 1e-5, kind, False)
            states.append(state[:2] if kind == LSTM else state)
        return x, *(torch.cat(each) for each in zip(*states, strict=True))

    def masks(layer: int, dtype: torch.dtype) -> tuple[Any, Any]:
        """A layer's factors of h (D, B, P), and where zoneout keeps the old h and c, two times (D, T, B, H or P)."""
        factors: Any = None
        stays: list[Any] = [None, None]
        if training and recurrent_dropout:
            ones = torch.ones(directions * batch, width, dtype=dtype)
            dropped = reference.dropout(ones, reference.derived_seed(seed, 3 * layer), recurrent_dropout)
            factors = dropped.view(directions, batch, width)
        for k, (p, size) in enumerate(zip(zoneout, (width, hidden), strict=True)):
            if training and p:
                rows = torch.arange(directions * 2 * steps * batch)
                kept = reference.keep_mask(reference.derived_seed(seed, 3 * layer + 1), p, rows, size)
                stays[k] = ~kept.view(directions, 2, steps, batch, size)[:, k]
        return factors, stays

    def of_torch(input: Tensor, h0: Tensor, c0: Any = None, **tensors: Tensor) -> Any:
        # The same network with its sequences, features and units in the other order: in float64 torch would otherwise
        # round just as the oracle does.
        def units(t: Tensor, dim: int, number: int) -> Tensor:
            return t.unflatten(dim, (number, -1)).flip(dim + 1).flatten(dim, dim + 1)

        flipped = {}
        for name, t in tensors.items():
            if name[:5] in ("w_hr ", "peeph"):
                t = t.flip(0, 1) if name.startswith("w") else t.flip(1)
            else:
                t = units(t, 0, 1 if name.startswith("norm_c") else groups)
            if name[:5] in ("w_ih ", "w_hh "):
                t = units(t, 1, directions if name.startswith("w_ih") and int(name.split()[1]) >= directions else 1)
            flipped[name] = t
        x, state = input.flip(1, 2), [h0.flip(1, 2), *([] if c0 is None else [c0.flip(1, 2)])]
        ends = None if lengths is None else torch.tensor(lengths).flip(0)
        if norms or peepholes or resets or recurrent_dropout or any(zoneout) or (ends is not None and 0 in ends):
            output, *state = loop(x, state, flipped, ends)
        else:
            function: Any = getattr(torch._VF, cell)
            arguments = [
                state if kind == LSTM else state[0],
                list(flipped.values()),
                bias,
                num_layers,
                0.0,
                True,
                bidirectional,
            ]
            if ends is None:
                output, *state = function(x, *arguments, False)
            else:
                output, *state = packed(function, x, ends, arguments)
        return units(output, 2, directions).flip(1), *(t.flip(1, 2) for t in state)

    def packed(function: Any, x: Tensor, ends: Tensor, arguments: list[Any]) -> Any:
        data, sizes, order, back = torch.nn.utils.rnn.pack_padded_sequence(x, ends, enforce_sorted=False)
        state = arguments[0]
        arguments[0] = [t[:, order] for t in state] if kind == LSTM else state[:, order]
        output, *state = function(data, sizes, *arguments)
        packed_output = torch.nn.utils.rnn.PackedSequence(output, sizes, order, back)
        padded, _ = torch.nn.utils.rnn.pad_packed_sequence(packed_output, total_length=steps)
        return padded, *(t[:, back] for t in state)

    def loop(x: Tensor, state: list[Tensor], tensors: dict[str, Tensor], ends: Tensor | None) -> Any:
        """What one writes with torch's ops, in the order of `of_torch`."""
        F, device = torch.nn.functional, x.device
        flipped_borders = (
            borders.flip(1).to(device) if resets else torch.zeros(steps, batch, dtype=torch.bool, device=device)
        )
        last = torch.full((batch,), steps, device=device) if ends is None else ends.to(device)
        inside = torch.arange(steps, device=device)[:, None] < last
        x, states = torch.where(inside[..., None], x, 0), []
        for layer in range(num_layers):
            factors, stays = masks(layer, x.dtype)
            outputs = []
            for d in range(directions):
                run = layer * directions + d
                own = {name[: -len(f" {run}")]: t for name, t in tensors.items() if name.endswith(f" {run}")}
                zx = F.linear(x, own["w_ih"], None if norms else own.get("b_ih"))
                if norms:
                    zx = F.layer_norm(zx, zx.shape[2:], own["norm_ih weight"], own["norm_ih bias"])
                    zx = zx + own["b_ih"] if bias else zx
                h: Any = state[0][run]
                c: Any = state[1][run] if kind == LSTM else None
                steps_of_h: list[Any] = [None] * steps
                for t in reversed(range(steps)) if d else range(steps):
                    active = inside[t][:, None]
                    border = torch.zeros_like(inside[t])
                    if t + d < steps:
                        border = flipped_borders[t + d] & inside[t + d]
                    old_h = h * ~border[:, None]
                    old_c: Any = None if c is None else c * ~border[:, None]
                    hm = old_h if factors is None else old_h * factors[d].flip(0, 1).to(device)
                    zh = F.linear(hm, own["w_hh"], None if norms else own.get("b_hh"))
                    if norms:
                        zh = F.layer_norm(zh, zh.shape[1:], own["norm_hh weight"], own["norm_hh bias"])
                        zh = zh + own["b_hh"] if bias else zh
                    gates, gates_h = zx[t].chunk(groups, 1), zh.chunk(groups, 1)
                    if kind == LSTM:
                        i, f, g, o = (a + b for a, b in zip(gates, gates_h, strict=True))
                        p = own.get("peephole", torch.zeros(3, 1, dtype=x.dtype, device=device))
                        i, f = torch.sigmoid(i + p[0] * old_c), torch.sigmoid(f + p[1] * old_c)
                        new_c = f * old_c + i * torch.tanh(g)
                        seen = new_c
                        if norms:
                            seen = F.layer_norm(new_c, (hidden,), own["norm_c weight"], own["norm_c bias"])
                        new_h = torch.sigmoid(o + p[2] * new_c) * torch.tanh(seen)
                        new_h = F.linear(new_h, own["w_hr"]) if projection else new_h
                        c = torch.where(active, zone(new_c, old_c, 1, stays, d, t), c)
                    elif kind == GRU:
                        r, z = (torch.sigmoid(a + b) for a, b in zip(gates[:2], gates_h[:2], strict=True))
                        n = torch.tanh(gates[2] + r * gates_h[2])
                        new_h = n + z * (old_h - n)
                    else:
                        new_h = torch.tanh(zx[t] + zh) if kind == RNN_TANH else torch.relu(zx[t] + zh)
                    h = torch.where(active, zone(new_h, old_h, 0, stays, d, t), h)
                    steps_of_h[t] = h * active
                outputs.append(torch.stack(steps_of_h))
                states.append([h] if c is None else [h, c])
            x = torch.cat(outputs, -1)
        return x, *(torch.stack(each) for each in zip(*states, strict=True))

    def zone(new: Tensor, old: Tensor, k: int, stays: Any, d: int, t: int) -> Tensor:
        if not zoneout[k]:
            return new
        if not training:
            return zoneout[k] * old + (1 - zoneout[k]) * new
        return torch.where(stays[k][d, t].flip(0, 1).to(new.device), old, new)

    # Of sums over all steps and sequences, each of what came through many steps, torch's error can be small by luck.
    factors = dict.fromkeys((f"grad {name}" for name in ("h0", "c0", *shapes)), 4.0)
    outputs = ("output", "h_n", "c_n") if kind == LSTM else ("output", "h_n")
    return Case(inputs=make, ours=ours, torch=of_torch, reference=expected, factors=factors, outputs=outputs)


def rnn_cell_case(cell: str = "lstm", batch: int = 33, inputs: int = 17, hidden: int = 65, *, std: float = 1.0) -> Case:
    kind = CELLS[cell]
    gates = GATES[kind] * hidden
    shapes: dict[str, tuple[int, ...]] = {"input": (batch, inputs), "h": (batch, hidden)}
    if kind == LSTM:
        shapes["c"] = batch, hidden
    shapes |= {"w_ih": (gates, inputs), "w_hh": (gates, hidden), "b_ih": (gates,), "b_hh": (gates,)}

    def expected(
        input: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, c: Any = None
    ) -> Any:
        states = reference.rnn_step(input @ w_ih.t() + b_ih, h @ w_hh.t() + b_hh, h, c, kind)
        return states if kind == LSTM else states[0]

    def run_in(function: Any) -> Any:
        def run(input: Tensor, h: Tensor, c: Any = None, **weights: Tensor) -> Any:
            return function(input, (h, c) if kind == LSTM else h, *weights.values())

        return run

    return Case(
        inputs=lambda g: {
            name: _normal(g, *shape, scale=std if name == "input" else hidden**-0.5) for name, shape in shapes.items()
        },
        ours=run_in(getattr(seqkern, f"{cell}_cell")),
        torch=run_in(getattr(torch, f"{cell}_cell")),
        reference=expected,
        outputs=("h", "c") if kind == LSTM else ("h",),
    )


_ALL_RNN_OPTIONS: dict[str, Any] = {
    "num_layers": 2,
    "bidirectional": True,
    "lengths": [17, 0, 9, 17, 1, 3, 16],
    "norms": True,
    "recurrent_dropout": 0.2,
    "zoneout": (0.1, 0.3),
    "resets": True,
}

CASES: dict[str, Case] = {
    "attention": attention_case(),
    "attention_varlen": attention_case(packed=[(3, 5), (1, 150), (70, 70), (129, 200)], heads=4, kv_heads=2),
    "attention_decode": attention_decode_case(),
    "layer_norm": layer_norm_case(),
    "rms_norm": layer_norm_case(centred=False),
    "add_layer_norm": add_layer_norm_case(),
    "add_rms_norm": add_layer_norm_case(centred=False),
    "lstm": rnn_case("lstm"),
    "gru": rnn_case("gru"),
    "rnn_tanh": rnn_case("rnn_tanh"),
    "rnn_relu": rnn_case("rnn_relu"),
    "lstm_options": rnn_case("lstm", 17, 7, 12, 33, projection=20, peepholes=True, **_ALL_RNN_OPTIONS),
    "gru_options": rnn_case("gru", 17, 7, 12, 33, **_ALL_RNN_OPTIONS),
    "lstm_cell": rnn_cell_case("lstm"),
    "gru_cell": rnn_cell_case("gru"),
    "rnn_tanh_cell": rnn_cell_case("rnn_tanh"),
    "rnn_relu_cell": rnn_cell_case("rnn_relu"),
}
