"""Backends, tiers and explanations; the error rule itself; the documentation's examples."""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import seqkern
from seqkern import _attention_cuda, _explain, _library, _limits, _rnn_cuda
from seqkern._slices import CUDA_OPS, FUNCTIONS
from seqkern.testing import compare, poison, verify

ROOT = Path(__file__).parents[2]


# ---- backends and tiers -------------------------------------------------------------------------------------------


def test_use_backend_ends_with_its_block():
    before = _library._backend
    with pytest.raises(RuntimeError, match="inside"), seqkern.use_backend("reference"):
        assert _library._backend == "reference"
        raise RuntimeError("inside")
    assert _library._backend == before


def test_unknown_names_raise():
    with pytest.raises(ValueError, match="backend must be one of auto, .*got 'fast'"), seqkern.use_backend("fast"):
        pass
    with pytest.raises(ValueError, match="isa must be one of generic, .*got 'sse9'"), _library.use_cpu_isa("sse9"):
        pass
    with pytest.raises(ValueError, match="op must be one of .*got 'conv'"):
        seqkern.explain("conv")


def test_a_tier_the_machine_lacks_raises(monkeypatch):
    class OldMachine:
        seqkern_set_isa = staticmethod(lambda name: 0)
        seqkern_active_isa = seqkern_best_isa = staticmethod(lambda: b"generic")

    monkeypatch.setattr(_library, "_extension", OldMachine)
    with pytest.raises(ValueError, match="'avx512', which this machine cannot run: it has generic"):
        _library._set_cpu_isa("avx512", "isa")


def test_tiers_really_differ():
    """If forcing a tier did nothing, every tier would give the same bits."""
    x = torch.randn(64, 1000)
    results = {}
    for isa in _library.available_isas():
        with _library.use_cpu_isa(isa):
            assert _library.cpu_isa() == isa
            if isa not in _library.BF16_ISAS:  # avx512 for float32
                results[isa] = seqkern.layer_norm(x, (1000,))
    first, *others = results.values()
    assert all(not torch.equal(first, other) for other in others)


@pytest.mark.parametrize("op", FUNCTIONS)
def test_explain(op):
    choice = seqkern.explain(op, torch.randn(2, 3, 4, 8))
    tier = "avx512" if _library.cpu_isa() in _library.BF16_ISAS else _library.cpu_isa()  # nothing for float32
    assert (choice.backend, choice.kernel) == ("cpu", f"C++ {tier}")
    assert str(choice).startswith(f"{op}: C++")
    with seqkern.use_backend("reference"):
        assert seqkern.explain(op).kernel.startswith("seqkern.reference.")
    with _library.use_cpu_isa("generic"):
        assert "generic" in str(seqkern.explain(op))


# ---- CUDA C++ -----------------------------------------------------------------------------------------------------


class OnGpu:
    """As much of a CUDA tensor as the choice of a backend looks at."""

    is_cuda, device, dtype = True, torch.device("cuda", 0), torch.float32


@pytest.fixture
def gpu(monkeypatch):
    """A machine whose one GPU is of compute capability 9.0, a build for it, and what "auto" measured there."""
    fastest = {}
    monkeypatch.setattr(_library, "_present", lambda index: True)
    monkeypatch.setattr(_library, "_capability", lambda index: (9, 0))
    monkeypatch.setattr(_library, "cuda_archs", lambda: ["80", "90a"])
    monkeypatch.setattr(_library, "has_triton", lambda: True)
    monkeypatch.setattr(_library, "FASTEST", fastest)
    for cached in (_library._automatic, _library._runs_on):
        cached.cache_clear()
    yield fastest
    for cached in (_library._automatic, _library._runs_on):
        cached.cache_clear()


