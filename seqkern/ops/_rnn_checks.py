"""Checks of the recurrent networks' arguments, with errors that name them, and their conversion to one form."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqkern import _library
from seqkern._recording import check_not_nested
from seqkern.ops._autocast import autocasts
from seqkern.ops._autograd import FLOATING, readable

LSTM, GRU, RNN_TANH, RNN_RELU, ADDITIVE, INTERPOLATED = range(6)
CELLS = {
    "lstm": LSTM, "gru": GRU, "rnn_tanh": RNN_TANH, "rnn_relu": RNN_RELU, "additive_rnn": ADDITIVE,
    "interpolated_rnn": INTERPOLATED,
}  # fmt: skip
GATES = (4, 3, 1, 1, 1, 2)
NO_NESTED = "pad it by torch.nested.to_padded_tensor and pass lengths, or pass modules a PackedSequence"


@dataclass(frozen=True)
class Sizes:
    """The sizes of a network, found from its arguments."""

    cell: int
    layers: int
    directions: int
    inputs: int
    hidden: int
    width: int  # of h: the projection's size, if there is one
    bias: bool

    @property
    def projected(self) -> bool:
        return self.width != self.hidden

    @property
    def gates(self) -> int:
        return GATES[self.cell] * self.hidden

    def inputs_of(self, layer: int) -> int:
        return self.directions * self.width if layer else self.inputs

    @property
    def names(self) -> list[str]:
        """The weights of a layer in one direction."""
        return ["w_ih", "w_hh", *(["b_ih", "b_hh"] if self.bias else []), *(["w_hr"] if self.projected else [])]

    @property
    def per_cell(self) -> int:
        """The number of them."""
        return 2 + 2 * self.bias + self.projected

    def shape(self, name: str, layer: int) -> tuple[int, ...]:
        if name == "w_ih":
            return self.gates, self.inputs_of(layer)
        if name == "w_hh":
            return self.gates, self.width
        return (self.width, self.hidden) if name == "w_hr" else (self.gates,)


# ---- tensors ------------------------------------------------------------------------------------------------------


def kept_gates(cell: int) -> int:
    """The gates kept of a step, in multiples of H: a GRU keeps U_n h besides its three gates."""
    return 4 if cell == GRU else GATES[cell]


def check_tensor(op: str, name: str, t: Any, dim: int) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
    check_not_nested(op, name, t, NO_NESTED)
    if t.dtype not in FLOATING:
        raise TypeError(f"{op}: {name} must be float64, float32, bfloat16 or float16, got {t.dtype}")
    if t.dim() != dim:
        raise ValueError(f"{op}: {name} must have {dim} dimensions, got shape {tuple(t.shape)}")


def _check_place(op: str, name: str, t: Tensor, input: Tensor, shape: Sequence[int]) -> None:
    if t.shape != torch.Size(shape):
        raise ValueError(f"{op}: {name} must have shape {tuple(shape)}, got {tuple(t.shape)}")
    if t.device != input.device:
        raise ValueError(f"{op}: {name} must be on the input's device {input.device}, got {t.device}")


def check_like(op: str, name: str, t: Any, input: Tensor, shape: Sequence[int]) -> None:
    """Checks that `t` is a tensor of that shape, with the input's dtype and device."""
    if isinstance(t, Tensor) and t.shape == shape and t.dtype == input.dtype and t.device == input.device:
        return  # the fast path of the checks below
    check_tensor(op, name, t, len(shape))
    _check_place(op, name, t, input, shape)
    exempt = autocasts(input) and torch.float64 not in (t.dtype, input.dtype)  # autocast leaves float64 alone
    if t.dtype != input.dtype and not exempt:
        raise TypeError(f"{op}: {name} must have the input's dtype {input.dtype}, got {t.dtype}")


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """Casts tensors (or None) as autocast does."""
    if not autocasts(tensors[0]):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors)


# ---- state --------------------------------------------------------------------------------------------------------


