"""seqkern's layers under the kernels package: marked classes and functions, and a whole model of transformers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqkern

pytest.importorskip("kernels.layer")  # not a folder named kernels
package = pytest.importorskip("kernels")
integration = pytest.importorskip("seqkern.integrations.kernels")


class LlamaNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.variance_epsilon = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)).to(
            x.dtype
        )


class GemmaNorm(LlamaNorm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (wide * (1 + self.weight.float())).to(x.dtype)


class OtherNorm(LlamaNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.variance_epsilon)


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotate_neighbours(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def marked_function(partner: Any, sign: float = 1.0) -> Any:
    @package.use_kernel_forward_from_hub("rotary_pos_emb")
    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sign * sin.unsqueeze(unsqueeze_dim)
        return q * cos + partner(q) * sin, k * cos + partner(k) * sin

    return apply_rotary_pos_emb


def attention_of(function: Any) -> nn.Module:
    @package.use_kernelized_func(function)
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.Linear(2, 2)

        def forward(self, *tensors: Tensor, **options: Any) -> Any:
            return function(*tensors, **options)

    return Attention()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The ops of seqkern that layers called."""
    made: list[str] = []
    for name in ("rms_norm", "rope"):
        op = getattr(integration, name)
        monkeypatch.setattr(integration, name, lambda *a, _op=op, _n=name, **k: (made.append(_n), _op(*a, **k))[1])
    return made  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [LlamaNorm, GemmaNorm], ids=lambda k: k.__name__)
def test_norms_have_the_bits_of_their_model(kind, dtype, calls):
    marked = package.use_kernel_forward_from_hub("RMSNorm")(type("Marked", (kind,), {}))
    model = nn.Sequential(marked(64), marked(64)).to(dtype)
    x = torch.randn(5, 64).to(dtype)
    expected = [m.forward(x) for m in model]
    assert integration.kernelize(model, device="cpu") is model
    calls.clear()
    for module, exact in zip(model, expected, strict=True):  # float32's sums have an order, 16 bits round it away
        torch.testing.assert_close(module(x), exact, rtol=1e-6 if dtype == torch.float32 else 0, atol=0)
    assert calls == ["rms_norm"] * 2
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert torch.equal(model[0](x.double()), type(model[0]).forward(model[0], x.double()))  # a dtype of nobody's


