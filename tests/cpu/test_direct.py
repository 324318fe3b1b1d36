"""The fast path: the op's bits, whoever watches sees the op, and what autograd asks of its nodes."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import json
import mmap
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import seqkern
from seqkern import _direct, _library

pytestmark = pytest.mark.skipif(not _direct.FRONTS, reason="the fast path was not built for this torch")


def tensors(rows=5, columns=33, dtype=torch.float64):
    x, w, b = torch.randn(rows, columns), torch.randn(columns), torch.randn(columns)
    return [t.to(dtype).requires_grad_() for t in (x, w, b)]


def norm(x, w, b):
    return seqkern.layer_norm(x, w.shape, w, b)


def added(x, w, b):
    return seqkern.add_layer_norm(x, 2 * x, w.shape, w, b)


def expected(x, w, b):
    return torch.nn.functional.layer_norm(x, w.shape, w, b)


def test_statistics_of_other_rows_are_not_read():
    x, w, b = tensors(rows=2)
    node = norm(x, w, b).grad_fn
    x.data = torch.randn(2000, 33, dtype=torch.float64)
    dy = torch.randn(2000, 33, dtype=torch.float64)
    with torch.no_grad():  # the engine would find the shape wrong
        found = node(dy)[0]
    x = x.detach().clone().requires_grad_()
    torch.testing.assert_close(found, torch.autograd.grad(expected(x, w, b), x, dy)[0])


def test_backward_again_and_after_it_was_freed():
    leaves = tensors()
    output = norm(*leaves)
    first = torch.autograd.grad(output.sum(), leaves, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(output.sum(), leaves), strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(output.sum(), leaves)


@pytest.mark.parametrize("differentiable", [False, True])
def test_nothing_is_kept_of_results_that_are_gone(differentiable):
    leaves = tensors()
    with torch.set_grad_enabled(differentiable):
        results = [norm(*leaves), *added(*leaves)]
    if differentiable:
        grads = torch.autograd.grad(sum(t.sum() for t in results), leaves)
        results += grads
        results += [norm(*leaves), *added(*leaves)]  # these never go back
        del grads
    alive = [weakref.ref(t) for t in results]
    results.clear()
    assert [t() for t in alive] == [None] * len(alive)


def test_second_derivatives():
    assert torch.autograd.gradgradcheck(norm, tensors())
    assert torch.autograd.gradgradcheck(added, tensors())


def test_a_batch_of_gradients():
    leaves, cotangents = tensors(), torch.randn(4, 5, 33, dtype=torch.float64)
    found = torch.autograd.grad(norm(*leaves), leaves, cotangents, is_grads_batched=True)
    wanted = torch.autograd.grad(expected(*leaves), leaves, cotangents, is_grads_batched=True)
    torch.testing.assert_close(found, wanted)


def test_forward_mode_over_the_way_back():
    leaves, tangent = tensors(), torch.randn(5, 33, dtype=torch.float64)

    def pushed(function):
        with torch.autograd.forward_ad.dual_level():
            cotangent = torch.autograd.forward_ad.make_dual(torch.ones_like(tangent), tangent)
            grads = torch.autograd.grad(function(*leaves), leaves, cotangent)
            return [torch.autograd.forward_ad.unpack_dual(g).tangent for g in grads]

    outputs = norm(*leaves), expected(*leaves)  # made before forward mode begins
    torch.testing.assert_close(pushed(lambda *_: outputs[0]), pushed(lambda *_: outputs[1]))


def test_changed_input_is_noticed():
    x, w, b = tensors()
    y = x * 1
    output = norm(y, w, b)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize(
    "unpack", [torch.Tensor.clone, lambda t: t.mT.contiguous().mT], ids=["as it was", "other strides"]
)
def test_saved_tensor_hooks(unpack):
    leaves, seen = tensors(), []

    def pack(t):
        seen.append(tuple(t.shape))
        return t.detach().clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: unpack(t) if t.dim() > 1 else t):
        output = norm(*leaves)
    assert sorted(seen) == [(5, 33), (33,), (33,)]
    found = torch.autograd.grad(output.sin().sum(), leaves)
    torch.testing.assert_close(found, torch.autograd.grad(expected(*leaves).sin().sum(), leaves))


def test_tensor_and_node_hooks():
    leaves, calls = tensors(), []
    output = norm(*leaves)
    output.register_hook(lambda g: calls.append("tensor") or 2 * g)
    output.grad_fn.register_hook(lambda inputs, outputs: calls.append("node"))
    found = torch.autograd.grad(output.sum(), leaves)
    assert calls == ["tensor", "node"]
    torch.testing.assert_close(found, torch.autograd.grad(2 * expected(*leaves).sum(), leaves))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant):
    leaves = tensors()
    found = torch.autograd.grad(checkpoint(norm, *leaves, use_reentrant=False).sum(), leaves)
    if reentrant:
        checkpoint(norm, *leaves, use_reentrant=True).sum().backward()
        found = [t.grad for t in leaves]
    torch.testing.assert_close(tuple(found), torch.autograd.grad(expected(*leaves).sum(), leaves))


def test_an_error_on_the_long_way_keeps_its_type(monkeypatch):
    def fail(*arguments):
        raise KeyError("kept")

    output = norm(*tensors())
    monkeypatch.setitem(_direct._long_ways, "LayerNormNode", fail)
    with pytest.raises(KeyError, match="kept"):
        output.sum().backward(create_graph=True)


@pytest.mark.parametrize("missing", [1, 2, (1, 2)], ids=str)
def test_parameters_that_are_not_there_or_need_nothing(missing):
    missing = missing if isinstance(missing, tuple) else (missing,)
    cotangent = torch.randn(5, 33, dtype=torch.float64)
    for frozen in (False, True):
        x, w, b = tensors()
        arguments = [x, w, b]
        for i in missing:
            arguments[i] = arguments[i].detach() if frozen else None
        leaves = [t for t in arguments if t is not None and t.requires_grad]
        found = torch.autograd.grad(seqkern.layer_norm(x, (33,), *arguments[1:]), leaves, cotangent)
        wanted = torch.autograd.grad(torch.nn.functional.layer_norm(x, (33,), *arguments[1:]), leaves, cotangent)
        torch.testing.assert_close(found, wanted)
    # The parameters alone.
    x, w, b = tensors()
    left = [t for i, t in enumerate((w, b), 1) if i not in missing]
    if left:
        output = seqkern.layer_norm(x.detach(), (33,), *(None if i in missing else t for i, t in ((1, w), (2, b))))
        wanted = torch.nn.functional.layer_norm(
            x.detach(), (33,), *(None if i in missing else t for i, t in ((1, w), (2, b)))
        )
        torch.testing.assert_close(
            torch.autograd.grad(output, left, cotangent), torch.autograd.grad(wanted, left, cotangent)
        )


@pytest.mark.parametrize("wanted", ["input", "residual", "both", "weight"])
@pytest.mark.parametrize("used", ["output", "sum", "both", "expanded"])
@pytest.mark.parametrize("differentiable", [False, True])
def test_sums(wanted, used, differentiable):
    """Also where the sum's gradient is one number for all, and where the gradients shall have gradients."""
    w = torch.randn(33, dtype=torch.float64, requires_grad=wanted == "weight")
    x, r = (torch.randn(5, 33, dtype=torch.float64, requires_grad=wanted in (n, "both")) for n in ("input", "residual"))
    leaves = [t for t in (x, r, w) if t.requires_grad]

    def loss(output, total):
        if used == "expanded":
            return output.sin().sum() + 3 * total.sum()
        return {"output": output.sin(), "sum": total.cos(), "both": output.sin() * total.cos()}[used].sum()

    found = seqkern.add_layer_norm(x, r, (33,), w)
    assert found[1].requires_grad == (wanted != "weight")
    if wanted == "weight" and used == "sum":
        return
    options = {"create_graph": differentiable}
    ours = torch.autograd.grad(loss(*found), leaves, **options)
    theirs = torch.autograd.grad(loss(torch.nn.functional.layer_norm(x + r, (33,), w), x + r), leaves, **options)
    torch.testing.assert_close(ours, theirs)


