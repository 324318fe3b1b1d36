"""Tree-LSTMs: schedules, accuracy, chains that are LSTMs, forests of every shape, derivatives, threads, errors."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import seqkern
from seqkern import TreeSchedule, reference
from seqkern.ops.tree_lstm import cost
from seqkern.testing import check_case, poison, tree_lstm_case
from seqkern.testing.tree_lstm import FOREST, random_parents, schedule_of

KINDS = ["child_sum", "nary"]
FORESTS = {
    "mixed": FOREST, "single nodes": ([-1],) * 3, "a chain": ([*range(-1, 39)],), "wide": ([-1] + [0] * 300,),
    "random": (random_parents(150, 1), random_parents(90, 2)), "at most 3": (random_parents(200, 3, 3), [-1, 0]),
}  # fmt: skip


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weights(kind, slots=2, inputs=3, hidden=4, dtype=torch.float64):
    """w_ih, w_hh, b_ih, b_hh."""
    of_h = (4 * hidden, hidden) if kind == "child_sum" else ((3 + slots) * hidden, slots * hidden)
    shapes = [(4 * hidden, inputs), of_h, (4 * hidden,), (4 * hidden,)]
    return [draw(*shape, dtype=dtype, seed=n) for n, shape in enumerate(shapes)]


# ---- schedules ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORESTS)
def test_schedule(name):
    """Every node once, above all of its children, in the lowest level that is; and its children in their order."""
    trees = FORESTS[name]
    schedule = schedule_of(trees)
    starts = torch.tensor([0, *map(len, trees)]).cumsum(0).tolist()
    parents = [p if p < 0 else p + start for tree, start in zip(trees, starts, strict=False) for p in tree]
    order, levels, child_starts, children, slots, _, leaves = schedule.arguments(0)
    assert sorted(order.tolist()) == list(range(schedule.nodes))
    level = {}
    for height, (begin, end) in enumerate(itertools.pairwise(levels[0].tolist())):
        level |= dict.fromkeys(order[begin:end].tolist(), height)
    below = {n: [c for c, p in enumerate(parents) if p == n] for n in range(schedule.nodes)}
    for n, own in below.items():
        assert level[n] == max((level[c] + 1 for c in own), default=0)
    for place, n in enumerate(order.tolist()):
        edges = slice(int(child_starts[place]), int(child_starts[place + 1]))
        assert children[edges].tolist() == below[n]
        assert slots[edges].tolist() == list(range(len(below[n])))
    assert levels[1].tolist() == child_starts[levels[0]].tolist()
    assert leaves == sum(not own for own in below.values())
    assert schedule.roots.tolist() == [n for n, p in enumerate(parents) if p < 0]
    assert schedule.height == max(level.values()) + 1
    assert schedule.slots == max(map(len, below.values()))
    assert repr(schedule) == f"TreeSchedule({schedule.nodes} nodes, {len(trees)} trees, {schedule.height} levels)"


def test_nested():
    schedule = TreeSchedule.from_nested([((1, 2), 3), 4, [], [[5]]])
    same = TreeSchedule.from_parents([-1, 0, 1, 1, 0, -1, -1, -1, 7, 8])
    for a, b in zip(schedule.arguments(0), same.arguments(0), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    assert schedule.labels == (None, None, 1, 2, 3, 4, None, None, None, 5)
    assert TreeSchedule.from_nested([]).nodes == 0


def test_deep_trees_without_recursion():
    depth = 100_000
    nested = "leaf"
    for _ in range(depth - 1):
        nested = [nested]
    chain = TreeSchedule.from_parents(torch.arange(depth) - 1)
    assert chain.height == depth
    assert TreeSchedule.from_nested([nested]).height == depth
    while isinstance(nested, list):  # or freeing it recurses
        nested = nested[0]


def test_slots():
    """Given slots, in any order, with empty ones between."""
    schedule = TreeSchedule.from_parents([-1, 0, 0, 1], slots=[0, 2, 0, 1])
    _, _, _, children, slots, _, _ = schedule.arguments(3)
    assert children.tolist() == [3, 2, 1]
    assert slots.tolist() == [1, 0, 2]
    assert schedule.slots == 3


def test_schedule_errors():
    wrong = [
        (lambda: TreeSchedule.from_parents([1, 0]), ValueError, "must not lead in circles, as those of 2 nodes do"),
        (lambda: TreeSchedule.from_parents([0]), ValueError, "parents must be other nodes"),
        (lambda: TreeSchedule.from_parents([-1, 2]), ValueError, "parents must be -1 or nodes below 2, got 2"),
        (lambda: TreeSchedule.from_parents([-1, -2]), ValueError, "parents must be -1 or nodes below 2, got -2"),
        (lambda: TreeSchedule.from_parents([-1, 0.5]), TypeError, "parents must be int32 or int64, got torch.float32"),
        (lambda: TreeSchedule.from_parents([[-1]]), ValueError, r"parents must have 1 dimension, got shape \(1, 1\)"),
        (lambda: TreeSchedule.from_parents([-1, 0], [1]), ValueError, "lengths must sum to the 2 nodes"),
        (lambda: TreeSchedule.from_parents([-1, -1, 1], [1, 2]), ValueError, None),
        (lambda: TreeSchedule.from_parents([-1, -1, 2], [1, 2]), ValueError, "nodes of their own tree, got 2"),
        (lambda: TreeSchedule.from_parents([-1, 0], slots=[0]), ValueError, r"slots must have shape \(2,\)"),
        (lambda: TreeSchedule.from_parents([-1, 0], slots=[0, -1]), ValueError, "slots must be at least 0, got -1"),
        (lambda: TreeSchedule.from_parents([-1, 0, 0], slots=[0, 1, 1]), ValueError, "slots of the children of a node"),
        (lambda: TreeSchedule.from_nested("tree"), TypeError, "trees must be a list of trees, got str"),
    ]
    for make, error, message in wrong:
        if message is None:  # lengths count from each tree's first node: node 1 of a tree of two is itself
            message = "parents must be other nodes"
        with pytest.raises(error, match=message):
            make()


# ---- accuracy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORESTS)
@pytest.mark.parametrize("kind", KINDS)
def test_error_rule(kind, name, dtype, isa, passes):
    trees = ([-1, 0, 0, 0, 2, 2],) if kind == "nary" and name in ("wide", "random") else FORESTS[name]
    passes(check_case(tree_lstm_case(kind, trees=trees), dtype))


@pytest.mark.parametrize("hidden", [1, 16, 64, 65])
@pytest.mark.parametrize("kind", KINDS)
def test_sizes(kind, hidden, isa, passes):
    for inputs in (1, 40):
        passes(check_case(tree_lstm_case(kind, inputs, hidden, bias=False, std=3.0), torch.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_is_the_lstm(kind, isa):
    """With torch's own weights, from the leaf to the root; N-ary with one slot."""
    cell = torch.nn.LSTMCell(3, 4).double()
    x = draw(9, 3)
    schedule = TreeSchedule.from_parents(torch.arange(9) - 1)  # node 8 is the leaf
    h, c = seqkern.tree_lstm(x, schedule, *cell.parameters(), kind=kind)
    state = None
    for node in range(8, -1, -1):
        state = cell(x[node : node + 1], state)
        torch.testing.assert_close(h[node], state[0][0])
        torch.testing.assert_close(c[node], state[1][0])