def test_auto_is_triton_until_measured_otherwise(gpu):
    gpu["layer_norm", 90] = "cuda"
    gpu["rnn", 100] = "cuda"
    assert _library.backend_for("layer_norm", OnGpu) == _library.backend_for("add_rms_norm", OnGpu) == "cuda"
    assert _library._in_cuda("layer_norm", OnGpu)
    for op in ("lstm", "lstm_cell", "attention"):
        assert _library.backend_for(op, OnGpu) == "triton"
    assert not _library._in_cuda("rnn", OnGpu)


def test_auto_without_triton(gpu, monkeypatch):
    monkeypatch.setattr(_library, "has_triton", lambda: False)
    for op in ("rms_norm", "attention", "lstm"):
        assert _library.backend_for(op, OnGpu) == "cuda"
    with pytest.raises(NotImplementedError, match="needs the triton package, which is not installed"):
        _library.backend_for("lstm_cell", OnGpu)


def test_a_layer_that_no_scan_serves_says_that_it_needs_triton(monkeypatch):
    monkeypatch.setattr(_library, "has_triton", lambda: False)
    monkeypatch.setattr(_library, "_executor", "loaded")
    with (
        seqkern.use_backend("cuda"),
        pytest.raises(
            NotImplementedError,
            match=r"needs the triton package, which is not installed \(none: float64 goes step by step",
        ),
    ):
        seqkern.nn.GRU(3, 4, dtype=torch.float64)(torch.ones(2, 1, 3, dtype=torch.float64))


def test_cuda_on_request(gpu):
    with seqkern.use_backend("cuda"):
        assert _library.backend_for("gru", OnGpu) == _library.backend_for("layer_norm", OnGpu) == "cuda"
        assert _library._in_cuda("rnn", OnGpu)
        for op in ("scaled_dot_product_attention", "attention", "attention_varlen", "attention_decode"):
            assert _library.backend_for(op, OnGpu) == "cuda"
        assert _library._in_cuda("attention", OnGpu)
        for op in ("lstm_cell", "gru_cell"):
            with pytest.raises(
                NotImplementedError, match=rf'{op}: it has no kernels in CUDA C\+\+; use_backend\("triton'
            ):
                _library.backend_for(op, OnGpu)
    with seqkern.use_backend("triton"):
        assert not _library._in_cuda("rnn", OnGpu)


def test_a_gpu_that_the_build_lacks_raises(gpu, monkeypatch):
    monkeypatch.setattr(_library, "_capability", lambda index: (12, 0))
    gpu["layer_norm", 120] = "cuda"
    assert _library.backend_for("layer_norm", OnGpu) == "triton"  # nothing to choose from
    words = r"kernels for 80 90a, the device is 12.0; use_backend\(\"triton\"\) runs there, or build"
    with seqkern.use_backend("cuda"), pytest.raises(NotImplementedError, match=words):
        _library.backend_for("layer_norm", OnGpu)


@pytest.mark.parametrize(
    ("arch", "served", "others"),
    [
        ("80", [(8, 0), (8, 9)], [(7, 5), (9, 0)]),
        ("90a", [(9, 0)], [(8, 9), (10, 0)]),
        ("100a", [(10, 0)], [(10, 3)]),
        ("120", [(12, 0), (12, 1)], [(10, 0), (13, 0)]),
        ("ptx90", [(9, 0), (10, 3), (11, 0), (13, 0)], [(8, 9)]),
    ],
)
def test_which_gpus_a_target_serves(arch, served, others):
    assert all(_library._serves(arch, capability) for capability in served)
    assert not any(_library._serves(arch, capability) for capability in others)