def check_pair(op: str, hx: Any) -> tuple[Tensor, Tensor]:
    """hx as a pair of tensors, or TypeError."""
    if not isinstance(hx, (tuple, list)) or len(hx) != 2:
        got = f"{len(hx)} of them" if isinstance(hx, (tuple, list)) else type(hx).__name__
        raise TypeError(f"{op}: hx must be a pair of tensors (h, c), got {got}")
    for i, state in enumerate(hx):
        if not isinstance(state, Tensor):
            raise TypeError(f"{op}: hx[{i}] must be a tensor, got {type(state).__name__}")
    return hx[0], hx[1]


def check_state(op: str, hx: Any) -> Tensor:
    """hx as one tensor, or TypeError."""
    if not isinstance(hx, Tensor):
        raise TypeError(f"{op}: hx must be a tensor, got {type(hx).__name__}")
    return hx


def prepare_state(op: str, hx: Any, input: Tensor, batch: int, sizes: Sizes) -> tuple[Tensor, Tensor | None]:
    """h, and c for an LSTM; zeros if none is given."""
    if hx is None:
        rows = sizes.layers * sizes.directions
        h = input.new_zeros((rows, batch, sizes.width))
        return h, input.new_zeros((rows, batch, sizes.hidden)) if sizes.cell == LSTM else None
    shapes = [(sizes.layers * sizes.directions, batch, width) for width in (sizes.width, sizes.hidden)]
    if sizes.cell != LSTM:
        check_like(op, "hx", check_state(op, hx), input, shapes[0])
        return hx, None
    for i, state in enumerate(check_pair(op, hx)):
        check_like(op, f"hx[{i}]", state, input, shapes[i])
    return hx


# ---- weights ------------------------------------------------------------------------------------------------------


def _check_list(op: str, name: str, tensors: Any) -> None:
    if not isinstance(tensors, (tuple, list)):
        raise TypeError(f"{op}: {name} must be a list of tensors, got {type(tensors).__name__}")


_known: dict[Any, Sizes] = {}  # results of check_weights, by shapes


def check_weights(
    op: str, cell: int, input: Tensor, weights: Sequence[Tensor], num_layers: int, bidirectional: bool
) -> Sizes:
    """The sizes of the network, from its weights."""
    key = None if torch.compiler.is_compiling() else _key(cell, input, weights, num_layers, bidirectional)
    sizes = None if key is None else _known.get(key)
    if sizes is None:
        sizes = _check_weights(op, cell, input, weights, num_layers, bidirectional)
        if key is not None:
            if len(_known) >= 1024:
                _known.clear()
            _known[key] = sizes
    return sizes


def _key(cell: int, input: Tensor, weights: Any, num_layers: int, bidirectional: bool) -> Any:
    """All that the sizes depend on, if all weights have the input's dtype and device; otherwise None."""
    if type(weights) is not list or torch.jit.is_tracing():
        return None
    dtype, device = input.dtype, input.device
    shapes = [t.shape for t in weights if isinstance(t, Tensor) and t.dtype == dtype and t.device == device]
    key = (cell, input.shape[2], num_layers, bool(bidirectional), *shapes)
    try:
        hash(key)
    except TypeError:  # symbolic sizes
        return None
    return key if len(shapes) == len(weights) else None


def _check_weights(
    op: str, cell: int, input: Tensor, weights: Sequence[Tensor], num_layers: int, bidirectional: bool
) -> Sizes:
    directions = 2 if bidirectional else 1
    cells = num_layers * directions
    _check_list(op, "weights", weights)
    per_cell, rest = divmod(len(weights), cells)
    if rest or per_cell not in ((2, 3, 4, 5) if cell == LSTM else (2, 4)):
        projected = f" ({5 * cells} or {3 * cells} with projections)" if cell == LSTM else ""
        raise ValueError(
            f"{op}: weights must hold {4 * cells} tensors, or {2 * cells} without biases{projected}, for {num_layers} "
            f"layers in {directions} directions, got {len(weights)}"
        )
    check_tensor(op, "weights[1]", weights[1], 2)
    width = hidden = weights[1].shape[1]
    if per_cell % 2:
        check_tensor(op, f"weights[{per_cell - 1}]", weights[per_cell - 1], 2)
        hidden = weights[per_cell - 1].shape[1]
        if not 0 < width < hidden:
            raise ValueError(f"{op}: a projection must be narrower than the hidden size {hidden}, not 0, got {width}")
    sizes = Sizes(cell, num_layers, directions, input.shape[2], hidden, width, per_cell >= 4)
    names = sizes.names
    for index, t in enumerate(weights):
        layer, name = index // (per_cell * directions), names[index % per_cell]
        check_like(op, f"weights[{index}] ({name})", t, input, sizes.shape(name, layer))
    return sizes