def test_profiler_and_modes_see_the_op():
    leaves, cotangent = tensors(), torch.randn(5, 33, dtype=torch.float64)  # not expanded: those go the long way anyhow
    output = norm(*leaves)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        output.backward(cotangent)
    assert any("layer_norm_bwd" in event.name for event in profile.events())

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    names, output = [], norm(*leaves)
    with Seen():
        output.backward(cotangent)
    assert "seqkern.layer_norm_bwd.default" in names


def test_in_another_thread():
    leaves = tensors()
    output, found = norm(*leaves), []
    thread = threading.Thread(target=lambda: found.extend(torch.autograd.grad(output.sum(), leaves)))
    thread.start()
    thread.join()
    torch.testing.assert_close(tuple(found), torch.autograd.grad(expected(*leaves).sum(), leaves))


def test_nothing_is_kept_alive():
    x, w, b = tensors()
    output = norm(x, w, b)
    del output
    for _ in range(3):
        added(x, w, b)[0].sum().backward()
    count = torch.tensor([t._use_count() for t in (x, w, b)])
    for _ in range(50):
        added(x, w, b)[0].sum().backward()
    assert torch.equal(count, torch.tensor([t._use_count() for t in (x, w, b)]))


def test_compiled_backward():
    """Compiled autograd takes the node as one function that it cannot look into."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.print_readable(print_output=False))
        return graph

    x, w, b = tensors()
    output = norm(x, w, b)
    normalised, total = added(x, w, b)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
        (output.sin().sum() + (normalised * total).sum()).backward()
    assert all(any(name in text for text in graphs) for name in ("code: LayerNormNode", "code: AddLayerNormNode")), (
        graphs
    )
    wanted = expected(x, w, b).sin().sum() + (expected(3 * x, w, b) * 3 * x).sum()
    torch.testing.assert_close((x.grad, w.grad, b.grad), torch.autograd.grad(wanted, (x, w, b)))


def test_compiled_backward_of_other_options():
    """A graph that was made for one call is not taken for another."""
    cotangent = torch.randn(5, 33, dtype=torch.float64)
    calls = [(True, 1e-5, (0, 1, 2)), (True, 0.5, (0, 1, 2)), (False, 1e-5, (0, 1)), (False, 0.5, (0, 1))]
    calls += [(True, 1e-5, needed) for needed in ((0,), (1,), (2,))]
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        for centred, eps, needed in calls:
            x, w, b = tensors()
            leaves = [(x, w, b)[i] for i in needed]
            if centred:
                results = (f(x, (33,), w, b, eps) for f in (seqkern.layer_norm, torch.nn.functional.layer_norm))
            else:
                results = (f(x, (33,), w, eps) for f in (seqkern.rms_norm, torch.nn.functional.rms_norm))
            found, wanted = (torch.autograd.grad(each, leaves, cotangent) for each in results)
            torch.testing.assert_close(found, wanted)


def test_large_norms_have_memory_of_the_pool():
    leaves = tensors(600, 520)  # 2.4 MB, in float64
    seqkern.release_memory()
    output = norm(*leaves)
    assert output.grad_fn.name() == "LayerNormNode"
    found = torch.autograd.grad(output, leaves, torch.ones_like(output))
    torch.testing.assert_close(found, torch.autograd.grad(expected(*leaves).sum(), leaves))
    waiting = _library.waiting_memory()
    del output
    one = _library.waiting_memory() - waiting
    assert one >= 600 * 520 * 8
    del found
    assert _library.waiting_memory() == waiting + 2 * one


def test_other_threads_run_during_a_large_norm():
    leaves = tensors(4000, 4096, torch.float32)  # some ten milliseconds
    norm(*leaves)
    steps, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            steps[0] += 1
            time.sleep(0)  # gives the global lock back

    thread = threading.Thread(target=count)
    interval = sys.getswitchinterval()
    thread.start()
    try:
        sys.setswitchinterval(60)  # from here on the other thread runs only where this one lets it
        before = steps[0]
        norm(*leaves)
        assert steps[0] - before > 10  # one or two would pass in the gaps between calls
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()


def resident():
    """Bytes of memory that this process holds, without those that the C library has back but keeps."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not this C library")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_thread_keeps_no_large_memory(dtype):
    """Neither for parameters of another dtype nor for gradients' sums."""
    x, w, b = (t.to(dtype).detach() for t in tensors(1, 1 << 22, torch.float32))
    leaves = [x.float().requires_grad_(), w.requires_grad_(), b.requires_grad_()]
    try:
        _library._set_cache_megabytes("0")
        before = resident()
        norm(*leaves).sum().backward()
        grads = [t.grad for t in leaves]
        for t in leaves:
            t.grad = None
        output = expected(*(t.float() for t in leaves))
        torch.testing.assert_close(grads, list(torch.autograd.grad(output.sum(), leaves)))
        del grads, output
        assert resident() - before < 8 << 20  # either would be 16 MB or more
    finally:
        _library._set_cache_megabytes("512")


