"""Sampling tokens from logits, and the filters alone: the functional API and fake kernels."""

from __future__ import annotations

import math
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor

from seqkern import reference
from seqkern._keywords import explicit, refuse
from seqkern._library import backend_for, kernel
from seqkern._recording import check_not_nested, is_proxy, record
from seqkern.ops._autograd import FLOATING, Cost, per_sample
from seqkern.reference.sample import ORDERS

Order = Literal["transformers", "vllm", "llama.cpp"]
LOGPROBS = (False, "processed", "raw")  # by their number in the kernels' schemas
GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # from one seed another one for each row: seed + row GOLDEN


@overload
def sample(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    typical_p: float | Tensor | None = None,
    repetition_penalty: float | Tensor | None = None,
    history: Tensor | None = None,
    history_lengths: Tensor | None = None,
    seed: int | Tensor | None = None,
    position: int | Tensor = 0,
    order: Order = "transformers",
    return_logprob: Literal[False] = False,
) -> Tensor: ...
@overload
def sample(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    typical_p: float | Tensor | None = None,
    repetition_penalty: float | Tensor | None = None,
    history: Tensor | None = None,
    history_lengths: Tensor | None = None,
    seed: int | Tensor | None = None,
    position: int | Tensor = 0,
    order: Order = "transformers",
    return_logprob: Literal[True, "processed", "raw"],
) -> tuple[Tensor, Tensor]: ...