def test_the_order_of_children_does_not_count(isa):
    """Child-sum: siblings may change places; and with them the order of all nodes."""
    parents = torch.tensor(random_parents(60, 4))
    x, weight = draw(60, 3), weights("child_sum")
    h, _ = seqkern.tree_lstm(x, TreeSchedule.from_parents(parents), *weight)
    shuffled = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    place = torch.empty_like(shuffled)
    place[shuffled] = torch.arange(60)
    above = parents[shuffled]
    other = torch.where(above < 0, above, place[above])
    again, _ = seqkern.tree_lstm(x[shuffled], TreeSchedule.from_parents(other), *weight)
    torch.testing.assert_close(again, h[shuffled])


def test_a_tree_does_not_depend_on_the_others(isa):
    for kind in KINDS:
        trees = [random_parents(n, n, 3) for n in (1, 2, 30, 77, 5)]
        x, weight = draw(sum(map(len, trees)), 3, dtype=torch.float32), weights(kind, 3, dtype=torch.float32)
        gates = F.linear(x, weight[0])
        every = torch.ops.seqkern.tree_lstm_fwd(gates, weight[1], *schedule_of(trees).arguments(3 * (kind == "nary")))
        start = 0
        for tree in trees:
            rows = slice(start, start + len(tree))
            own = schedule_of([tree]).arguments(3 * (kind == "nary"))
            alone = torch.ops.seqkern.tree_lstm_fwd(gates[rows], weight[1], *own)
            for a, b in zip(alone[:2], every[:2], strict=True):
                assert torch.equal(a, b[rows])
            start += len(tree)