# ---- every op -----------------------------------------------------------------------------------------------------


def _networks():
    """Recurrent layers by name: the function, its weights for (4, 3, 6), states and options."""
    for mode, function in (("LSTM", seqkern.lstm), ("GRU", seqkern.gru), ("RNN", seqkern.rnn_tanh)):
        for words in ("", "layers both", "no bias", "batch first"):
            options = {"num_layers": 2, "bidirectional": True} if "both" in words else {}
            module = getattr(torch.nn, mode)(6, 5, bias="no" not in words, **options)
            options["batch_first"] = "first" in words
            yield f"{mode} {words}".strip(), mode, function, module, options


def wide(t):
    return torch.promote_types(t.dtype, torch.float32)


def _self_attention(heads, options, key_lengths=None, is_causal=False):
    """A layer's self-attention as a function of its input and its parameters."""
    layer = seqkern.nn.MultiheadAttention(8 * heads, heads, **options)
    names = [name for name, _ in layer.named_parameters()]

    def call(x, *parameters):
        given = dict(zip(names, parameters, strict=True))
        options = {"need_weights": False, "key_lengths": key_lengths, "is_causal": is_causal}
        return torch.func.functional_call(layer, given, (x, x, x), options)[0]

    return call, [(3, 7, 8 * heads), *(tuple(p.shape) for p in layer.parameters())]