def test_a_norm_that_is_none_keeps_its_forward(calls):
    marked = package.use_kernel_forward_from_hub("RMSNorm")(type("Strange", (OtherNorm,), {}))
    model = nn.Sequential(marked(16))
    x = torch.randn(3, 16)
    expected = model(x)
    integration.kernelize(model)
    calls.clear()
    assert torch.equal(model(x), expected)
    assert calls == []


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("partner", [rotate_half, rotate_neighbours], ids=lambda p: p.__name__)
def test_rotary_embeddings(partner, dtype, unsqueeze_dim, calls):
    """With tables of unrelated numbers, so that nothing about them is taken for granted."""
    model = attention_of(marked_function(partner))
    q, k = (torch.randn(2, heads, 7, 16).transpose(1, unsqueeze_dim).to(dtype).requires_grad_() for heads in (4, 2))
    cos, sin = (torch.randn(2, 7, 16).to(dtype) for _ in range(2))
    expected = model(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    grads = torch.autograd.grad(sum(t.sum() for t in expected), (q, k))
    integration.kernelize(model)
    calls.clear()
    found = model(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    assert calls == ["rope"]
    tolerance = {"rtol": 3e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(found, expected, **tolerance)
    torch.testing.assert_close(torch.autograd.grad(sum(t.sum() for t in found), (q, k)), grads, **tolerance)
    with pytest.raises(RuntimeError, match="must match the size"):  # as the model's own formula says
        model(q, k, cos[..., :8], sin[..., :8])


def test_a_rotation_that_is_none_keeps_its_forward(calls):
    model = attention_of(marked_function(rotate_half, sign=-1.0))
    q, k, cos, sin = (torch.randn(shape) for shape in ((1, 2, 3, 8), (1, 2, 3, 8), (1, 3, 8), (1, 3, 8)))
    expected = model(q, k, cos, sin)
    integration.kernelize(model)
    calls.clear()
    assert torch.equal(model(q, k, cos, sin)[0], expected[0])
    assert calls == []


@pytest.mark.parametrize("mode", ["TRAINING", "INFERENCE", "TORCH_COMPILE"])
def test_the_mapping_in_the_packages_own_calls(mode, calls):
    marked = package.use_kernel_forward_from_hub("RMSNorm")(type("Own", (LlamaNorm,), {}))
    model = nn.Sequential(marked(32))
    x = torch.randn(4, 32)
    expected = model(x)
    modes = package.Mode.INFERENCE if mode == "INFERENCE" else package.Mode.TRAINING
    modes = modes | package.Mode.TORCH_COMPILE if mode == "TORCH_COMPILE" else modes
    with package.use_kernel_mapping(integration.mapping("RMSNorm"), inherit_mapping=False):
        package.kernelize(model, mode=modes, device="cpu", use_fallback=False)
    assert torch.equal(model(x), expected)
    assert calls[-1:] == ["rms_norm"]


def test_compiled_in_one_graph():
    marked = package.use_kernel_forward_from_hub("RMSNorm")(type("Compiled", (LlamaNorm,), {}))
    model = nn.Sequential(marked(32))
    expected = model(torch.ones(4, 32))
    integration.kernelize(model)
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert torch.equal(compiled(torch.ones(4, 32)), expected)
    assert "seqkern" in graphs[0].print_readable(print_output=False)


TRANSFORMERS = """
import torch
import transformers.utils.import_utils as versions
versions.is_kernels_available = lambda *args, **options: True  # of any version: the decorators are the package's
import transformers.utils as utils
utils.is_kernels_available = versions.is_kernels_available
from transformers import {name}Config, {name}ForCausalLM
from seqkern.integrations import kernels as integration

counts = {{"rms_norm": 0, "rope": 0}}
def counted(name, op):
    def call(*args, **options):
        counts[name] += 1
        return op(*args, **options)
    return call
torch.manual_seed(0)
config = {name}Config(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                      head_dim=8, intermediate_size=40)
model = {name}ForCausalLM(config)
tokens = torch.randint(99, (2, 17))
theirs = model(tokens, labels=tokens)
theirs.loss.backward()
grads = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
integration.kernelize(model)
integration.rms_norm, integration.rope = counted("rms_norm", integration.rms_norm), counted("rope", integration.rope)
ours = model(tokens, labels=tokens)
ours.loss.backward()
assert counts == {counts}, counts
torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-5)
for p, grad in zip(model.parameters(), grads, strict=True):
    torch.testing.assert_close(p.grad, grad, rtol=1e-3, atol=1e-5)
"""


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("Llama", {"rms_norm": 5, "rope": 2}),
        ("Qwen3", {"rms_norm": 9, "rope": 2}),
    ],
)
def test_a_model_of_transformers(name, counts):
    """In a process of its own: its classes are marked when they are imported, if it likes the package's version."""
    pytest.importorskip("transformers")
    code = TRANSFORMERS.format(name=name, counts=counts)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def test_errors_say_what_came():
    with pytest.raises(TypeError, match="kernelize: model must be a torch.nn.Module, got str"):
        integration.kernelize("model")
    with pytest.raises(ValueError, match="nothing in Linear is marked as RMSNorm or rotary_pos_emb"):
        integration.kernelize(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="nothing in LSTM is marked as RMSNorm: classes are"):
        integration.kernelize(seqkern.nn.LSTM(2, 2), "RMSNorm")
    with pytest.raises(ValueError, match="names must be of .* got 'LayerNorm'"):
        integration.mapping("LayerNorm")
    with pytest.raises(ValueError, match="device must be .* got 'xpu'"):
        integration.kernelize(nn.Linear(2, 2), device="xpu")