def test_empty_slots(isa):
    """A child in the last slot alone, as the equations have it; fewer children than slots."""
    schedule = TreeSchedule.from_parents([-1, 0, 1, 1], slots=[0, 2, 0, 1])
    x, weight = draw(4, 3), weights("nary", 4)
    h, c = seqkern.tree_lstm(x, schedule, *weight, kind="nary")
    gates = F.linear(x, weight[0]) + weight[2] + weight[3]
    expected = reference.tree_lstm(gates, weight[1], *schedule.arguments(4))
    torch.testing.assert_close((h, c), expected)
    every = torch.cat([h.new_zeros(8), h[1], h.new_zeros(4)])
    i, _, _, f, _, g, o = (weight[1] @ every).chunk(7)
    z_i, z_f, z_g, z_o = gates[0].chunk(4)
    state = (z_i + i).sigmoid() * (z_g + g).tanh() + (z_f + f).sigmoid() * c[1]
    torch.testing.assert_close(h[0], (z_o + o).sigmoid() * state.tanh())


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_on_any_number_of_threads(kind, isa):
    trees = [random_parents(300, seed, 3) for seed in range(4)]
    x, weight = draw(1200, 3, dtype=torch.float32), weights(kind, 3, hidden=130, dtype=torch.float32)
    schedule, before, results = schedule_of(trees), torch.get_num_threads(), []
    gates = F.linear(x, weight[0])
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            with poison():
                h, c, _, cells, kept = torch.ops.seqkern.tree_lstm_fwd(
                    gates, weight[1], *schedule.arguments(3 * (kind == "nary"))
                )
                *forest, nary, leaves = schedule.arguments(3 * (kind == "nary"))
                given = (h.cos(), c.sin(), weight[1], *forest, c, kept, nary, leaves)
                results.append((h, c, *torch.ops.seqkern.tree_lstm_bwd(*given)))
            assert cells.numel() == 0
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# ---- derivatives --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind):
    schedule = schedule_of(([-1, 0, 0, 1, 1], [-1], [-1, 0]))
    leaves = [t.requires_grad_() for t in (draw(8, 2), *weights(kind, inputs=2, hidden=2))]

    def function(*t):
        return seqkern.tree_lstm(t[0], schedule, *t[1:], kind=kind)

    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_only_what_is_needed(isa):
    schedule, tensors = schedule_of(FOREST), [draw(20, 3), *weights("child_sum")]

    def run(wanted, which):
        given = [t.clone().requires_grad_(w) for t, w in zip(tensors, wanted, strict=True)]
        states = seqkern.tree_lstm(given[0], schedule, *given[1:])
        return torch.autograd.grad(states[which].sin().sum(), [t for t in given if t.requires_grad])

    for which in (0, 1):
        every = run([True] * 5, which)
        for index in range(5):
            assert torch.equal(run([i == index for i in range(5)], which)[0], every[index])


def test_upstream_gradients(isa):
    schedule = schedule_of(FOREST)
    leaves = [t.requires_grad_() for t in (draw(20, 3), *weights("child_sum"))]
    h, _ = seqkern.tree_lstm(leaves[0], schedule, *leaves[1:])
    for upstream in (torch.ones(()).double().expand(h.shape), draw(4, 20).t()):
        plain = torch.autograd.grad(h, leaves, upstream.contiguous(), retain_graph=True)
        for _ in range(2):
            found = torch.autograd.grad(h, leaves, upstream, retain_graph=True)
            assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_opcheck():
    schedule = schedule_of(FOREST)
    for kind, dtype in itertools.product(KINDS, (torch.float32, torch.bfloat16)):
        nary = 5 * (kind == "nary")
        gates, w_hh = draw(20, 16, dtype=dtype), weights(kind, 5, dtype=dtype)[1]
        arguments = schedule.arguments(nary)
        torch.library.opcheck(torch.ops.seqkern.tree_lstm_fwd.default, (gates, w_hh, *arguments))
        h, c, _, cells, kept = torch.ops.seqkern.tree_lstm_fwd(gates, w_hh, *arguments)
        saved = (w_hh, *arguments[:5], c if dtype == torch.float32 else cells, kept, *arguments[5:])
        torch.library.opcheck(torch.ops.seqkern.tree_lstm_bwd.default, (h, None, *saved))
        torch.library.opcheck(torch.ops.seqkern.tree_lstm_bwd.default, (None, c, *saved))