def _calls():
    """By name: a function of tensors that must all have gradients, and the shapes of these."""
    calls = {
        "layer_norm": (lambda x, w, b: seqkern.layer_norm(x, (33,), w, b), [(2, 5, 33), (33,), (33,)]),
        "rms_norm": (lambda x, w: seqkern.rms_norm(x, 33, w), [(5, 33), (33,)]),
        "add_layer_norm": (lambda x, r, w: seqkern.add_layer_norm(x, r, 33, w), [(5, 33), (5, 33), (33,)]),
        "swiglu": (seqkern.swiglu, [(3, 17), (3, 17)]),
        "geglu": (lambda g, u: seqkern.geglu(g, u, "tanh"), [(3, 17), (3, 17)]),
        "attention": (
            lambda q, k, v: seqkern.attention(q, k, v, causal=True, softcap=5.0, window=(3, 0)),
            [(2, 4, 7, 8), (2, 2, 9, 8), (2, 2, 9, 5)],
        ),
        "attention, lengths": (
            lambda q, k, v: seqkern.attention(q, k, v, key_lengths=torch.tensor([9, 4]), window=(3, 0)),
            [(2, 4, 7, 8), (2, 2, 9, 8), (2, 2, 9, 5)],
        ),
        "scaled_dot_product_attention": (
            lambda q, k, v: seqkern.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3),
            [(2, 4, 7, 8), (2, 4, 9, 8), (2, 4, 9, 5)],
        ),
        "self-attention": _self_attention(4, {"batch_first": True, "num_kv_heads": 2}, torch.tensor([7, 0, 4])),
        "self-attention, tokens first": _self_attention(2, {"bias": False}, is_causal=True),
        "self-attention, one head": _self_attention(1, {}, torch.tensor([3, 2, 0, 1, 3, 3, 1])),
        "self-attention, wide": _self_attention(
            2, {"batch_first": True, "head_dim": 24, "window": (2, 1)}, torch.tensor([7, 5, 1], dtype=torch.int32)
        ),
        "ffn": (seqkern.ffn, [(2, 3, 6), (10, 6), (10,), (4, 10), (4,)]),
        "ffn, gated": (
            lambda x, w1, w2: seqkern.ffn(x, w1, None, w2, None, "swiglu"),
            [(3, 6), (10, 6), (4, 5)],
        ),
        "rope": (lambda q, k: seqkern.rope(q, k, 3), [(2, 4, 5, 8), (2, 2, 5, 8)]),
        "rope, tokens first": (
            lambda q, k: seqkern.rope(q, k, rotary_dim=6, theta=500.0, interleaved=True, scaling=0.9, sequence_dim=-3),
            [(2, 5, 4, 8), (2, 5, 2, 8)],
        ),
        "rope, heads of one product": (
            lambda x: seqkern.rope(x.transpose(1, 2), inv_freq=torch.tensor([1.0, 0.1], dtype=torch.float64))[0],
            [(2, 5, 3, 4)],
        ),
        "rope, tables": (
            lambda q, k: seqkern.rope(q, k, tables=seqkern.rope_tables(torch.arange(5), 8, dtype=wide(q))),
            [(2, 4, 5, 8), (2, 2, 5, 8)],
        ),
        "lstm_cell": (
            lambda x, h, c, *w: seqkern.lstm_cell(x, (h, c), *w),
            [(3, 6), (3, 5), (3, 5), (20, 6), (20, 5), (20,), (20,)],
        ),
        "gru_cell": (seqkern.gru_cell, [(3, 6), (3, 5), (15, 6), (15, 5), (15,)]),
        "rnn_relu_cell": (seqkern.rnn_relu_cell, [(3, 6), (3, 5), (5, 6), (5, 5)]),
        "lstm projected": (
            lambda x, *w: seqkern.lstm(x, None, list(w)),
            [(4, 3, 6), (20, 6), (20, 2), (20,), (20,), (2, 5)],
        ),
    }
    for name, mode, function, module, options in _networks():
        weights = [tuple(p.shape) for p in module.parameters()]
        states = [(2 * module.num_layers if module.bidirectional else 1, 4 if options["batch_first"] else 3, 5)]
        states *= 2 if mode == "LSTM" else 1

        count = len(states)

        def call(x, *rest, function=function, count=count, options=options):
            hx = rest[0] if count == 1 else rest[:2]
            return function(x, hx, list(rest[count:]), **options)

        calls[name] = (call, [(4, 3, 6), *states, *weights])
    return calls


CALLS = _calls()