def test_the_cuda_key_chooses_at_every_call(gpu, monkeypatch):
    monkeypatch.setattr(_library, "_CUDA", {name: lambda *args, n=name: ("cuda", n, args) for name in CUDA_OPS})
    monkeypatch.setattr(_library, "_triton_launcher", lambda name: lambda *args: ("triton", name, args))
    monkeypatch.setattr(_rnn_cuda, "rnn_bwd", lambda *args: ("cuda", "rnn_bwd", args))
    norm, layer = _library._for_cuda_key("layer_norm_fwd"), _library._for_cuda_key("rnn_bwd")
    assert norm(OnGpu, 1) == ("triton", "layer_norm_fwd", (OnGpu, 1))
    with seqkern.use_backend("cuda"):
        assert norm(OnGpu, 1) == ("cuda", "layer_norm_fwd", (OnGpu, 1))
        assert layer(None, OnGpu) == ("cuda", "rnn_bwd", (None, OnGpu))
    assert layer(None, OnGpu) == ("triton", "rnn_bwd", (None, OnGpu))


@pytest.mark.parametrize("backend", ["auto", "triton", "cuda"])
@pytest.mark.filterwarnings("error")
def test_compiled_graphs_leave_the_choice_to_the_op(backend, monkeypatch):
    """The compiler sees no GPU here, so whatever looked at one while it traces would raise."""
    graphs = []
    torch._dynamo.reset()

    def keep(graph, inputs):
        graphs.append(str(graph.graph))
        return graph

    monkeypatch.setattr(_library, "_has_triton", backend != "auto")
    with seqkern.use_backend(backend), FakeTensorMode():
        x = torch.empty(2, 8, device="cuda")
        torch.compile(lambda x: seqkern.layer_norm(x, (8,)), backend=keep, fullgraph=True)(x)
    assert "torch.ops.seqkern.layer_norm_fwd.default" in graphs[0]
    torch._dynamo.reset()


ON_CUDA = {
    "layer_norm": lambda t: seqkern.layer_norm(t(4, 8), (8,), t(8), t(8)),
    "add_rms_norm": lambda t: seqkern.add_rms_norm(t(4, 8), t(4, 8), (8,), t(8), dropout_p=0.5, seed=3),
    "scaled_dot_product_attention": lambda t: seqkern.scaled_dot_product_attention(*(t(1, 2, 5, 8) for _ in range(3))),
    "attention": lambda t: seqkern.attention(*(t(1, 2, 5, 8) for _ in range(3)), causal=True, return_lse=True),
    "attention_decode": lambda t: seqkern.attention_decode(
        t(2, 2, 1, 8), t(2, 2, 7, 8), t(2, 2, 7, 8), t(2, dtype=torch.int64)
    ),
    "lstm": lambda t: seqkern.lstm(t(3, 2, 4), None, [t(20, 4), t(20, 5), t(20), t(20)], zoneout=0.1, seed=4),
    "gru_cell": lambda t: seqkern.gru_cell(t(3, 4), t(3, 5), t(15, 4), t(15, 5), t(15), t(15)),
}


@pytest.mark.parametrize("installed", [True, False], ids=["triton", "no triton"])
@pytest.mark.parametrize(
    ("op", "backend"),
    [
        (op, backend)
        for op in ON_CUDA
        for backend in ("auto", "triton", "cuda")
        if (op, backend) != ("gru_cell", "cuda")
    ],
)
def test_fake_tensors_of_a_gpu_that_is_not_here(op, backend, installed, monkeypatch):
    """They go to the fake kernels, whatever is installed: a graph for a GPU can be made on another machine."""
    monkeypatch.setattr(_library, "_present", lambda index: False)
    monkeypatch.setattr(_library, "_has_triton", installed)

    def call(device):
        return pytree.tree_leaves(ON_CUDA[op](lambda *shape, **of: torch.empty(*shape, device=device, **of)))

    with FakeTensorMode(), torch.no_grad():
        with seqkern.use_backend(backend):
            found = call("cuda")
        expected = call("cpu")
    assert [(t.shape, t.dtype, t.stride()) for t in found] == [(t.shape, t.dtype, t.stride()) for t in expected]
    assert all(t.is_cuda for t in found)