@pytest.mark.parametrize("kind", KINDS)
def test_compiled(kind, compilation):
    schedule = schedule_of(([-1, 0, 0, 1, 1], [-1], [-1, 0]))
    leaves = [t.requires_grad_() for t in (draw(8, 3, dtype=torch.float32), *weights(kind, dtype=torch.float32))]

    def model(x, *weight):
        h, c = seqkern.tree_lstm(x.sin(), schedule, *weight, kind=kind)
        return h * 2, c

    ours, theirs = torch.compile(model, **compilation)(*leaves), model(*leaves)
    torch.testing.assert_close(ours, theirs)
    losses = [h.sin().sum() + c.square().sum() for h, c in (ours, theirs)]
    torch.testing.assert_close(*(torch.autograd.grad(loss, leaves) for loss in losses))


def test_autocast():
    schedule, tensors = (
        schedule_of(FOREST),
        [draw(20, 3, dtype=torch.float32), *weights("child_sum", dtype=torch.float32)],
    )
    with torch.autocast("cpu", torch.bfloat16):
        h, c = seqkern.tree_lstm(tensors[0], schedule, *tensors[1:])
    assert h.dtype == c.dtype == torch.bfloat16
    cast = [t.bfloat16() for t in tensors]
    torch.testing.assert_close(h, seqkern.tree_lstm(cast[0], schedule, *cast[1:])[0])


# ---- layouts and edges --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_layouts(kind, isa):
    schedule, tensors = schedule_of(([-1, 0, 0, 1, 1], [-1])), [draw(6, 3), *weights(kind)]
    expected = seqkern.tree_lstm(tensors[0], schedule, *tensors[1:], kind=kind)

    def strided(t):
        wide = torch.full((*t.shape[:-1], 2 * t.shape[-1] + 3), torch.nan, dtype=t.dtype)
        wide[..., 1:-2:2] = t
        return wide[..., 1:-2:2]

    for change in (strided, lambda t: t.mT.contiguous().mT if t.dim() > 1 else t):
        given = [change(t) for t in tensors]
        torch.testing.assert_close(seqkern.tree_lstm(given[0], schedule, *given[1:], kind=kind), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_empty(kind, isa):
    """No node, no unit, no input."""
    for trees, inputs, hidden in (((), 3, 4), (FOREST, 3, 0), (FOREST, 0, 4)):
        schedule = schedule_of(trees)
        tensors = [draw(schedule.nodes, inputs), *weights(kind, 5, inputs, hidden)]
        leaves = [t.requires_grad_() for t in tensors]
        with poison():
            states = seqkern.tree_lstm(leaves[0], schedule, *leaves[1:], kind=kind)
            grads = torch.autograd.grad(sum(t.sin().sum() for t in states), leaves)
        assert all(t.shape == (schedule.nodes, hidden) for t in states)
        with seqkern.use_backend("reference"):
            exact = seqkern.tree_lstm(leaves[0], schedule, *leaves[1:], kind=kind)
        torch.testing.assert_close(states, exact)
        wanted = torch.autograd.grad(
            sum(t.sin().sum() for t in exact), leaves, allow_unused=True, materialize_grads=True
        )
        torch.testing.assert_close(grads, wanted)


# ---- modules, Triton, errors, cost --------------------------------------------------------------------------------


def test_modules():
    schedule, x = schedule_of(([-1, 0, 0, 1, 1], [-1])), draw(6, 3)
    cell = torch.nn.LSTMCell(3, 4).double()
    module = seqkern.nn.ChildSumTreeLSTM(3, 4).double()
    module.load_state_dict(cell.state_dict())
    torch.testing.assert_close(module(x, schedule), seqkern.tree_lstm(x, schedule, *cell.parameters()))
    nary = seqkern.nn.NaryTreeLSTM(3, 4, slots=3, dtype=torch.float64)
    expected = seqkern.tree_lstm(x, schedule, *nary.parameters(), kind="nary")
    torch.testing.assert_close(nary(x, schedule), expected)
    assert nary.weight_hh.shape == (24, 12)
    assert repr(nary) == "NaryTreeLSTM(3, 4, slots=3)"
    bare = seqkern.nn.ChildSumTreeLSTM(3, 4, bias=False, dtype=torch.float64)
    assert repr(bare) == "ChildSumTreeLSTM(3, 4, bias=False)"
    torch.testing.assert_close(bare(x, schedule), seqkern.tree_lstm(x, schedule, *bare.parameters()))
    bare(x, schedule)[0].sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in bare.parameters())
    with pytest.raises(ValueError, match="slots must be at least 1, got 0"):
        seqkern.nn.NaryTreeLSTM(3, 4, slots=0)


def test_interpreted_triton(interpreted):
    interpreted(__file__)