def _flat(results):
    if isinstance(results, torch.Tensor):
        return [results]
    return [t for each in results for t in _flat(each)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", CALLS)
def test_the_same_bits_as_the_op(name, dtype, isa, monkeypatch):
    """Results, gradients, gradients of gradients; also where one input alone, or all but one, has a gradient."""
    function, shapes = CALLS[name]
    tensors = [(0.7 * torch.randn(shape)).to(dtype) for shape in shapes]

    def everything():
        found = []
        for wanted in ([True] * len(shapes), *([n == k for n in range(len(shapes))] for k in range(len(shapes)))):
            leaves = [t.clone().requires_grad_(want) for t, want in zip(tensors, wanted, strict=True)]
            results = _flat(function(*leaves))
            needed = [t for t in leaves if t.requires_grad]
            loss = sum((result * (n + 1)).sin().sum() for n, result in enumerate(results))
            grads = torch.autograd.grad(loss, needed, create_graph=all(wanted))
            found += [*results, *grads]
            if all(wanted):
                found += torch.autograd.grad(sum(g.sin().sum() for g in grads), needed, allow_unused=True)
        with torch.no_grad():
            return found + _flat(function(*tensors))

    with counted(monkeypatch) as calls:
        fast = everything()
    assert sum(calls.values()) == len(shapes) + 2, "the fast path was not taken"
    monkeypatch.setattr(_direct, "enabled", False)
    for a, b in zip(fast, everything(), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.shape, a.dtype, a.requires_grad, a.is_leaf) == (b.shape, b.dtype, b.requires_grad, b.is_leaf)
            assert a.stride() == b.stride()
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", CALLS)
def test_a_batch_of_gradients_of_every_op(name, monkeypatch):
    function, shapes = CALLS[name]
    leaves = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]

    def gradients():
        results = [t for t in _flat(function(*leaves)) if t.is_floating_point()]
        cotangents = [torch.linspace(-1, 1, 2 * t.numel(), dtype=t.dtype).view(2, *t.shape) for t in results]
        return torch.autograd.grad(results, leaves, cotangents, is_grads_batched=True)

    fast = gradients()
    monkeypatch.setattr(_direct, "enabled", False)
    assert all(map(torch.equal, fast, gradients()))


@contextlib.contextmanager
def counted(monkeypatch):
    """How often each front returned a result meanwhile."""
    calls = collections.Counter()

    def counting(name, front):
        def call(*arguments):
            result = front(*arguments)
            calls[name] += result is not None
            return result

        return call

    with monkeypatch.context() as patch:
        for name, front in dict(_direct.FRONTS).items():
            patch.setattr(_direct, name, counting(name, front))
            patch.setitem(_direct.FRONTS, name, counting(name, front))
        yield calls


@contextlib.contextmanager
def _watched(way):
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    class FunctionMode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    contexts = {
        "dispatch mode": Mode,
        "function mode": FunctionMode,
        "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "forward mode": torch.autograd.forward_ad.dual_level,
        "reference": lambda: seqkern.use_backend("reference"),
        "vmap": contextlib.nullcontext,
        "subclass": contextlib.nullcontext,
        "meta": contextlib.nullcontext,
        "empty": contextlib.nullcontext,
        "negative": contextlib.nullcontext,
    }
    with contexts[way]():
        yield


class Subclass(torch.Tensor):
    pass


WAYS = ("dispatch mode", "function mode", "profiler", "autocast", "forward mode", "reference", "vmap", "subclass")


@pytest.mark.parametrize("way", [*WAYS, "meta", "negative"])
@pytest.mark.parametrize("name", ["layer_norm", "swiglu", "attention", "ffn", "rope", "lstm_cell", "GRU"])
def test_whoever_watches_sees_the_op(name, way, monkeypatch):
    function, shapes = CALLS[name]
    tensors = [torch.randn(shape) for shape in shapes]
    with counted(monkeypatch) as calls, _watched(way):
        if way == "vmap":
            torch.func.vmap(lambda *t: function(*t))(*(t.expand(2, *t.shape) for t in tensors))
        elif way == "subclass":
            function(tensors[0].as_subclass(Subclass), *tensors[1:])
        elif way == "meta":
            function(*(t.to("meta") for t in tensors))
        elif way == "negative":
            function(torch._neg_view(tensors[0]), *tensors[1:])
        else:
            function(*tensors)
    assert sum(calls.values()) == 0


@pytest.mark.parametrize("name", CALLS)
def test_in_inference_mode(name, monkeypatch):
    function, shapes = CALLS[name]
    tensors = [torch.randn(shape) for shape in shapes]
    with counted(monkeypatch) as calls, torch.inference_mode():
        fast = _flat(function(*tensors))
    assert sum(calls.values()) == 1
    assert all(t.is_inference() for t in fast)
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(fast, _flat(function(*tensors)), strict=True))


@pytest.mark.parametrize("name", ["layer_norm", "swiglu", "attention", "ffn", "rope", "lstm_cell", "GRU"])
def test_traced_and_compiled(name, monkeypatch):
    function, shapes = CALLS[name]
    tensors = [torch.randn(shape) for shape in shapes]
    with torch.no_grad():
        wanted = _flat(function(*tensors))
        with counted(monkeypatch) as calls:
            traced = torch.jit.trace(lambda *t: tuple(_flat(function(*t))), tuple(tensors), check_trace=False)
            made = torch.fx.experimental.proxy_tensor.make_fx(lambda *t: _flat(function(*t)))(*tensors)
        assert sum(calls.values()) == 0
        assert "seqkern" in str(traced.inlined_graph)
        assert "seqkern" in made.code
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        for found in (made(*tensors), _flat(compiled(*tensors))):
            torch.testing.assert_close(list(found), wanted, rtol=0, atol=0)


