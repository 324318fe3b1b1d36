"""Tree-LSTMs: the schedule of a forest, the functional API, gradients, fake kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from seqkern import reference
from seqkern._keywords import explicit, refuse
from seqkern._library import backend_for, kernel
from seqkern._recording import is_proxy, record
from seqkern._tensors import accumulator
from seqkern.ops._autograd import (
    Cost,
    apply,
    eager,
    gradients,
    per_sample,
    tangents,
    transforms_active,
    wants_gradient,
)
from seqkern.ops._rnn_checks import autocast, check_like, check_tensor


@dataclass(frozen=True, eq=False, repr=False)
class TreeSchedule:
    """In which order the nodes of a forest are computed: level by level, from the leaves up. Made once for a batch.

    Trees of any shapes are in one schedule: single nodes, chains, nodes of any number of children. It is made by
    `from_parents` or `from_nested`. Tensors of nodes, an input of `tree_lstm` and its results, have a row for each, in
    the order in which the schedule was given them; `nodes` is their number, `height` that of the levels, and
    `h[schedule.roots]` has a row for each tree.

    Raises:
        As `from_parents` and `from_nested`.

    Example:
        >>> import torch, seqkern
        >>> schedule = seqkern.TreeSchedule.from_parents([2, 2, -1, 4, -1])  # nodes 0 and 1 below 2; 3 below 4
        >>> schedule.nodes, schedule.height, schedule.roots.tolist()
        (5, 2, [2, 4])
        >>> schedule = seqkern.TreeSchedule.from_nested([(("the", "cat"), "sleeps")])
        >>> schedule.labels
        (None, None, 'the', 'cat', 'sleeps')
    """

    order: Tensor  # (nodes): by height, leaves first
    levels: Tensor  # (2, height + 1), on the CPU: where each level begins in the order, and its edges
    child_starts: Tensor  # (nodes + 1), by places of the order
    children: Tensor  # (edges): nodes
    child_slots: Tensor  # (edges)
    roots: Tensor  # the nodes without a parent, in ascending order
    leaves: int  # how many
    slots: int  # how many N-ary trees need: 1 more than the largest
    labels: tuple[Any, ...] = ()  # of `from_nested`: the leaves' objects, None for other nodes

    @property
    def nodes(self) -> int:
        return len(self.order)

    @property
    def height(self) -> int:
        return self.levels.shape[1] - 1

    @classmethod
    def _made(cls, parents: Tensor, slots: Tensor | None = None, labels: Sequence[Any] = ()) -> TreeSchedule:
        order, levels, child_starts, children, child_slots = torch.ops.seqkern.tree_schedule(parents, slots)
        leaves = int(levels[0, 1]) if levels.shape[1] > 1 else 0
        most = int(child_slots.max()) + 1 if len(child_slots) else 0
        roots = (parents < 0).nonzero()[:, 0]
        return cls(order, levels, child_starts, children, child_slots, roots, leaves, most, tuple(labels))

    @classmethod
    def from_parents(
        cls,
        parents: Tensor | Sequence[int],
        lengths: Tensor | Sequence[int] | None = None,
        *,
        slots: Tensor | Sequence[int] | None = None,
    ) -> TreeSchedule:
        """From the parent of each node, the nodes of all trees one after another.

        Args:
            parents: (nodes,): the parent of each node, or -1 of a root.
            lengths: (trees,): then parents count from the first node of their own tree. Default: from the first of all.
            slots: (nodes,): the slot of each node below its parent, from 0, for N-ary trees. Default: a node's children
                have slots 0, 1, ... in their order.

        Raises:
            TypeError, ValueError: parents that are no nodes or lead in circles, lengths that do not fit, two children
                in one slot.
        """
        given = _numbers("parents", parents)
        if lengths is not None:
            counts = _numbers("lengths", lengths)
            if bool((counts < 0).any()) or int(counts.sum()) != len(given):
                raise ValueError(
                    f"TreeSchedule: lengths must sum to the {len(given)} nodes of parents, got {counts.tolist()}"
                )
            own = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
            inside = (given < 0) | (given < torch.repeat_interleave(counts, counts))
            if not bool(inside.all()):
                wrong = int((~inside).nonzero()[0, 0])
                raise ValueError(f"TreeSchedule: parents must be nodes of their own tree, got {int(given[wrong])}")
            given = torch.where(given < 0, given, given + own)
        low, high = (int(given.min()), int(given.max())) if len(given) else (-1, -1)
        if low < -1 or high >= len(given):
            wrong = low if low < -1 else high
            raise ValueError(f"TreeSchedule: parents must be -1 or nodes below {len(given)}, got {wrong}")
        placed = None if slots is None else _numbers("slots", slots)
        if placed is not None:
            if placed.shape != given.shape:
                raise ValueError(f"TreeSchedule: slots must have shape {tuple(given.shape)}, got {tuple(placed.shape)}")
            below = given >= 0
            if bool((placed[below] < 0).any()):
                raise ValueError(f"TreeSchedule: slots must be at least 0, got {int(placed[below].min())}")
            pairs = list(zip(given[below].tolist(), placed[below].tolist(), strict=True))
            if len(set(pairs)) != len(pairs):
                raise ValueError("TreeSchedule: slots of the children of a node must differ")
        try:
            return cls._made(given, placed)
        except RuntimeError as error:
            raise ValueError(f"TreeSchedule: {str(error).partition(': ')[2].splitlines()[0]}") from None

    @classmethod
    def from_nested(cls, trees: Sequence[Any]) -> TreeSchedule:
        """From nested lists or tuples: each is a node whose items are its children; anything else is a leaf.

        Nodes are numbered as they open, a parent before its children and those from left to right, tree after tree. A
        child's slot is its place in the list. What the leaves are is in `labels`.

        Raises:
            TypeError: not a list or tuple of trees.
        """
        if not isinstance(trees, (list, tuple)):
            raise TypeError(f"TreeSchedule: trees must be a list of trees, got {type(trees).__name__}")
        parents: list[int] = []
        slots: list[int] = []
        labels: list[Any] = []
        waiting = [(tree, -1, 0) for tree in reversed(trees)]
        while waiting:
            tree, parent, slot = waiting.pop()
            node = len(parents)
            parents.append(parent)
            slots.append(slot)
            inner = isinstance(tree, (list, tuple))
            labels.append(None if inner else tree)
            if inner:
                waiting.extend((child, node, n) for n, child in reversed(list(enumerate(tree))))
        return cls._made(torch.tensor(parents, dtype=torch.int64), torch.tensor(slots, dtype=torch.int64), labels)

    def to(self, device: torch.device | str) -> TreeSchedule:
        """The same schedule for tensors on another device."""
        names = ("order", "child_starts", "children", "child_slots", "roots")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def arguments(self, nary: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, int]:
        """As the ops take it: order, levels (on the CPU), child_starts, children, slots, nary, leaves."""
        tensors = (self.order, self.levels, self.child_starts, self.children, self.child_slots)
        return *tensors, nary, self.leaves

    def __repr__(self) -> str:
        return f"TreeSchedule({self.nodes} nodes, {len(self.roots)} trees, {self.height} levels)"


def _numbers(name: str, given: Any) -> Tensor:
    t = given if isinstance(given, Tensor) else torch.as_tensor(given)
    if t.numel() == 0 and not isinstance(given, Tensor):
        t = t.long()
    if t.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"TreeSchedule: {name} must be int32 or int64, got {t.dtype}")
    if t.dim() != 1:
        raise ValueError(f"TreeSchedule: {name} must have 1 dimension, got shape {tuple(t.shape)}")
    return t.cpu().long()


@explicit
def tree_lstm(
    x: Tensor,
    schedule: TreeSchedule,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    *,
    kind: Literal["child_sum", "nary"] = "child_sum",
    **unexpected: NoReturn,
) -> tuple[Tensor, Tensor]:
    """A Tree-LSTM over a forest: the states of all nodes from their inputs and their children's states.

    kind="child_sum", any number of children in any order, with h~ the sum of their h:

        i, g, o = sigmoid, tanh, sigmoid of W x + b + U h~,    f_k = sigmoid(W_f x + b_f + U_f h_k) of each child k

    kind="nary", children in slots: the same with U [h_1; ...; h_N] in place of U h~ and of every U_f h_k, where a slot
    that is empty has h = 0. In both

        c = i g + sum over the children k of f_k c_k,    h = o tanh(c)

    A leaf has i, g and o of W x + b. A tree that is a chain is an LSTM of the same weights, from its leaf to its root.

    Args:
        x: (nodes, I), the nodes' inputs in the schedule's order of nodes (0 where a node has none); float64, float32,
            bfloat16 or float16.
        schedule: of the forest, on x's device.
        w_ih: (4H, I), gates in the order i, f, g, o, as torch's LSTM; g is the paper's u.
        w_hh: child-sum (4H, H), N-ary ((3 + N)H, NH) with gates in the order i, f_1, ..., f_N, g, o.
        b_ih, b_hh: (4H,) or None; their sum counts.
        kind: "child_sum" or "nary".

    Returns:
        h and c of all nodes, (nodes, H), x's dtype; `h[schedule.roots]` are those of the trees. Derivatives of every
        order. Under autocast everything but float64 is cast.

    Raises:
        TypeError: not tensors, or dtypes that do not fit.
        ValueError: shapes or devices that do not fit, an unknown kind, or more slots than w_hh has.
        NotImplementedError: the backend in force does not run on the device.

    Source: Tai, Socher and Manning 2015.

    Example:
        >>> import torch, seqkern
        >>> schedule = seqkern.TreeSchedule.from_parents([2, 2, -1])
        >>> lstm = torch.nn.LSTMCell(5, 8)
        >>> h, c = seqkern.tree_lstm(torch.randn(3, 5), schedule, *lstm.parameters())
        >>> h[schedule.roots].shape
        torch.Size([1, 8])
    """
    if any(map(is_proxy, (x, w_ih, w_hh, b_ih, b_hh))):
        return record(tree_lstm, locals())
    if unexpected:
        refuse(tree_lstm, unexpected)
    op = "tree_lstm"
    if kind not in ("child_sum", "nary"):
        raise ValueError(f'{op}: kind must be "child_sum" or "nary", got {kind!r}')
    check_tensor(op, "x", x, 2)
    if not isinstance(schedule, TreeSchedule):
        raise TypeError(f"{op}: schedule must be a TreeSchedule, got {type(schedule).__name__}")
    check_tensor(op, "w_ih", w_ih, 2)
    check_tensor(op, "w_hh", w_hh, 2)
    hidden, nary = w_ih.shape[0] // 4, 0
    if kind == "nary":
        nary = w_hh.shape[1] // hidden if hidden else max(1, schedule.slots)
        nary = max(1, nary)
        if schedule.slots > nary:
            raise ValueError(f"{op}: w_hh has {nary} slots, got a schedule of {schedule.slots}")
    check_like(op, "x", x, x, (schedule.nodes, x.shape[1]))
    check_like(op, "w_ih", w_ih, x, (4 * hidden, x.shape[1]))
    check_like(op, "w_hh", w_hh, x, ((3 + nary) * hidden, nary * hidden) if nary else (4 * hidden, hidden))
    for name, bias in (("b_ih", b_ih), ("b_hh", b_hh)):
        if bias is not None:
            check_like(op, name, bias, x, (4 * hidden,))
    if schedule.roots.device != x.device:
        raise ValueError(
            f"{op}: schedule must be on x's device {x.device}, got {schedule.roots.device}: use schedule.to(x.device)"
        )
    x, w_ih, w_hh, b_ih, b_hh = autocast(x, w_ih, w_hh, b_ih, b_hh)
    transforms_active()  # raises before Dynamo looks at a tensor
    bias = b_hh if b_ih is None else b_ih if b_hh is None else b_ih + b_hh
    arguments = (F.linear(x, w_ih, bias), w_hh, *schedule.arguments(nary))
    if backend_for(op, x) == "reference":
        h, c = _rounded(arguments)
    else:
        wanted = wants_gradient(arguments[0], w_hh)
        h, c, _, _, _ = apply(_TreeLstm, _TreeLstmEager, wanted, *arguments)
    return h, c


def cost(
    nodes: int, inner: int, inputs: int, hidden: int, dtype: torch.dtype, *, nary: int = 0, backward: bool = False
) -> Cost:
    """Work of a forest of that many nodes, `inner` of which have children, all but the roots one parent."""
    of_children = 2 * (inner * (3 + nary) * nary if nary else 3 * inner + nodes) * hidden * hidden
    flops = 2 * nodes * 4 * hidden * inputs + of_children
    parameters = 4 * hidden * inputs + ((3 + nary) * nary if nary else 4) * hidden * hidden
    elements = nodes * (inputs + 4 * hidden + 2 * hidden)
    return Cost((3 if backward else 1) * flops, (2 if backward else 1) * (elements + parameters) * dtype.itemsize)


# ---- autograd -----------------------------------------------------------------------------------------------------


def _rounded(arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    h, c = reference.tree_lstm(*arguments)
    dtype = arguments[0].dtype
    return h.to(dtype), c.to(dtype)


def _formula(forest: tuple[Any, ...]) -> Callable[..., Any]:
    """(x_gates, w_hh) -> h, c; forest: the schedule's arguments."""
    return lambda x_gates, w_hh: _rounded((x_gates, w_hh, *forest))


