"""What autograd asks of the nodes of small norms, in C++ and in Python: gradients twice, batched, hooked, failing."""

from __future__ import annotations

import ctypes
import mmap
import sys
import sysconfig
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import seqkern
from seqkern import _library
from seqkern.ops import _direct
from seqkern.ops import layer_norm as ops


@pytest.fixture(params=["C++", "Python"], autouse=True)
def nodes(request):
    if request.param == "C++" and _direct.NODES is _direct.PYTHON_NODES:
        pytest.skip("the nodes in C++ were not built")
    _direct._connect(_direct.NODES if request.param == "C++" else _direct.PYTHON_NODES)
    yield request.param
    _direct._connect(_direct.NODES)


def tensors(rows=5, columns=33, dtype=torch.float64):
    x, w, b = torch.randn(rows, columns), torch.randn(columns), torch.randn(columns)
    return [t.to(dtype).requires_grad_() for t in (x, w, b)]


def norm(x, w, b):
    return seqkern.layer_norm(x, w.shape, w, b)


def added(x, w, b):
    return seqkern.add_layer_norm(x, 2 * x, w.shape, w, b)


def expected(x, w, b):
    return torch.nn.functional.layer_norm(x, w.shape, w, b)


def test_the_nodes_in_cpp_are_built_where_they_can_be(nodes):
    if _library.node_library() is None and any(Path(_library.__file__).parent.glob("_node-*.so")):
        pytest.skip("they were built, for another torch or another Python")
    if Path(sysconfig.get_paths()["include"], "Python.h").exists():
        assert _library.node_library() is not None
    name = norm(*tensors()).grad_fn.name()
    assert ("LayerNormNode" if nodes == "C++" else "LayerNormDirect") in name
    assert ("AddLayerNormNode" if nodes == "C++" else "AddLayerNormDirect") in added(*tensors())[0].grad_fn.name()


@pytest.mark.parametrize("nodes", ["C++"], indirect=True)  # Python's cannot be called by hand
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
    monkeypatch.setattr(ops, "backward_by_op", fail)
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


def test_compiled_backward(nodes):
    """Compiled autograd takes the node as one function that it cannot look into."""
    if nodes == "Python":
        pytest.skip("it traces Functions of Python's, and Python's node calls kernels by address")
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


def test_compiled_backward_of_other_options(nodes):
    """A graph that was made for one call is not taken for another."""
    if nodes == "Python":
        pytest.skip("it traces Functions of Python's, and Python's node calls kernels by address")
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


@pytest.mark.parametrize("nodes", ["C++"], indirect=True)  # the others leave large norms to the op
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


@pytest.mark.parametrize("nodes", ["C++"], indirect=True)
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