# Wrong or unusual arguments, by op: each must end as it does without the fast path.
X, W = torch.randn(4, 8), torch.randn(8)
Q, S = torch.randn(1, 2, 3, 4), torch.randn(2, 1, 4)
LSTM = [p.detach() for p in torch.nn.LSTM(4, 3).parameters()]
ODD = {
    "shape": lambda: seqkern.layer_norm(X, (7,)),
    "no shape": lambda: seqkern.layer_norm(X, ()),
    "two dimensions": lambda: seqkern.layer_norm(X, (4, 8)),
    "eps None": lambda: seqkern.layer_norm(X, (8,), W, None, None),
    "eps below 0": lambda: seqkern.layer_norm(X, (8,), W, None, -1e-9),
    "weight of another dtype": lambda: seqkern.layer_norm(X, (8,), W.double(), W.bfloat16()),
    "whole numbers": lambda: seqkern.layer_norm(X.long(), (8,)),
    "transposed": lambda: seqkern.layer_norm(X.t(), (4,)),
    "residual of another shape": lambda: seqkern.add_layer_norm(X, X[:2], (8,)),
    "wrong keyword": lambda: seqkern.layer_norm(X, (8,), gamma=W),
    "dtypes of a gate": lambda: seqkern.swiglu(X, X.double()),
    "shapes of a gate": lambda: seqkern.swiglu(X, W),
    "strided gate": lambda: seqkern.swiglu(*torch.cat([X, X], -1).chunk(2, -1)),
    "heads": lambda: seqkern.attention(torch.randn(1, 3, 3, 4), Q, Q),
    "lengths of int32": lambda: seqkern.attention(Q, Q, Q, key_lengths=torch.tensor([2], dtype=torch.int32)),
    "lengths out of range": lambda: [
        seqkern.attention(Q, Q, Q, key_lengths=torch.tensor([n])) for n in (-5, 0, 2**62, -(2**62))
    ],
    "lengths of floats": lambda: seqkern.attention(Q, Q, Q, key_lengths=torch.tensor([2.0])),
    "lengths of two": lambda: seqkern.attention(Q, Q, Q, key_lengths=torch.tensor([2, 3])),
    "lengths in a list": lambda: seqkern.attention(Q, Q, Q, key_lengths=[2]),
    "lengths apart": lambda: seqkern.attention(
        *[Q.expand(2, -1, -1, -1)] * 3, key_lengths=torch.tensor([2, 0, 1])[::2]
    ),
    "turned by half a feature": lambda: seqkern.rope(Q, rotary_dim=3),
    "turned by nothing": lambda: seqkern.rope(Q, rotary_dim=0)[0],
    "turned too far": lambda: seqkern.rope(Q, rotary_dim=6),
    "turned without a base": lambda: seqkern.rope(Q, theta=0.0),
    "turned by a base in words": lambda: seqkern.rope(Q, theta="10000"),
    "turned beside other tokens": lambda: seqkern.rope(Q, Q[:, :, :2]),
    "turned beside other types": lambda: seqkern.rope(Q, Q.double()),
    "turned beside other heads": lambda: seqkern.rope(Q, Q[:, :1]),
    "turned from half a position": lambda: seqkern.rope(Q, positions=0.5),
    "turned from True": lambda: seqkern.rope(Q, positions=True),
    "turned at positions": lambda: seqkern.rope(Q, Q, torch.tensor([7, 0, 2])),
    "turned from before the start": lambda: seqkern.rope(Q, Q, -3),
    "turned beyond 2^53": lambda: seqkern.rope(Q, Q, 2**60),
    "turned by short tables": lambda: seqkern.rope(Q, tables=(torch.ones(2, 2), torch.ones(2, 2))),
    "turned by tables for each": lambda: seqkern.rope(Q, tables=(torch.ones(1, 3, 4), 0.1 * torch.ones(1, 3, 4)))[0],
    "turned by one table": lambda: seqkern.rope(Q, tables=(torch.ones(3, 2),)),
    "turned by tables of other types": lambda: seqkern.rope(Q, tables=(torch.ones(3, 2).double(), torch.ones(3, 2)))[0],
    "turned by both": lambda: seqkern.rope(Q, tables=(torch.ones(3, 2), torch.ones(3, 2)), inv_freq=torch.ones(2)),
    "turned by other frequencies": lambda: seqkern.rope(Q, inv_freq=torch.ones(3, dtype=torch.float64)),
    "turned by float32": lambda: seqkern.rope(Q, inv_freq=torch.ones(2))[0],
    "turned along heads": lambda: seqkern.rope(Q, sequence_dim=-1),
    "turned without a batch": lambda: seqkern.rope(Q[0], Q[0]),
    "a wrong keyword of rope": lambda: seqkern.rope(Q, base=2.0),
    "blocks that do not fit": lambda: seqkern.ffn(X, torch.ones(6, 7), None, torch.ones(2, 6), None),
    "an odd gate": lambda: seqkern.ffn(X, torch.ones(5, 8), None, torch.ones(2, 2), None, "swiglu"),
    "blocks of two types": lambda: seqkern.ffn(X, torch.ones(6, 8).double(), None, torch.ones(2, 6), None),
    "a bias that is short": lambda: seqkern.ffn(X, torch.ones(6, 8), torch.ones(5), torch.ones(2, 6), None),
    "batch": lambda: seqkern.attention(Q, Q.expand(2, -1, -1, -1), Q),
    "lengths": lambda: seqkern.attention(Q, Q, Q[:, :, :2]),
    "align": lambda: seqkern.attention(Q, Q, Q, causal=True, causal_align="middle"),
    "window too wide": lambda: seqkern.attention(Q, Q, Q, window=(2**62, 0)),
    "window below -1": lambda: seqkern.attention(Q, Q, Q, window=(-2, 0)),
    "half a window": lambda: seqkern.attention(Q, Q, Q, window=(None, 1)),
    "scale nan": lambda: seqkern.attention(Q, Q, Q, scale=float("nan")),
    "scale in a tensor": lambda: seqkern.attention(Q, Q, Q, scale=torch.tensor(0.5)),
    "softcap below 0": lambda: seqkern.attention(Q, Q, Q, softcap=-1.0),
    "softcap 0": lambda: seqkern.attention(Q, Q, Q, softcap=0.0),
    "dropout 2": lambda: seqkern.attention(Q, Q, Q, dropout_p=2.0),
    "three dimensions": lambda: seqkern.scaled_dot_product_attention(Q[0], Q[0], Q[0]),
    "heads that differ": lambda: seqkern.scaled_dot_product_attention(Q, Q[:, :1], Q[:, :1]),
    "heads that broadcast": lambda: seqkern.scaled_dot_product_attention(Q, Q[:, :1], Q[:, :1], enable_gqa=True),
    "values of another width": lambda: seqkern.attention(Q, Q, Q[..., :3]),
    "transposed heads": lambda: seqkern.attention(*[Q.transpose(1, 2)] * 3),
    "columns apart": lambda: seqkern.attention(*[Q.transpose(2, 3)] * 3),
    "layers": lambda: seqkern.lstm(S, None, LSTM, num_layers=2),
    "layers True": lambda: seqkern.lstm(S, None, LSTM, num_layers=True),
    "weights that are short": lambda: seqkern.lstm(S, None, LSTM[:3]),
    "weights in a tuple": lambda: seqkern.lstm(S, None, tuple(LSTM)),
    "weights of another layer": lambda: seqkern.lstm(torch.randn(2, 1, 5), None, LSTM),
    "state of another batch": lambda: seqkern.lstm(S, (torch.zeros(1, 2, 3),) * 2, LSTM),
    "state in a list": lambda: seqkern.lstm(S, [torch.zeros(1, 1, 3)] * 2, LSTM),
    "one state": lambda: seqkern.lstm(S, torch.zeros(1, 1, 3), LSTM),
    "dropout out of range": lambda: seqkern.lstm(S, None, LSTM, dropout=1.5),
    "cell of another size": lambda: seqkern.lstm_cell(X, (torch.zeros(4, 3),) * 2, *LSTM),
    "cell of mixed dtypes": lambda: seqkern.rnn_relu_cell(
        X, torch.zeros(4, 3).double(), torch.randn(3, 8), LSTM[1][:3]
    ),
    "no tensor": lambda: seqkern.gru_cell(X, None, *LSTM),
    "no steps": lambda: seqkern.lstm(torch.randn(0, 1, 4), None, LSTM),
}