class _TreeLstm(torch.autograd.Function):
    """The op's arguments -> h, c, sums, cells, gates."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        return kernel("tree_lstm_fwd", args[0])(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.nary, ctx.leaves = inputs
        h, c, sums, cells, gates = output
        ctx.set_materialize_grads(False)
        saved = (*tensors, h, c, sums, cells, gates)
        ctx.save_for_backward(*saved)
        if forward_ad._current_level >= 0:  # then under vmap marks are of no effect, and every output has a tangent
            ctx.save_for_forward(*saved)
        else:
            ctx.mark_non_differentiable(sums, cells, gates)

    @staticmethod
    def backward(ctx: Any, grad_h: Tensor | None, grad_c: Tensor | None, *_: Any) -> Any:
        transforms_active()  # refuses to be compiled inside a transform, before the compiler looks at a gradient
        if grad_h is None and grad_c is None:
            return (None,) * 9
        found = apply(
            _TreeLstmBackward, _TreeLstmBackwardEager, torch.is_grad_enabled(), grad_h, grad_c, *ctx.saved_tensors,
            ctx.nary, ctx.leaves,
        )  # fmt: skip
        return *(g if need else None for g, need in zip(found, ctx.needs_input_grad, strict=False)), *(None,) * 7

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> Any:
        saved = ctx.saved_tensors
        h, c = tangents(_formula((*saved[2:7], ctx.nary, ctx.leaves)), saved[:2], directions[:2])
        return h, c, *(torch.zeros_like(t) for t in saved[9:])

    @staticmethod
    def plain(*args: Any) -> Any:
        return *_rounded(args), None, None, None


def _pullback(forest: tuple[Any, ...]) -> Callable[..., Any]:
    """(grad_h, grad_c, x_gates, w_hh) -> the gradients of the latter two."""

    def pullback(grad_h: Tensor | None, grad_c: Tensor | None, x_gates: Tensor, w_hh: Tensor) -> Any:
        zeros = x_gates.new_zeros(x_gates.shape[0], x_gates.shape[1] // 4)
        along = tuple(zeros if g is None else g for g in (grad_h, grad_c))
        return gradients(_formula(forest), (x_gates, w_hh), along)

    return pullback


class _TreeLstmBackward(torch.autograd.Function):
    """(grad_h, grad_c, the op's arguments, what it saved) -> the gradients of x_gates and w_hh."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        grad_h, grad_c, _, w_hh, *forest, h, c, sums, cells, gates, nary, leaves = args
        _, _, child_starts, children, slots = forest
        cells = cells if cells.numel() else c
        grad_x, grad_inner, grad_edge = kernel("tree_lstm_bwd", w_hh)(
            grad_h, grad_c, w_hh, *forest, cells, gates, nary, leaves
        )
        hidden = h.shape[1]
        with torch.autocast(h.device.type, enabled=False):
            if not nary:
                of_sums = grad_inner.t() @ sums
                return grad_x, torch.cat([of_sums[:hidden], grad_edge.t() @ h, of_sums[hidden:]])
            counts = (child_starts[1:] - child_starts[:-1])[leaves:]
            owner = torch.repeat_interleave(counts, output_size=children.shape[0])
            below = h.new_zeros(h.shape[0] - leaves, nary, hidden)
            below[owner, slots] = h[children]
            return grad_x, grad_inner.t() @ below.flatten(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.options = inputs[-2:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:9])
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*inputs[:9])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        saved = ctx.saved_tensors
        along = tuple(torch.zeros_like(t) if g is None else g for g, t in zip(cotangents, saved[2:4], strict=True))
        return *gradients(_pullback((*saved[4:], *ctx.options)), saved[:4], along), *(None,) * 12

    @staticmethod
    def jvp(ctx: Any, *directions: Any) -> Any:
        saved = ctx.saved_tensors
        return tangents(_pullback((*saved[4:], *ctx.options)), saved[:4], directions[:4])

    @staticmethod
    def plain(*args: Any) -> Any:
        return _pullback((*args[4:9], *args[-2:]))(*args[:4])