def norm_names(sizes: Sizes) -> list[tuple[str, int]]:
    """The names of a layer's norm parameters in one direction, with their sizes."""
    sides = [("ih", sizes.gates), ("hh", sizes.gates), *([("c", sizes.hidden)] if sizes.cell == LSTM else [])]
    return [(f"norm_{side} {kind}", size) for side, size in sides for kind in ("weight", "bias")]


def check_norms(op: str, norms: Any, input: Tensor, sizes: Sizes) -> list[list[Tensor]]:
    """The norms' parameters, a list for every layer and direction."""
    _check_list(op, "norms", norms)
    cells, each = sizes.layers * sizes.directions, norm_names(sizes)
    if len(norms) != cells * len(each):
        raise ValueError(
            f"{op}: norms must hold {len(each)} tensors for each of the {cells} layers and directions, "
            f"{cells * len(each)}, got {len(norms)}"
        )
    for index, t in enumerate(norms):
        name, size = each[index % len(each)]
        check_tensor(op, f"norms[{index}] ({name})", t, 1)
        _check_place(op, f"norms[{index}] ({name})", t, input, (size,))
    return [list(norms[i * len(each) : (i + 1) * len(each)]) for i in range(cells)]


def check_peepholes(op: str, peepholes: Any, input: Tensor, sizes: Sizes) -> list[Tensor]:
    _check_list(op, "peepholes", peepholes)
    cells = sizes.layers * sizes.directions
    if len(peepholes) != cells:
        raise ValueError(
            f"{op}: peepholes must hold a tensor for each of the {cells} layers and directions, got {len(peepholes)}"
        )
    for index, t in enumerate(peepholes):
        check_like(op, f"peepholes[{index}]", t, input, (3, sizes.hidden))
    return list(peepholes)


# ---- options ------------------------------------------------------------------------------------------------------


def check_probability(op: str, name: str, p: Any) -> float:
    if type(p) is float and p == 0:
        return 0.0
    if isinstance(p, bool) or not isinstance(p, (int, float)):
        raise TypeError(f"{op}: {name} must be a probability, got {type(p).__name__}")
    p = _constant(p)
    if not 0 <= p <= 1:
        raise ValueError(f"{op}: {name} must be a probability, between 0 and 1, got {p}")
    return float(p)


def _constant(number: Any) -> Any:
    """The number as a constant for torch.compile, even if it treats numbers as symbols: hashing specialises it."""
    return next(iter({number}))


def check_layers(op: str, num_layers: Any) -> int:
    if isinstance(num_layers, bool) or not isinstance(num_layers, (int, torch.SymInt)):
        raise TypeError(f"{op}: num_layers must be a whole number, got {type(num_layers).__name__}")
    if num_layers < 1:
        raise ValueError(f"{op}: num_layers must be at least 1, got {num_layers}")
    return _constant(num_layers)


def check_zoneout(op: str, zoneout: Any, cell: int) -> tuple[float, float]:
    """The probabilities for h and for c."""
    if not isinstance(zoneout, (tuple, list)):
        p = check_probability(op, "zoneout", zoneout)
        return p, p if cell == LSTM else 0.0
    if len(zoneout) != 2:
        raise ValueError(f"{op}: zoneout must be a probability or a pair (of h, of c), got {len(zoneout)} of them")
    of_h, of_c = (check_probability(op, f"zoneout[{i}]", p) for i, p in enumerate(zoneout))
    if cell != LSTM and of_c:
        raise ValueError(f"{op}: zoneout[1] must be 0, there is no cell state, got {of_c}")
    return of_h, of_c