@pytest.mark.parametrize("call", ODD.values(), ids=ODD)
def test_odd_arguments_end_as_they_do_without(call, monkeypatch):
    def end():
        try:
            return [t.clone() for t in _flat(call())]
        except (TypeError, ValueError, NotImplementedError) as error:
            return [type(error), str(error)]

    fast = end()
    monkeypatch.setattr(_direct, "enabled", False)
    for a, b in zip(fast, end(), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_recurrent_state_that_alone_was_used():
    """h_n without output, c_n without either: gradients that are not there."""
    module = seqkern.nn.LSTM(4, 3)
    theirs = torch.nn.LSTM(4, 3)
    theirs.load_state_dict(module.state_dict())
    x = torch.randn(2, 1, 4)
    for pick in (lambda o, s: s[0], lambda o, s: s[1], lambda o, s: o):
        for each in (module, theirs):
            each.zero_grad()
            pick(*each(x)).sum().backward()
        for ours, expected in zip(module.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, expected.grad)


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_modified(name):
    function, shapes = CALLS[name]
    leaves = [torch.randn(shape).requires_grad_() for shape in shapes]
    before = [t.detach().clone() for t in leaves]
    sum(t.sum() for t in _flat(function(*leaves))).backward()
    assert all(torch.equal(a, b) for a, b in zip(before, leaves, strict=True))
    assert all(t._version == 0 for t in leaves)


def test_another_build_of_the_kernels_has_no_fast_path():
    """Where a signature differs, the library finds no function, and connects nothing."""
    find = _library._extension.seqkern_direct_op
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_char_p]
    assert find(b"layer_norm_fwd", b"void (int)") is None
    assert find(b"no_such_op", b"void (int)") is None