@pytest.fixture
def flag():
    """torch's flag for products of float32, put back."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    yield matmul
    matmul.fp32_precision = before


def test_the_compiler_knows_the_flag_for_tf32(flag):
    """Set by `fp32_precision` alone, after which torch refuses to be asked by the older name."""
    torch._dynamo.reset()
    found = torch.compile(lambda x: x * (2 if _attention_cuda.tf32(x) else 3), backend="eager", fullgraph=True)
    for precision, factor in (("ieee", 3), ("tf32", 2), ("ieee", 3), ("tf32", 2), ("none", 3)):
        flag.fp32_precision = precision
        assert found(torch.ones(())) == factor
        assert found(torch.ones((), dtype=torch.float16)) == 3
    torch._dynamo.reset()


def test_cuda_backend_on_cpu_tensors_is_for_the_executor(monkeypatch):
    x = torch.randn(2, 8)
    monkeypatch.setattr(_library, "_executor", "")
    with seqkern.use_backend("cuda"):
        with pytest.raises(NotImplementedError, match="layer_norm: .* host executor that SEQKERN_SIMT names"):
            seqkern.layer_norm(x, (8,))
        with pytest.raises(NotImplementedError, match="attention: .* host executor that SEQKERN_SIMT names"):
            seqkern.attention(x[None, None], x[None, None], x[None, None])
        with pytest.raises(NotImplementedError, match="gru_cell: it has no kernels in CUDA"):
            seqkern.explain("gru_cell")
    monkeypatch.setattr(_library, "_executor", "loaded")
    with seqkern.use_backend("cuda"):
        assert _library.kernel("layer_norm_fwd", x) is torch.ops.seqkern_cuda.layer_norm_fwd.default
        assert seqkern.explain("layer_norm", x).kernel == "CUDA C++, executed on the host"


def test_explain_tells_the_tier_of_a_scan(monkeypatch):
    def plan(w_hh, batch, cell, norm, backward, tier):
        assert (w_hh.shape, batch, cell, norm, tier) == ((1, 15, 5), 2, 1, False, "auto")
        return "grid: two blocks" if backward else "block: all of it"

    monkeypatch.setattr(_library, "_executor", "loaded")
    monkeypatch.setitem(_library._CUDA, "rnn_scan_plan", plan)
    x, w_ih, w_hh = torch.ones(3, 2, 7), torch.ones(15, 7), torch.ones(15, 5)
    with seqkern.use_backend("cuda"):
        reason = seqkern.explain("gru", x, w_ih, w_hh).reason
        assert "forward block: all of it; backward grid: two blocks" in reason
        assert "when it gets w_hh too" in seqkern.explain("gru", x).reason
        assert "float64 goes step by step" in seqkern.explain("lstm", x.double(), w_hh.double()).reason


def test_explain_tells_the_kernels_of_attention(monkeypatch):
    def plan(query, value_dim, backward, path):
        assert (query.shape, value_dim, path) == ((1, 2, 3, 40), 80, "mma")
        return "small tiles" if backward else "large tiles"

    monkeypatch.setattr(_library, "_executor", "loaded")
    monkeypatch.setattr(torch.ops.seqkern_cuda, "attention_plan", plan)
    query, value = torch.ones(1, 2, 3, 40), torch.ones(1, 2, 3, 80)
    with seqkern.use_backend("cuda"), _attention_cuda.use_path("mma"):
        choice = seqkern.explain("attention", query, query, value)
        assert "forward large tiles; backward small tiles" in choice.reason
        assert seqkern.explain("attention_varlen").kernel == "CUDA C++, executed on the host"
        with pytest.raises(NotImplementedError, match=r'float64; use_backend\("triton"\) runs it'):
            seqkern.explain("attention", query.double())
        with pytest.raises(NotImplementedError, match=r'1 to 256, .* use_backend\("reference"\) runs any'):
            seqkern.explain("attention", query.new_ones(1, 2, 3, 257))
    words = "path must be one of auto, mma, hopper, got 'wgmma'"
    with pytest.raises(ValueError, match=words), _attention_cuda.use_path("wgmma"):
        pass


def test_explain_tells_the_launches_in_triton():
    """In a process of its own, where Triton's kernels are interpreted: of every op the very launches of its plan."""
    program = """
import torch, seqkern
from seqkern._slices import FUNCTIONS
from seqkern.kernels import _replay
q, x, h = torch.randn(1, 2, 70, 64), torch.randn(5, 3, 40), torch.randn(1, 3, 24)
packed, matrix = torch.randn(70, 2, 64), torch.randn(3, 40)
tensors = {"attention_varlen": (packed,) * 3, "lstm": (x, h), "gru": (x, h), "rnn_tanh": (x, h), "rnn_relu": (x, h)}
tensors |= {"additive_rnn": (x, h), "interpolated_rnn": (x, h)}
tensors |= {f"{op}_cell": (matrix, h[0]) for op in ("lstm", "gru", "rnn_tanh", "rnn_relu")}
for op in ("attention", "scaled_dot_product_attention", "attention_decode"):
    tensors[op] = (q,) * 3
with seqkern.use_backend("triton"):
    for op in FUNCTIONS:
        print(op, "|", seqkern.explain(op, *tensors.get(op, (x, x))).reason)
    assert not _replay._KEPT
    with _replay.noted() as launches:
        seqkern.attention(q, q, q)
    print(*launches)
    print(seqkern.explain("lstm", x, torch.randn(1, 3, 1000)).reason)
"""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    *lines, launched, by_steps = result.stdout.splitlines()
    told = dict(line.split(" | ") for line in lines)
    assert told.keys() == FUNCTIONS.keys()
    assert launched in told["attention"]
    for op, reason in told.items():
        tiles = re.search(r"programs of BLOCK_\w+ \d+.* \d+ warps|all steps in one launch.* BLOCK_B 16", reason)
        assert tiles, (op, reason)
    assert all(f"attention_{name}: " in told["attention"] for name in ("forward", "grad_query", "grad_key_value"))
    assert "layer_norm_forward: " in told["layer_norm"]
    assert "layer_norm_backward: " in told["add_rms_norm"]
    assert by_steps.endswith("a product and a launch a step, forward and backward")