_TreeLstmEager, _TreeLstmBackwardEager = eager(_TreeLstm), eager(_TreeLstmBackward)


# ---- fake kernels and batching rules ------------------------------------------------------------------------------


@torch.library.register_fake("seqkern::tree_lstm_fwd")
def _(
    x_gates: Tensor, w_hh: Tensor, order: Tensor, levels: Tensor, child_starts: Tensor, children: Tensor, slots: Tensor,
    nary: int, leaves: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    nodes, hidden, acc = x_gates.shape[0], x_gates.shape[1] // 4, accumulator(x_gates.dtype)
    state = (nodes, hidden)
    return (
        x_gates.new_empty(state),
        x_gates.new_empty(state),
        x_gates.new_empty(0 if nary else (nodes - leaves, hidden)),
        x_gates.new_empty(0 if x_gates.dtype == acc else state, dtype=acc),
        x_gates.new_empty((nodes, 4 * hidden), dtype=acc),
    )


@torch.library.register_fake("seqkern::tree_lstm_bwd")
def _(
    grad_h: Any, grad_c: Any, w_hh: Tensor, order: Tensor, levels: Tensor, child_starts: Tensor, children: Tensor,
    slots: Tensor, cells: Tensor, gates: Tensor, nary: int, leaves: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    nodes, hidden = cells.shape
    return (
        w_hh.new_empty((nodes, 4 * hidden)),
        w_hh.new_empty((nodes - leaves, (3 + nary) * hidden)),
        w_hh.new_empty(0 if nary else (nodes, hidden)),
    )


@torch.library.register_fake("seqkern::tree_schedule")
def _(parents: Tensor, slots: Tensor | None) -> NoReturn:
    raise NotImplementedError("TreeSchedule reads the parents' values: make it outside of what is compiled")


@torch.library.register_vmap("seqkern::tree_lstm_fwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    return per_sample(torch.ops.seqkern.tree_lstm_fwd, info.batch_size, in_dims, args)


@torch.library.register_vmap("seqkern::tree_lstm_bwd")
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    return per_sample(torch.ops.seqkern.tree_lstm_bwd, info.batch_size, in_dims, args)