def test_small_calls_are_measured(tmp_path, capsys):
    """The benchmark compares results first; of its times only that they are there."""
    from benchmarks import pages, small_calls

    threads, file = torch.get_num_threads(), tmp_path / "small-calls.json"
    try:
        small_calls.main(["--quick", "--json", str(file)])
    finally:
        torch.set_num_threads(threads)
    assert "LSTMCell 1 x 64" in capsys.readouterr().out
    calls = json.loads(file.read_text())["calls"]
    assert {"layer_norm 8 x 64", "swiglu 8 x 64", "GRU, a step of 1 x 64"} <= {call["op"] for call in calls}
    assert all(
        call[mode][key] > 0 for call in calls for mode in ("inference", "training") for key in ("ours_us", "ratio")
    )
    assert f"| {calls[0]['op']} | " in pages._small_calls(file)


# ---- a step of decoding -------------------------------------------------------------------------------------------


def decoding(batch=3, heads=4, kv_heads=2, count=2, room=9, dim=5, dtype=torch.float32):
    caches = [torch.randn(batch, kv_heads, room, dim).to(dtype) for _ in range(2)]
    query = torch.randn(batch, heads, count, dim).to(dtype)
    key, value = torch.randn(batch, count, 2 * kv_heads, dim).to(dtype).transpose(1, 2).split(kv_heads, 1)
    return query, *caches, torch.tensor([0, 7, 3])[:batch], key, value


def decoded(call, window=None, scale=None):
    query, keys, values, lengths, key, value = call
    keys, values = keys.clone(), values.clone()
    out = seqkern.attention_decode(query, keys, values, lengths, key=key, value=value, window=window, scale=scale)
    return out, keys, values


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"window": (2, 0)}, {"window": (None, 0)}, {"scale": 0.3}])
def test_decoding_is_the_ops(dtype, options, monkeypatch):
    call = decoding(dtype=dtype)
    found = _direct.attention_decode(
        call[0], call[1].clone(), call[2].clone(), *call[3:], options.get("window"), options.get("scale")
    )
    fast = decoded(call, **options)
    monkeypatch.setattr(_direct, "enabled", False)
    slow = decoded(call, **options)
    assert torch.equal(found, slow[0])
    assert all(torch.equal(a, b) for a, b in zip(fast, slow, strict=True))


def test_decoding_leaves_other_calls_to_the_dispatcher():
    query, keys, values, lengths, key, value = decoding()
    plain = {"query": query, "keys": keys, "values": values, "lengths": lengths, "key": key, "value": value,
             "window": None, "scale": None}  # fmt: skip
    whole = torch.randn(3, 2, 9, 5)
    others = {
        "without room": {"lengths": torch.tensor([0, 8, 3])},
        "negative": {"lengths": torch.tensor([0, -1, 3])},
        "int32": {"lengths": lengths.int()},
        "of another batch": {"lengths": torch.tensor([1, 2])},
        "no new ones": {"key": None, "value": None},
        "a key of the cache": {"keys": whole, "key": whole[:, :, :2]},
        "a query of the cache": {"values": whole, "query": whole[:, :, :2].expand(3, 2, 2, 5)},
        "rows apart": {"key": torch.randn(3, 2, 2, 10)[..., ::2]},
        "a cache in another layout": {"keys": keys.transpose(0, 1).contiguous().transpose(0, 1)},
        "a cache of another type": {"values": values.double()},
        "heads that do not fit": {"query": query[:, :3]},
        "other features": {"key": torch.randn(3, 2, 2, 4)},
        "a gradient": {"query": query.clone().requires_grad_()},
        "to the right": {"window": (2, 1)},
        "a scale of nan": {"scale": float("nan")},
    }  # fmt: skip
    before = keys.clone(), values.clone()
    for name, other in others.items():
        assert _direct.attention_decode(*(plain | other).values()) is None, name
    assert torch.equal(keys, before[0])
    assert torch.equal(values, before[1])
    assert _direct.attention_decode(*plain.values()) is not None


def test_decoding_tells_autograd_that_a_cache_was_written():
    query, keys, values, lengths, key, value = decoding()
    w = torch.randn_like(keys, requires_grad=True)
    product = (w * keys).sum()
    with torch.no_grad():
        assert _direct.attention_decode(query, keys, values, lengths, key, value, None, None) is not None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():
        own = [t.clone() for t in (query, keys, values, lengths, key, value)]
        assert _direct.attention_decode(*own, None, None) is not None