def test_limits_are_the_same_in_both_languages():
    text = (ROOT / "csrc" / "attention" / "limits.h").read_text()
    found = {name: int(number) for name, number in re.findall(r"kMost(\w+) = (\d+);", text)}
    assert found == {"HeadDim": _limits.MOST_HEAD_DIM, "DecodeQueries": _limits.MOST_DECODE_QUERIES}


def test_the_executor_is_a_library():
    result = subprocess.run(
        [sys.executable, "-c", "import seqkern"],
        cwd=ROOT, env=os.environ | {"SEQKERN_SIMT": "/nowhere.so"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "ValueError: SEQKERN_SIMT must name the library that tests/simt builds, got '/nowhere.so'" in result.stderr


@pytest.mark.parametrize(
    ("file", "backends"),
    [("bench_rnn", {"triton", "cuda"}), ("bench_attention", {"triton", "cuda", "cuda mma", "cuda hopper"})],
)
def test_benchmarks_run_every_backend_of_a_gpu(file, backends):
    program = f"""
import pytest, sys, torch
from seqkern import _attention_cuda, _explain, _library
_library.has_triton = lambda: True
_library._runs_on = lambda index: True
_library._capability = lambda index: (9, 0)
torch.cuda.current_device = lambda: 0
sys.exit(pytest.main(["--collect-only", "-q", "--device", "cuda", "benchmarks/{file}.py"]))
"""
    collected = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    cases = re.findall(r"::\w+\[(.*)\]", collected.stdout)
    found = [re.search(r"triton|cuda( \w+)?", case) for case in cases]
    assert {match and match[0] for match in found} == backends


# ---- memory -------------------------------------------------------------------------------------------------------


pooled = pytest.mark.skipif(
    torch.__version__ < "2.11", reason="torch 2.10 does not tell a library on its stable ABI when a tensor dies"
)


@pooled
def test_large_results_keep_their_memory_for_one_another():
    x = torch.randn(1100, 1024)  # 4.5 MB: three huge pages
    seqkern.release_memory()
    output = seqkern.layer_norm(x, (1024,))
    address = output.data_ptr()
    view = output[5:6]
    del output
    assert _library.waiting_memory() == 0  # the view still holds it
    del view
    assert _library.waiting_memory() == 6 << 20
    again = seqkern.layer_norm(x, (1024,))
    assert (again.data_ptr(), _library.waiting_memory()) == (address, 0)
    another = seqkern.layer_norm(x, (1024,))
    assert another.data_ptr() != address
    assert torch.equal(again, another)
    assert again.numpy().sum() == another.numpy().sum()
    del again, another
    seqkern.release_memory()
    assert _library.waiting_memory() == 0


@pooled
def test_the_limit_on_waiting_memory():
    x = torch.randn(2048, 1024)
    try:
        _library._set_cache_megabytes("12")
        outputs = [seqkern.layer_norm(x, (1024,)) for _ in range(3)]
        del outputs
        assert _library.waiting_memory() == 8 << 20
        _library._set_cache_megabytes("0")
        del x
        assert _library.waiting_memory() == 0
    finally:
        _library._set_cache_megabytes("512")
    with pytest.raises(ValueError, match="SEQKERN_CACHE_MB must be a whole number of megabytes, got '-1'"):
        _library._set_cache_megabytes("-1")


@pytest.mark.parametrize("tier", _library.BF16_ISAS)
def test_explain_tells_what_tiers_of_bfloat16_are_for(tier):
    if tier not in _library.available_isas():
        pytest.skip(f"this machine has no {tier}")
    with _library.use_cpu_isa(tier):
        for op in ("attention", "lstm", "linear_cross_entropy"):
            assert seqkern.explain(op, torch.ones(1, 1, 1, 1, dtype=torch.bfloat16)).kernel == f"C++ {tier}"
        for op, dtype in (("attention", torch.float16), ("layer_norm", torch.bfloat16), ("lstm_cell", torch.bfloat16)):
            choice = seqkern.explain(op, torch.ones(1, 1, 1, 1, dtype=dtype))
            assert choice.kernel == "C++ avx512"
            assert "attention, recurrent layers and linear_cross_entropy in bfloat16 only" in choice.reason


def test_explain_takes_what_the_op_takes():
    with pytest.raises(TypeError, match="layer_norm: tensors must be float64.*got torch.int64"):
        seqkern.explain("layer_norm", torch.ones(4, 8, dtype=torch.int64))


def test_explain_tells_of_a_copy():
    assert "copied" in str(seqkern.explain("layer_norm", torch.randn(4, 8).t()))


def test_choices_for_the_same_reason_are_told_together():
    choices = [_explain.Choice(op, "cpu", kernel, reason) for op, kernel, reason in
               (("a", "C++", "x"), ("b", "C++", "y"), ("c", "C++", "x"), ("d", "Triton", "x"))]  # fmt: skip
    assert _explain.by_reason(choices) == [(["a", "c"], "C++", "x"), (["b"], "C++", "y"), (["d"], "Triton", "x")]


def test_command_line_names_every_op():
    environment = os.environ | {"SEQKERN_CACHE_MB": "77"}
    output = subprocess.run(
        [sys.executable, "-m", "seqkern"], cwd=ROOT, capture_output=True, text=True, check=True, env=environment
    ).stdout
    assert re.search(r"^set +.*SEQKERN_CACHE_MB=77", output, re.MULTILINE)
    assert str(Path(seqkern.__file__).parent) in output
    assert platform.platform() in output
    float32, _, bfloat16 = output.partition("cpu tensors, bfloat16, where another kernel runs:\n")

    def groups(section: str) -> list[tuple[str, list[str]]]:
        found = re.findall(r"^  (\S.*)\n((?: {6}.*\n)+)", section, re.MULTILINE)
        return [(reason, ops.replace("\n", " ").replace(" ", "").split(",")) for reason, ops in found]

    # Every op once, and every reason once.
    assert sorted(op for _, ops in groups(float32) for op in ops) == sorted(FUNCTIONS)
    for section in (float32, bfloat16):
        reasons = [reason for reason, _ in groups(section)]
        assert len(set(reasons)) == len(reasons)
    for reason, ops in groups(float32):
        for op in ops:
            choice = seqkern.explain(op)
            assert reason == f"{choice.kernel}: {choice.reason}"
    own = [op for _, ops in groups(bfloat16) for op in ops]
    assert own == (
        [op for op, slice in FUNCTIONS.items() if slice.own_bf16] if _library.cpu_isa() in _library.BF16_ISAS else []
    )
    assert torch.__version__ in output
    assert re.search(rf"^seqkern +{re.escape(seqkern.__version__)}$", output, re.MULTILINE)


@pytest.mark.parametrize(
    ("option", "code", "told"),
    [
        ("--version", 0, f"seqkern {seqkern.__version__}"),
        ("--help", 0, "which kernel runs"),
        ("--verison", 2, "usage:"),
    ],
)
def test_command_line_options(option, code, told):
    result = subprocess.run([sys.executable, "-m", "seqkern", option], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == code
    assert told in result.stdout + result.stderr


# ---- torch.compile around a transform -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op",
    [
        lambda x: seqkern.layer_norm(x, (8,)),
        lambda x: seqkern.add_rms_norm(x, x.sin(), (8,))[0],
        lambda x: seqkern.scaled_dot_product_attention(x, x, x, is_causal=True),
        lambda x: seqkern.lstm(x[:, None], None, [torch.ones(32, 8), torch.ones(32, 8)])[0],
    ],
    ids=["layer_norm", "add_rms_norm", "attention", "lstm"],
)
def test_compiled_transforms_keep_their_derivatives(op):
    """The compiler drops the backward of a Function inside func.grad: the ops refuse, and eager takes over."""
    x = torch.randn(3, 8)
    torch._dynamo.reset()

    def loss(x):
        return op(x).sin().sum() + op(x.cos()).sum()

    gradient = torch.func.grad(loss)
    if _func_grad_may_break():
        torch.testing.assert_close(torch.compile(gradient, backend="eager")(x), gradient(x))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="seqkern ops inside a torch.func transform"):
        torch.compile(gradient, backend="eager", fullgraph=True)(x)


def _func_grad_may_break() -> bool:
    """Whether the compiler takes a break of the graph inside func.grad: torch 2.11 fails, torch alone as well."""

    def broken(x):
        torch._dynamo.graph_break()
        return x.sin().sum()

    gradient, x = torch.func.grad(broken), torch.randn(3)
    try:
        right = torch.equal(torch.compile(gradient, backend="eager")(x), gradient(x))
    except Exception:  # an internal one, of another kind in every version
        right = False
    assert right or torch.__version__ < "2.12"
    return right


def test_compiled_forward_mode_keeps_its_tangent():
    def function(x):
        return seqkern.layer_norm(x, (8,)).sin()

    x, direction = torch.randn(3, 8), torch.randn(3, 8)
    expected = torch.func.jvp(function, (x,), (direction,))[1]
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, direction)
        output = torch.compile(function, backend="eager")(dual)
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(output).tangent, expected)