def prepare_lengths(op: str, lengths: Any, input: Tensor, steps: int, batch: int) -> Tensor:
    """(B,) int64 on the input's device; their range is checked if they can be read without waiting."""
    most = 2**63 - 1 if torch.compiler.is_compiling() else steps
    if isinstance(lengths, (tuple, list, range)):
        if not all(isinstance(n, (int, torch.SymInt)) and not isinstance(n, bool) for n in lengths):
            raise TypeError(f"{op}: lengths must be whole numbers, got {lengths!r}")
        if any(isinstance(n, int) and not 0 <= n <= most for n in lengths):
            raise ValueError(f"{op}: lengths must be between 0 and {steps}, the steps, got {lengths!r}")
        lengths = numbers_on(input.device, lengths)
    if not isinstance(lengths, Tensor):
        raise TypeError(f"{op}: lengths must be a tensor or a sequence of numbers, got {type(lengths).__name__}")
    if lengths.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: lengths must be int32 or int64, got {lengths.dtype}")
    if lengths.shape != (batch,):
        raise ValueError(f"{op}: lengths must have shape ({batch},), the batch size, got {tuple(lengths.shape)}")
    if lengths.device != input.device and lengths.device.type != "cpu":
        raise ValueError(f"{op}: lengths must be on the input's device {input.device}, got {lengths.device}")
    if readable(lengths):
        for b, length in enumerate(lengths.tolist()):
            if not 0 <= length <= steps:
                raise ValueError(
                    f"{op}: lengths must be between 0 and {steps}, the steps, got {length} for sequence {b}"
                )
        if input.is_cuda:
            return numbers_on(input.device, lengths.tolist())
    return lengths.to(input.device, torch.int64)


def numbers_on(device: torch.device, numbers: Sequence[int]) -> Tensor:
    """(len(numbers),) int64 on a device, without synchronising with a GPU.

    Copies from pinned memory, which is not reused before the copy is done. A CUDA graph would read that memory again at
    every replay; so during capture the numbers are arguments of kernels: one fill for each run of equal numbers.
    """
    if device.type != "cuda" or torch.compiler.is_compiling() or not _library._present(device.index):
        return torch.tensor(numbers, dtype=torch.int64, device=device)
    if not torch.cuda.is_current_stream_capturing():
        return torch.tensor(numbers, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)
    tensor, first = torch.empty(len(numbers), dtype=torch.int64, device=device), 0
    for number, run in itertools.groupby(numbers):
        count = len(list(run))
        tensor.narrow(0, first, count).fill_(number)
        first += count
    return tensor


def prepare_resets(op: str, resets: Any, input: Tensor, steps: int, batch: int, batch_first: bool) -> Tensor:
    """(T, B) bool."""
    if not isinstance(resets, Tensor):
        raise TypeError(f"{op}: resets must be a tensor or None, got {type(resets).__name__}")
    if resets.dtype != torch.bool:
        raise TypeError(f"{op}: resets must be bool, got {resets.dtype}")
    _check_place(op, "resets", resets, input, (batch, steps) if batch_first else (steps, batch))
    return resets.t() if batch_first else resets


def prepare_seed(op: str, seed: Any, input: Tensor) -> Tensor | None:
    """One int64 number on the input's device, or None."""
    if seed is None:
        return None
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64:
            raise TypeError(f"{op}: seed must be int64, got {seed.dtype}")
        if seed.numel() != 1:
            raise ValueError(f"{op}: seed must have one element, got shape {tuple(seed.shape)}")
        if not (input.is_cuda and readable(seed)):
            return seed.reshape(()).to(input.device)
        seed = int(seed)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"{op}: seed must be a whole number, a tensor or None, got {type(seed).__name__}")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"{op}: seed must fit 64 bits, got {seed}")
    return torch.full((), seed, dtype=torch.int64, device=input.device)  # a fill, which a CUDA graph can capture
