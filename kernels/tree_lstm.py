"""Tree-LSTMs in Triton, level by level: the cells of a level's nodes, between torch's products.

A program has a node and a block of its units, and goes through its children: their f c into c, and back. A node has
one parent, so nothing needs atomics. Equations and sources: csrc/tree_lstm/cpu/kernels.cpp.

No GPU speed has been measured yet.
"""

import itertools

import torch
import triton
import triton.language as tl

from .._products import product
from ._common import TRITON_DTYPE, Launch, accumulator, cdiv, power_of_two, rounded, run
from .rnn.cells import sigmoid, tanh

__all__ = ["aot_configurations", "tree_lstm_bwd", "tree_lstm_fwd", "tree_schedule"]

BLOCK = 128  # units of a program, at most
SIZES = ["hidden", "first", "edge", "stride", "at_g", "at_o"]  # not compiled in


@triton.jit
def _node(order_ptr, starts_ptr, hidden, first, BLOCK_H: tl.constexpr):
    """This program's place in the level, its node, its edges, its units and which of them exist."""
    blocks = tl.cdiv(hidden, BLOCK_H)
    place = (tl.program_id(0) // blocks).to(tl.int64)
    unit = (tl.program_id(0) % blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    node = tl.load(order_ptr + first + place)
    begin, end = tl.load(starts_ptr + first + place), tl.load(starts_ptr + first + place + 1)
    return place, node, begin, end, unit, unit < hidden


@triton.jit(do_not_specialize=SIZES)
def _sum_kernel(
    h_ptr, order_ptr, starts_ptr, children_ptr, sums_ptr, hidden, first, ACC: tl.constexpr, BLOCK_H: tl.constexpr
):  # fmt: skip
    """h~ of a level's nodes, (places, hidden)."""
    place, _at, begin, end, unit, there = _node(order_ptr, starts_ptr, hidden, first, BLOCK_H)
    total = tl.zeros([BLOCK_H], ACC)
    for e in range(begin, end):
        child = tl.load(children_ptr + e)
        total += tl.load(h_ptr + child * hidden + unit, mask=there, other=0.0).to(ACC)
    tl.store(sums_ptr + place * hidden + unit, rounded(total, sums_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=SIZES)
def _forward_kernel(
    x_ptr, products_ptr, forget_ptr, order_ptr, starts_ptr, children_ptr, h_ptr, c_ptr, cells_ptr, gates_ptr, hidden,
    first, edge, stride, at_g, at_o, ACC: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """h, c and what is kept of a level's nodes; `edge` is the level's first one, where rows of forget begin."""
    place, node, begin, end, unit, there = _node(order_ptr, starts_ptr, hidden, first, BLOCK_H)
    x = x_ptr + node * 4 * hidden + unit
    i = tl.load(x, mask=there, other=0.0).to(ACC)
    x_f = tl.load(x + hidden, mask=there, other=0.0).to(ACC)
    g = tl.load(x + 2 * hidden, mask=there, other=0.0).to(ACC)
    o = tl.load(x + 3 * hidden, mask=there, other=0.0).to(ACC)
    if products_ptr is not None:
        own = products_ptr + place * stride + unit
        i += tl.load(own, mask=there, other=0.0)
        g += tl.load(own + at_g, mask=there, other=0.0)
        o += tl.load(own + at_o, mask=there, other=0.0)
    i, g, o = sigmoid(i), tanh(g), sigmoid(o)
    c = i * g
    if products_ptr is not None:
        for e in range(begin, end):
            child = tl.load(children_ptr + e)
            f = sigmoid(x_f + tl.load(forget_ptr + (e - edge) * hidden + unit, mask=there, other=0.0))
            tl.store(gates_ptr + child * 4 * hidden + hidden + unit, f, mask=there)
            c += f * tl.load(cells_ptr + child * hidden + unit, mask=there, other=0.0)
    kept = gates_ptr + node * 4 * hidden + unit
    tl.store(kept, i, mask=there)
    tl.store(kept + 2 * hidden, g, mask=there)
    tl.store(kept + 3 * hidden, o, mask=there)
    tl.store(cells_ptr + node * hidden + unit, c, mask=there)
    dtype = h_ptr.dtype.element_ty
    tl.store(h_ptr + node * hidden + unit, rounded(o * tanh(c), dtype), mask=there)
    tl.store(c_ptr + node * hidden + unit, rounded(c, dtype), mask=there)


@triton.jit(do_not_specialize=SIZES)
def _backward_kernel(
    cells_ptr, gates_ptr, grad_h_ptr, grad_c_ptr, order_ptr, starts_ptr, children_ptr, grad_x_ptr, grad_iou_ptr,
    grad_forget_ptr, hidden, first, edge, HAS_CHILDREN: tl.constexpr, ACC: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """The gradients of a level's gates, (places, 3 hidden) and (edges, hidden), and of its children's c."""
    place, node, begin, end, unit, there = _node(order_ptr, starts_ptr, hidden, first, BLOCK_H)
    kept = gates_ptr + node * 4 * hidden + unit
    i = tl.load(kept, mask=there, other=0.0)
    g = tl.load(kept + 2 * hidden, mask=there, other=0.0)
    o = tl.load(kept + 3 * hidden, mask=there, other=0.0)
    dh = tl.load(grad_h_ptr + node * hidden + unit, mask=there, other=0.0)
    t = tanh(tl.load(cells_ptr + node * hidden + unit, mask=there, other=0.0))
    dc = tl.load(grad_c_ptr + node * hidden + unit, mask=there, other=0.0) + dh * o * (1 - t * t)
    di, dg, d_o = dc * g * i * (1 - i), dc * i * (1 - g * g), dh * t * o * (1 - o)
    df = tl.zeros([BLOCK_H], ACC)
    if HAS_CHILDREN:
        for e in range(begin, end):
            child = tl.load(children_ptr + e)
            f = tl.load(gates_ptr + child * 4 * hidden + hidden + unit, mask=there, other=0.0)
            d = dc * tl.load(cells_ptr + child * hidden + unit, mask=there, other=0.0) * f * (1 - f)
            of_child = grad_c_ptr + child * hidden + unit
            tl.store(of_child, tl.load(of_child, mask=there, other=0.0) + dc * f, mask=there)
            tl.store(grad_forget_ptr + (e - edge) * hidden + unit, d, mask=there)
            df += d
        of_iou = grad_iou_ptr + place * 3 * hidden + unit
        tl.store(of_iou, di, mask=there)
        tl.store(of_iou + hidden, dg, mask=there)
        tl.store(of_iou + 2 * hidden, d_o, mask=there)
    x = grad_x_ptr + node * 4 * hidden + unit
    dtype = grad_x_ptr.dtype.element_ty
    tl.store(x, rounded(di, dtype), mask=there)
    tl.store(x + hidden, rounded(df, dtype), mask=there)
    tl.store(x + 2 * hidden, rounded(dg, dtype), mask=there)
    tl.store(x + 3 * hidden, rounded(d_o, dtype), mask=there)


class _Levels:
    """A forest's tensors, and its levels on the host: the places and edges of each, and the launches for them."""

    def __init__(self, order, levels, child_starts, children, slots, hidden, acc):
        self.order, self.starts, self.children = order.contiguous(), child_starts.contiguous(), children.contiguous()
        self.slots, self.hidden, self.acc = slots, hidden, acc
        bounds = levels.t().tolist()
        self.every = list(itertools.pairwise(bounds))

    def launch(self, name, kernel, places, arguments, **more):
        block = min(BLOCK, max(16, power_of_two(self.hidden)))
        constants = {"ACC": TRITON_DTYPE[self.acc], "BLOCK_H": block} | more
        return Launch(name, kernel, (places * cdiv(self.hidden, block),), arguments, constants, registers=255)

    def sums(self, h, sums, begin, places):
        arguments = (h, self.order, self.starts, self.children, sums, self.hidden, begin)
        return self.launch("tree_sum", _sum_kernel, places, arguments)

    def forward(self, x, products, forget, h, c, cells, gates, begin, places, edge, nary):
        stride = 0 if products is None else products.size(1)
        at_g = (1 + nary if nary else 1) * self.hidden
        tensors = (x, products, forget, self.order, self.starts, self.children, h, c, cells, gates)
        sizes = (self.hidden, begin, edge, stride, at_g, at_g + self.hidden)
        return self.launch("tree_forward", _forward_kernel, places, (*tensors, *sizes))

    def backward(self, cells, gates, grad_h, grad_c, grad_x, grad_iou, grad_forget, begin, places, edge):
        tensors = (cells, gates, grad_h, grad_c, self.order, self.starts, self.children, grad_x, grad_iou, grad_forget)
        arguments = (*tensors, self.hidden, begin, edge)
        return self.launch("tree_backward", _backward_kernel, places, arguments, HAS_CHILDREN=grad_iou is not None)

    def owners(self, begin, end, first, last):
        """The place in the level of each edge's parent."""
        counts = self.starts[begin + 1 : end + 1] - self.starts[begin:end]
        return torch.repeat_interleave(counts, output_size=last - first)


def tree_schedule(parents, slots):
    """The launcher behind `seqkern::tree_schedule`, which is the host's work; levels stay there."""
    found = torch.ops.seqkern.tree_schedule(parents.cpu(), None if slots is None else slots.cpu())
    order, levels, *rest = found
    return order.to(parents.device), levels, *(t.to(parents.device) for t in rest)


def tree_lstm_fwd(x_gates, w_hh, order, levels, child_starts, children, slots, nary, leaves):
    """The launcher behind `seqkern::tree_lstm_fwd`: (h, c, sums, cells, gates)."""
    nodes, hidden, acc = x_gates.size(0), x_gates.size(1) // 4, accumulator(x_gates.dtype)
    x, forest = x_gates.contiguous(), _Levels(order, levels, child_starts, children, slots, hidden, acc)
    inner = nodes - leaves
    h, c = x.new_empty(nodes, hidden), x.new_empty(nodes, hidden)
    sums = x.new_empty((0,) if nary else (inner, hidden))
    cells = c if x.dtype == acc else x.new_empty((nodes, hidden), dtype=acc)
    gates = x.new_zeros((nodes, 4 * hidden), dtype=acc)
    of_iou = None if nary else torch.cat([w_hh[:hidden], w_hh[2 * hidden :]])
    for (begin, first), (end, last) in forest.every if hidden else ():
        places, products, forget = end - begin, None, None
        if last > first:
            below = h[children[first:last]]
            if nary:
                owner, slot = forest.owners(begin, end, first, last), slots[first:last]
                stacked = x.new_zeros(places, nary, hidden)
                stacked[owner, slot] = below
                products = product(stacked.flatten(1), w_hh.t())
                forget = products.view(places, 3 + nary, hidden)[owner, 1 + slot]
            else:
                own = sums[begin - leaves : end - leaves]
                run([forest.sums(h, own, begin, places)], x.device)
                products, forget = product(own, of_iou.t()), product(below, w_hh[hidden : 2 * hidden].t())
        run([forest.forward(x, products, forget, h, c, cells, gates, begin, places, first, nary)], x.device)
    return h, c, sums, x.new_empty(0, dtype=acc) if cells is c else cells, gates


def tree_lstm_bwd(grad_h, grad_c, w_hh, order, levels, child_starts, children, slots, cells, gates, nary, leaves):
    """The launcher behind `seqkern::tree_lstm_bwd`: (grad_x_gates, grad_inner, grad_edge)."""
    nodes, hidden = cells.shape
    acc, dtype = cells.dtype, w_hh.dtype
    forest = _Levels(order, levels, child_starts, children, slots, hidden, acc)
    inner = nodes - leaves
    of_h, of_c = (
        torch.zeros_like(cells) if g is None else g.to(acc, copy=True, memory_format=torch.contiguous_format)
        for g in (grad_h, grad_c)
    )
    grad_x = w_hh.new_empty(nodes, 4 * hidden)
    grad_inner = w_hh.new_empty(inner, (3 + nary) * hidden)
    grad_edge = w_hh.new_zeros((0,) if nary else (nodes, hidden))
    of_iou = None if nary else torch.cat([w_hh[:hidden], w_hh[2 * hidden :]])
    for (begin, first), (end, last) in reversed(forest.every) if hidden else ():
        places, of_gates, of_forget = end - begin, None, None
        if last > first:
            of_gates, of_forget = cells.new_empty(places, 3 * hidden), cells.new_empty(last - first, hidden)
        arguments = (cells, gates, of_h, of_c, grad_x, of_gates, of_forget, begin, places, first)
        run([forest.backward(*arguments)], cells.device)
        if last == first:
            continue
        owner, below = forest.owners(begin, end, first, last), children[first:last]
        if nary:
            slot, of_i, of_rest = slots[first:last], of_gates[:, :hidden], of_gates[:, hidden:]
            of_slots = cells.new_zeros(places, nary, hidden)
            of_slots[owner, slot] = of_forget
            every = torch.cat([of_i, of_slots.flatten(1), of_rest], 1).to(dtype)
            to_children = product(every, w_hh).view(places, nary, hidden)[owner, slot]
        else:
            every = of_gates.to(dtype)
            to_children = product(every, of_iou)[owner] + product(of_forget.to(dtype), w_hh[hidden : 2 * hidden])
            grad_edge[below] = of_forget.to(dtype)
        grad_inner[begin - leaves : end - leaves] = every
        of_h[below] += to_children  # each of them once
    return grad_x, grad_inner, grad_edge


def explained(op, x, *others):
    """The launches of a level with children, after its products; nothing is launched."""
    return [launch for _, launch in _launches(x.size(-1), x.dtype, 0)]


def _launches(hidden, dtype, nary):
    """The launches of a level of 8 nodes with two children each."""
    acc = accumulator(dtype)
    places, edges, nodes = 8, 16, 24

    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    numbers, levels = empty(nodes + 1, dtype=torch.int64), torch.tensor([[0, 16, 24], [0, 0, 16]])
    forest = _Levels(numbers, levels, numbers, numbers, numbers, hidden, acc)
    x, h, cells, gates = empty(nodes, 4 * hidden), empty(nodes, hidden), empty(nodes, hidden, dtype=acc), None
    gates, products = empty(nodes, 4 * hidden, dtype=acc), empty(places, (3 + nary) * hidden, dtype=acc)
    forget = empty(edges, hidden, dtype=acc)
    yield "sum", forest.sums(h, h, 16, places)
    yield "forward", forest.forward(x, products, forget, h, h, cells, gates, 16, places, 0, nary)
    yield "leaves", forest.forward(x, None, None, h, h, cells, gates, 0, 16, 0, nary)
    yield "backward", forest.backward(cells, gates, cells, cells, x, products, forget, 16, places, 0)
    yield "backward-leaves", forest.backward(cells, gates, cells, cells, x, None, None, 0, 16, 0)


def aot_configurations(limit, thorough):
    """The launches that tests/triton/test_triton_aot.py compiles, as (name, launch). They use no shared memory."""
    dtypes = (torch.bfloat16, torch.float32, torch.float64, torch.float16) if thorough else (torch.bfloat16,)
    for dtype in dtypes:
        for hidden in (128, 300, 20) if thorough else (128,):
            for nary in (0, 2):
                for name, launch in _launches(hidden, dtype, nary):
                    yield f"{launch.name}-{name}-{str(dtype).removeprefix('torch.')}-{hidden}-{nary}", launch