# ---- the error rule -----------------------------------------------------------------------------------------------


def test_rule_accepts_what_torch_achieves_and_rejects_worse():
    oracle = torch.randn(1000, dtype=torch.float64)
    rounded = oracle.float()
    assert compare(rounded, rounded, oracle).passed
    off = rounded.clone()
    off[500] += 1e-5
    assert not compare(off, rounded, oracle).passed
    assert compare(off, off, oracle).passed


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_rule_rejects_numbers_that_are_none(wrong):
    oracle = torch.randn(10, dtype=torch.float64)
    actual = oracle.float()
    actual[3] = wrong
    assert not compare(actual, oracle.float(), oracle).passed


def test_rule_wants_infinities_where_the_oracle_has_them():
    oracle = torch.tensor([1.0, float("-inf")], dtype=torch.float64)
    assert compare(oracle.float(), oracle.float(), oracle).passed
    assert not compare(torch.tensor([1.0, -3e38]), oracle.float(), oracle).passed
    assert not compare(torch.tensor([1.0, float("nan")]), oracle.float(), oracle).passed


def test_rule_wants_equal_shapes():
    with pytest.raises(ValueError, match="shapes differ"):
        compare(torch.ones(1), torch.ones(2), torch.ones(2, dtype=torch.float64))


def test_poison_fills_new_memory():
    with poison():
        assert torch.empty(1000).isnan().all()