def interpreted_cases() -> None:
    with seqkern.use_backend("triton"):
        for kind in KINDS:
            for trees in (FOREST, ([-1],), ([-1, 0, 1],)):
                reports = check_case(tree_lstm_case(kind, 5, 17, trees=trees), torch.float32)
                assert all(report.passed for report in reports), (kind, trees, [*map(str, reports)])
            for dtype in (torch.float64, torch.bfloat16, torch.float16):
                reports = check_case(tree_lstm_case(kind, 5, 9, bias=False), dtype)
                assert all(report.passed for report in reports), (kind, dtype, [*map(str, reports)])
            test_empty(kind, None)


def test_errors():
    schedule, x, weight = schedule_of(([-1, 0, 0],)), draw(3, 3), weights("child_sum")
    wrong = [
        ((x, schedule, *weight), {"kind": "binary"}, ValueError, 'kind must be "child_sum" or "nary", got \'binary\''),
        ((x, [-1, 0, 0], *weight), {}, TypeError, "schedule must be a TreeSchedule, got list"),
        ((x[:2], schedule, *weight), {}, ValueError, r"x must have shape \(3, 3\), got \(2, 3\)"),
        ((x, schedule, weight[0][:, 1:], *weight[1:]), {}, ValueError, r"w_ih must have shape \(16, 3\)"),
        ((x, schedule, weight[0], weight[1][1:]), {}, ValueError, r"w_hh must have shape \(16, 4\)"),
        ((x, schedule, *weight), {"kind": "nary"}, ValueError, "w_hh has 1 slots, got a schedule of 2"),
        ((x.float(), schedule, *weight), {}, TypeError, "w_ih must have the input's dtype"),
        ((x, schedule, weight[0], weight[1], weight[2][1:]), {}, ValueError, r"b_ih must have shape \(16,\)"),
        ((x, schedule.to("meta"), *weight), {}, ValueError, "schedule must be on x's device cpu, got meta"),
    ]
    for arguments, options, error, message in wrong:
        with pytest.raises(error, match=message):
            seqkern.tree_lstm(*arguments, **options)


def test_op_checks_the_schedule():
    """The op itself, with tensors that are no schedule: it reads by no index of theirs before it is checked."""
    gates, w_hh = draw(3, 16), weights("child_sum")[1]
    order, levels, starts, children, slots, _, leaves = schedule_of(([-1, 0, 0],)).arguments(0)

    def number(*values):
        return torch.tensor(values)

    good = [gates, w_hh, order, levels, starts, children, slots, 0, leaves]
    torch.ops.seqkern.tree_lstm_fwd(*good)
    wrong = [
        (2, number(0, 0, 1), "order must be a permutation"), (2, number(0, 1, 3), "order must be a permutation"),
        (3, torch.tensor([[0, 2, 4], [0, 0, 2]]), "levels must go from 0 to 3"),
        (3, torch.tensor([[0, 0, 3], [0, 0, 2]]), "levels must increase"),
        (3, torch.tensor([[0, 3], [0, 2]]), "only leaves have no child"),
        (4, number(0, 0, 3, 2), "child_starts must not decrease"), (4, number(0, 1, 0, 2), "child_starts must not"),
        (5, number(1, 1), "each of one parent, got 1"), (5, number(0, 1), "children must be nodes of lower levels"),
        (5, number(1, 7), "children must be nodes"), (5, number(1, -1), "children must be nodes"),
        (6, number(0, 1, 2), "slots must have size 2"), (7, -1, "nary must be 0"), (8, 1, "leaves must be 2"),
    ]  # fmt: skip
    for index, value, message in wrong:
        with pytest.raises(RuntimeError, match=message):
            torch.ops.seqkern.tree_lstm_fwd(*[value if i == index else g for i, g in enumerate(good)])
    nary = [gates, weights("nary")[1], order, levels, starts, children, slots, 2, leaves]
    torch.ops.seqkern.tree_lstm_fwd(*nary)
    for bad in (number(0, 2), number(1, 1), number(-1, 0)):
        with pytest.raises(RuntimeError, match="slots of a node must increase, from 0 to 1"):
            torch.ops.seqkern.tree_lstm_fwd(*[bad if i == 6 else g for i, g in enumerate(nary)])


def test_cost():
    found = cost(10, 4, 3, 5, torch.float32)
    assert found.flops == 2 * 10 * 20 * 3 + 2 * (3 * 4 + 10) * 25
    assert cost(10, 4, 3, 5, torch.float32, backward=True).flops == 3 * found.flops
    assert cost(10, 4, 3, 5, torch.float32, nary=2).flops == 2 * 10 * 20 * 3 + 2 * 4 * 5 * 2 * 25
    assert cost(10, 4, 3, 5, torch.float64).bytes == 2 * found.bytes