@explicit
def sample(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    typical_p: float | Tensor | None = None,
    repetition_penalty: float | Tensor | None = None,
    history: Tensor | None = None,
    history_lengths: Tensor | None = None,
    seed: int | Tensor | None = None,
    position: int | Tensor = 0,
    order: Order = "transformers",
    return_logprob: Literal[False, True, "processed", "raw"] = False,
    **unexpected: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Draws a token from each row of logits, without sorting them.

    Every option but `order` and `return_logprob` is a number, or a tensor of the rows' shape, a number for each.

    Args:
        logits: shape (..., V); float64, float32, bfloat16 or float16, taken as float32. Minus infinity: a token that
            cannot be.
        temperature: divides the logits; 0, or below 1e-30: the largest one, of equal ones the first.
        top_k: keeps the k most probable tokens; None or 0: all.
        top_p: keeps the fewest tokens whose probability reaches it, the most probable first; None or 1: all, 0: one.
        min_p: keeps tokens at least so many times as probable as the most probable one; None or 0: all.
        typical_p: keeps the fewest tokens whose probability reaches it, those first whose information is next to the
            entropy; None or 1: all.
        repetition_penalty: divides positive and multiplies negative logits of the tokens in history, before all else.
        history: int64, shape (..., L): tokens so far, which count once; beyond history_lengths, or negative, none.
        history_lengths: int64, of the rows' shape: tokens of each row; None: L.
        seed: of each row. From one number every row gets another one; None: that number is drawn by torch's generator.
        position: of the token in its sequence: another one with the same seed draws anew.
        order: whose: "transformers" (temperature, top_k, top_p, min_p, typical_p), "vllm" (temperature, min_p, top_k,
            top_p, typical_p) or "llama.cpp" (top_k, typical_p, top_p, min_p, temperature). Of equally probable tokens
            at a limit the first are kept; but all for typical_p, and in the orders "transformers" and "vllm" for top_k.
        return_logprob: also the token's log-probability, float32: "processed" (or True) of what is left, which it was
            drawn from, or "raw" of the logits as given.

    Returns:
        Tokens, int64, shape (...); or (tokens, log-probabilities). No gradient.

    A row's token depends on its logits, options, seed and position alone, not on other rows or on their number, and is
    the same on CPU and GPU but where rounding decides at a limit.

    Raises:
        TypeError: not tensors or numbers, or dtypes that do not fit.
        ValueError: shapes, devices or numbers that do not fit.
        RuntimeError: on CPU, nan, infinity (also after the division by the temperature), or nothing but minus infinity
            in a row. On a GPU such a row's token is 0.
        NotImplementedError: the backend in force does not run on the device.

    Source: reference/sample.py names one for each option.

    Example:
        >>> import torch, seqkern
        >>> logits = torch.randn(2, 100)
        >>> tokens = seqkern.sample(logits, temperature=0.8, top_k=50, top_p=0.9, seed=7, position=12)
        >>> tokens.shape, torch.equal(seqkern.sample(logits, temperature=0), logits.argmax(-1))
        (torch.Size([2]), True)
    """
    if any(map(is_proxy, (logits, seed, position))):
        return record(sample, locals())
    if unexpected:
        refuse(sample, unexpected)
    op = "sample"
    wanted = "processed" if return_logprob is True else return_logprob
    if wanted not in LOGPROBS:
        raise ValueError(f'{op}: return_logprob must be False, True, "processed" or "raw", got {return_logprob!r}')
    if order not in ORDERS:
        raise ValueError(f'{op}: order must be "transformers", "vllm" or "llama.cpp", got {order!r}')
    z, shape, options = _arguments(
        op, logits, history, history_lengths, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        typical_p=typical_p, repetition_penalty=repetition_penalty,
    )  # fmt: skip
    draws = (*_integers(op, "seed", _seed(seed), z, shape), *_integers(op, "position", position, z, shape))
    tokens, logprobs = _drawn(z, draws, options, order, wanted)
    if len(shape) != 1:
        tokens = tokens.reshape(shape)
        logprobs = logprobs.reshape(shape) if wanted else logprobs
    return (tokens, logprobs) if wanted else tokens


@explicit
def filter_logits(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    typical_p: float | Tensor | None = None,
    repetition_penalty: float | Tensor | None = None,
    history: Tensor | None = None,
    history_lengths: Tensor | None = None,
    order: Order = "transformers",
    **unexpected: NoReturn,
) -> Tensor:
    """The logits that `sample` draws by: divided, penalised, and minus infinity where a token is left out.

    Args:
        logits, temperature, ..., order: as `sample`.

    Returns:
        float32, logits's shape; the probabilities are its softmax. At temperature 0 the largest logit is left. No
        gradient.

    Raises:
        As `sample`. On a GPU a row that it would refuse is returned as it is.

    Example:
        >>> import torch, seqkern
        >>> seqkern.filter_logits(torch.tensor([3.0, 1.0, 2.0, 0.0]), top_k=2)
        tensor([3., -inf, 2., -inf])
    """
    if is_proxy(logits):
        return record(filter_logits, locals())
    if unexpected:
        refuse(filter_logits, unexpected)
    op = "filter_logits"
    if order not in ORDERS:
        raise ValueError(f'{op}: order must be "transformers", "vllm" or "llama.cpp", got {order!r}')
    z, shape, options = _arguments(
        op, logits, history, history_lengths, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        typical_p=typical_p, repetition_penalty=repetition_penalty,
    )  # fmt: skip
    if backend_for(op, z) == "reference":
        found = [_row_by_reference(op, z, row, options, order)[1] for row in range(len(z))]
        left = torch.stack(found) if found else z.float()
    else:
        left = kernel(op, z)(z, *options, ORDERS.index(order))
    return left.reshape(*shape, z.shape[-1])


def cost(rows: int, classes: int, dtype: torch.dtype) -> Cost:
    """Work of a call without filters: each logit is read once."""
    return Cost(4 * rows * classes, rows * classes * dtype.itemsize)


# ---- arguments ----------------------------------------------------------------------------------------------------

# Of each option the number that is off, the least and the largest one, whether the least is meant, and the dtype.
LIMITS: dict[str, tuple[float, float, float, bool, torch.dtype]] = {
    "temperature": (1.0, 0, math.inf, True, torch.float64),
    "top_k": (0, 0, 2**63 - 1, True, torch.int64),
    "top_p": (1.0, 0, 1, True, torch.float64),
    "min_p": (0.0, 0, 1, True, torch.float64),
    "typical_p": (1.0, 0, 1, False, torch.float64),
    "repetition_penalty": (1.0, 0, math.inf, False, torch.float64),
}
GREEDY = 1e-30  # temperatures below are 0: quotients by them would be infinite
Number = tuple[Any, Tensor | None]  # of all rows, and of each


def _arguments(
    op: str, logits: Any, history: Any, history_lengths: Any, **numbers: Any
) -> tuple[Tensor, torch.Size, list[Any]]:
    """Logits as rows, the shape of the rows, and the options as the kernels take them: for all rows, and of each."""
    _check_logits(op, logits)
    shape = logits.shape[:-1]
    z = logits.detach() if logits.requires_grad else logits
    z = z if z.dim() == 2 else z.reshape(math.prod(shape), z.shape[-1])
    past = _history(op, z, shape, numbers["repetition_penalty"], history, history_lengths)
    options: list[Any] = []
    for name, value in numbers.items():
        options += _numbers(op, name, value, z, shape)
    return z, shape, [*options, *past]


def _check_logits(op: str, logits: Any) -> None:
    if not isinstance(logits, Tensor):
        raise TypeError(f"{op}: logits must be a tensor, got {type(logits).__name__}")
    check_not_nested(op, "logits", logits, "give it the values of a jagged one, t.values()")
    if logits.dtype not in FLOATING:
        raise TypeError(f"{op}: logits must be float64, float32, bfloat16 or float16, got {logits.dtype}")
    if logits.dim() < 1 or logits.shape[-1] == 0:
        raise ValueError(f"{op}: logits must have shape (..., V) with V >= 1, got {tuple(logits.shape)}")


def _of_rows(op: str, name: str, t: Tensor, z: Tensor, shape: torch.Size) -> Tensor:
    if t.shape != shape:
        raise ValueError(f"{op}: {name} must be a number or have the rows' shape {tuple(shape)}, got {tuple(t.shape)}")
    if t.device != z.device:
        raise ValueError(f"{op}: {name} must be on logits's device {z.device}, got {t.device}")
    return t.reshape(z.shape[0])


def _numbers(op: str, name: str, value: Any, z: Tensor, shape: torch.Size) -> Number:
    off, least, most, with_least, dtype = LIMITS[name]
    if value is None:
        return off, None
    whole = not dtype.is_floating_point
    if isinstance(value, Tensor):
        if value.is_floating_point() == whole or value.dtype in (torch.bool, torch.complex64, torch.complex128):
            kind = "whole" if whole else "floating point"
            raise TypeError(f"{op}: {name} must have {kind} numbers, got {value.dtype}")
        return off, _of_rows(op, name, value, z, shape).to(dtype)
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise TypeError(f"{op}: {name} must be a {'whole ' if whole else ''}number or a tensor of them, got {value!r}")
    if not (least <= value <= most and value < math.inf) or (value == least and not with_least):
        above = "at least" if with_least else "above"
        below = f" and at most {most:g}" if most == 1 else ""
        raise ValueError(f"{op}: {name} must be {above} {least:g}{below}, got {value}")
    return value, None


def _integers(op: str, name: str, value: Any, z: Tensor, shape: torch.Size) -> Number:
    if isinstance(value, Tensor):
        if value.dtype != torch.int64:
            raise TypeError(f"{op}: {name} must be int64, got {value.dtype}")
        return 0, _of_rows(op, name, value, z, shape)
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)) or not -(2**63) <= value < 2**63:
        raise TypeError(f"{op}: {name} must be a whole number of 64 bits, or an int64 tensor, got {value!r}")
    return value, None


def _seed(seed: Any) -> Any:
    return torch.randint(-(2**63), 2**63 - 1, ()).item() if seed is None else seed


def _history(
    op: str, z: Tensor, shape: torch.Size, penalty: Any, history: Any, lengths: Any
) -> tuple[Tensor | None, int, Tensor | None]:
    if (penalty is None) != (history is None):
        given, missing = ("repetition_penalty", "history") if history is None else ("history", "repetition_penalty")
        raise ValueError(f"{op}: {given} needs {missing}, got None")
    if history is None:
        if lengths is not None:
            raise ValueError(f"{op}: history_lengths needs history, got None")
        return None, 0, None
    if not isinstance(history, Tensor) or history.dtype != torch.int64:
        got = history.dtype if isinstance(history, Tensor) else type(history).__name__
        raise TypeError(f"{op}: history must be an int64 tensor, got {got}")
    if history.dim() < 1 or history.shape[:-1] != shape:
        raise ValueError(f"{op}: history must have shape {(*shape, 'L')}, got {tuple(history.shape)}")
    if history.device != z.device:
        raise ValueError(f"{op}: history must be on logits's device {z.device}, got {history.device}")
    past = history.reshape(z.shape[0], history.shape[-1])
    if lengths is None:
        return past, history.shape[-1], None
    return past, *_integers(op, "history_lengths", lengths, z, shape)


# ---- draws --------------------------------------------------------------------------------------------------------


def _drawn(z: Tensor, draws: tuple[Any, ...], options: list[Any], order: str, wanted: Any) -> tuple[Tensor, Tensor]:
    if backend_for("sample", z) == "reference":
        return _sample_by_reference(z, draws, options, order, wanted)
    tokens, logprobs = kernel("sample", z)(z, *draws, *options, ORDERS.index(order), LOGPROBS.index(wanted))
    return tokens, logprobs


class Sampler:
    """`sample` again and again, on logits of one shape (B, V), with options that are checked once.

    With a history each row's position is its length, too.
    """

    def __init__(
        self, op: str, logits: Tensor, *, order: Order, logprobs: bool, seed: Any = None, history: Tensor | None = None,
        **numbers: Any,
    ):  # fmt: skip
        every = dict.fromkeys(LIMITS) | numbers
        z, shape, self.options = _arguments(op, logits, history, None, **every)
        self.seed = _integers(op, "seed", _seed(seed), z, shape)
        self.order, self.wanted, self.shape = order, "processed" if logprobs else False, logits.shape

    def __call__(self, logits: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities (none unless wanted) of logits (B, V), at positions int64 (B,)."""
        options = self.options if self.options[-3] is None else [*self.options[:-1], position]
        return _drawn(logits.detach(), (*self.seed, 0, position), options, self.order, self.wanted)


# ---- the equations, row by row ------------------------------------------------------------------------------------


def _of_row(number: Any, t: Tensor | None, row: int) -> Any:
    return number if t is None else t[row].item()


def _row_by_reference(op: str, z: Tensor, row: int, given: list[Any], order: str) -> tuple[Tensor, Tensor]:
    """The logits of a row, and what the filters leave of them."""
    raw = z[row].float()
    if not (raw < math.inf).all() or not (raw > -math.inf).any():
        raise RuntimeError(f"{op}: logits must not be nan, infinite or all minus infinity, but row {row} is")
    pairs = zip(LIMITS, given[::2], given[1::2], strict=False)
    options = {name: _of_row(number, t, row) for name, number, t in pairs}
    past, length, lengths = given[2 * len(LIMITS) :]
    options["history"] = None if past is None else past[row, : max(0, _of_row(length, lengths, row))]
    if options["temperature"] >= GREEDY:
        return raw, reference.processed(raw, order, **options)
    off = {name: LIMITS[name][0] for name in LIMITS if name != "repetition_penalty"}
    left = reference.processed(raw, order, **options | off)
    only = torch.full_like(left, -math.inf)
    return raw, only.index_copy(0, left.argmax()[None], left.max()[None])


def _sample_by_reference(
    z: Tensor, draws: tuple[Any, ...], options: list[Any], order: str, wanted: Any
) -> tuple[Tensor, Tensor]:
    rows, (seed, seeds, position, positions) = len(z), draws
    if seeds is None:
        seeds = seed + GOLDEN * torch.arange(rows)
    if positions is None:
        positions = torch.full((rows,), position)
    numbers = reference.uniform(seeds.cpu(), positions.cpu()).tolist()
    tokens = torch.empty(rows, dtype=torch.int64, device=z.device)
    logprobs = torch.empty(rows if wanted else 0, dtype=torch.float32, device=z.device)
    for row in range(rows):
        raw, left = _row_by_reference("sample", z, row, options, order)
        tokens[row] = token = reference.drawn(left, numbers[row])
        if wanted:
            logprobs[row] = (left if wanted == "processed" else raw).double().log_softmax(0)[token]
    return tokens, logprobs


# ---- fake kernel and batching rule --------------------------------------------------------------------------------


@torch.library.register_fake("seqkern::sample")
def _(logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    rows = logits.shape[0]
    return logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows if rest[-1] else 0, dtype=torch.float32)


@torch.library.register_fake("seqkern::filter_logits")
def _(logits: Tensor, *rest: Any) -> Tensor:
    return logits.new_empty(logits.shape, dtype=torch.float32)


@torch.library.register_vmap("seqkern::filter_logits")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    def op(*given: Any) -> tuple[Tensor, ...]:
        return (torch.ops.seqkern.filter_logits(*given),)

    (left,), (dim,) = per_sample(op, info.batch_size, in_dims, args)
    return left, dim


@torch.library.register_vmap("seqkern::sample")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    return per_sample(torch.ops.seqkern.sample, info.batch_size, in_dims, args)