@pytest.mark.parametrize("op", seqkern.testing.CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_standard_cases_pass(op, dtype, passes):
    passes(verify(op, dtype))


def test_outputs_have_names():
    expected = {"attention": ["output", "lse"], "add_rms_norm": ["output", "sum"], "gru": ["output", "h_n"]}
    expected |= {"lstm": ["output", "h_n", "c_n"], "lstm_cell": ["h", "c"], "attention_decode": ["output"]}
    for op, names in expected.items():
        reports = verify(op, torch.float32)
        assert [report.name for report in reports if " grad " not in report.name] == [f"{op} {name}" for name in names]
        assert (len(reports) > len(names)) == (op != "attention_decode")


def test_outputs_without_names_are_numbered():
    def both(x):
        return x.sin(), x.cos()

    case = seqkern.testing.Case(lambda g: {"x": torch.randn(5, dtype=torch.float64, generator=g)}, both, both, both)
    reports = seqkern.testing.check_case(case, torch.float32)
    assert [report.name for report in reports] == ["output 0", "output 1", "grad x"]


def test_decoding_that_reads_beyond_the_cache_fails(monkeypatch):
    attention_decode = seqkern.attention_decode
    monkeypatch.setattr(seqkern, "attention_decode", lambda q, k, v, n: attention_decode(q, k, v, n + 1))
    assert not verify("attention_decode", torch.float32)[0].passed


def test_every_public_function_with_kernels_is_verified():
    assert set(FUNCTIONS) <= set(seqkern.__all__)
    called_otherwise = {"scaled_dot_product_attention", "sample"}  # `attention`; `filter_logits`, and a draw
    assert set(FUNCTIONS) - called_otherwise <= set(seqkern.testing.CASES)


def test_verify_rejects_unknown_ops():
    with pytest.raises(ValueError, match="op must be one of"):
        verify("conv", torch.float32)
    with pytest.raises(TypeError, match=r"dtype must be a torch.dtype, got 'float32'"):
        verify("layer_norm", "float32")


# ---- documentation ------------------------------------------------------------------------------------------------

MODULES = [
    name
    for _, name, _ in pkgutil.walk_packages(seqkern.__path__, "seqkern.")
    if not name.startswith("seqkern.kernels") and name not in ("seqkern.__main__", "seqkern._C")
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    assert doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS).failed == 0


BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = [str(path.relative_to(ROOT)) for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))]


@pytest.mark.parametrize("page", [page for page in PAGES if BLOCK.search((ROOT / page).read_text())])
def test_examples_of_the_pages_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in BLOCK.findall((ROOT / page).read_text()):
        exec(compile(block, page, "exec"), {})


@pytest.mark.parametrize("name", seqkern.__all__)
def test_public_functions_are_documented(name):
    member = getattr(seqkern, name)
    if callable(member):
        assert "Raises:" in member.__doc__
        assert "Example:" in member.__doc__
