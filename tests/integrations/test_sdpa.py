"""torch's scaled_dot_product_attention on seqkern: who is reached, what torch keeps, and that it is all undone."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention  # by name, before anything is enabled

import seqkern
from seqkern.integrations import sdpa


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    yield
    if sdpa.enabled():
        sdpa.disable()


def make(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*(shape or (2, 4, 6, 8)), dtype=dtype, requires_grad=grad) for _ in range(3)]


def kernels(call) -> set[str]:
    """The ops of seqkern that ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {event.key for event in profile.key_averages() if "seqkern" in event.key}


def masks() -> dict[str, Tensor | None]:
    torch.manual_seed(1)
    visible = torch.rand(2, 1, 6, 6) < 0.5
    visible[..., 0] = True
    return {"none": None, "bool": visible, "float": torch.randn(4, 6, 6), "row": visible[:, :, :1]}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", masks())
def test_outputs_and_gradients_are_seqkerns(mask: str, dtype: torch.dtype) -> None:
    attn_mask = masks()[mask]
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.to(dtype).requires_grad_()
    tensors = make(dtype=dtype, grad=True)
    wanted = tensors if attn_mask is None or not attn_mask.requires_grad else [*tensors, attn_mask]
    expected = seqkern.scaled_dot_product_attention(*tensors, attn_mask)
    expected_grads = torch.autograd.grad(expected.sum(), wanted)
    with sdpa.enable() as enabled:
        found = scaled_dot_product_attention(*tensors, attn_mask)
        grads = torch.autograd.grad(found.sum(), wanted)
    assert enabled.calls == {"seqkern": 1}
    assert torch.equal(found, expected)
    for x, y in zip(grads, expected_grads, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("arguments", [{"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True}])
def test_arguments_mean_what_torchs_mean(arguments) -> None:
    q, k, v = make(2, 4, 6, 8, dtype=torch.float64)
    k, v = (t[:, :2, :5] for t in (k, v)) if "enable_gqa" in arguments else (k[:, :, :5], v[:, :, :5])
    expected = scaled_dot_product_attention(q, k, v, **arguments)
    with sdpa.enable() as enabled:
        found = scaled_dot_product_attention(q, k, v, **arguments)
    assert enabled.calls == {"seqkern": 1}
    assert torch.allclose(found, expected, atol=1e-12)


def test_every_mode_of_autograd() -> None:
    q, k, v = make(grad=True)
    with sdpa.enable() as enabled:
        with torch.no_grad():
            scaled_dot_product_attention(q, k, v)
        with torch.inference_mode():
            scaled_dot_product_attention(*make())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
        first = torch.autograd.grad(scaled_dot_product_attention(q, k, v).sum(), q, create_graph=True)[0]
        first.sum().backward()  # a second derivative
        assert enabled.calls == {"seqkern": 4}


def test_modules_of_torch() -> None:
    x = torch.randn(2, 5, 16)
    attention = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    with torch.no_grad():
        expected = attention(x, x, x, need_weights=False)[0], encoder(x)
        with sdpa.enable() as enabled:
            found = attention(x, x, x, need_weights=False)[0], encoder(x)
            assert enabled.calls == {"seqkern": 3}
            assert "seqkern::attention_fwd" in kernels(lambda: encoder(x)) or seqkern._direct.fast()
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code(backend: str) -> None:
    q, k, v = make(grad=True)
    torch._dynamo.reset()
    expected = torch.autograd.grad(seqkern.scaled_dot_product_attention(q, k, v, is_causal=True).sum(), (q, k, v))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True).sum()

    with sdpa.enable() as enabled:
        out = torch.compile(call, fullgraph=True, backend=backend)(q, k, v)
        grads = torch.autograd.grad(out, (q, k, v))
        assert enabled.calls["seqkern"]
    for x, y in zip(grads, expected, strict=True):
        assert torch.allclose(x, y, atol=1e-6)
    torch._dynamo.reset()


def test_what_is_left_to_torch() -> None:
    q, k, v = make()
    with sdpa.enable() as enabled:
        with sdpa_kernel(SDPBackend.MATH):
            scaled_dot_product_attention(q, k, v)
        assert enabled.calls["sdpa_kernel without a fused backend"] == 1
        torch.func.grad(lambda q: scaled_dot_product_attention(q, k, v).sum())(q)
        assert enabled.calls["a transform of torch.func"] == 1
        batched = torch.vmap(lambda q: scaled_dot_product_attention(q, k, v))(torch.stack([q, q]))
        assert torch.allclose(batched[0], scaled_dot_product_attention(q, k, v), atol=1e-6)
        with pytest.raises(RuntimeError):
            scaled_dot_product_attention(q.int(), k.int(), v.int())
        assert enabled.calls["torch.int32"] == 1
        with pytest.raises(RuntimeError):
            scaled_dot_product_attention(q.double(), k, v)
        nested = [torch.nested.as_nested_tensor([t[0], t[1, :, :3]], layout=torch.strided) for t in (q, k, v)]
        scaled_dot_product_attention(*nested)  # another dispatch key


class Subclass(Tensor):
    pass


def test_a_tensor_subclass_is_left_to_torch() -> None:
    tensors = [t.as_subclass(Subclass) for t in make()]
    expected = scaled_dot_product_attention(*tensors)
    with sdpa.enable() as enabled:
        found = scaled_dot_product_attention(*tensors)
    assert type(found) is Subclass
    assert torch.equal(found, expected)
    assert enabled.calls == {"a Subclass": 1}


def test_a_query_that_sees_nothing() -> None:
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[2] = False
    with sdpa.enable():
        out = scaled_dot_product_attention(*make(), mask)
    assert not out[:, :, 2].any()
    assert out.isfinite().all()


def test_dropout_follows_the_seed() -> None:
    with sdpa.enable():
        torch.manual_seed(3)
        first = scaled_dot_product_attention(*make(), dropout_p=0.5)
        second = scaled_dot_product_attention(*make(), dropout_p=0.5)
        torch.manual_seed(3)
    assert torch.equal(first, second)  # make() sets the seed
    assert (first - scaled_dot_product_attention(*make())).abs().max() > 0.1


def test_undone_after_a_failure_and_after_disable() -> None:
    q, k, v = make()
    before = scaled_dot_product_attention(q, k, v)
    with pytest.raises(ZeroDivisionError), sdpa.enable():
        raise ZeroDivisionError
    sdpa.enable()
    sdpa.disable()
    assert sdpa.enabled() is None
    assert torch.equal(scaled_dot_product_attention(q, k, v), before)
    assert not kernels(lambda: scaled_dot_product_attention(q, k, v))
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::scaled_dot_product_attention", "AutogradCPU")


def test_a_fast_path_that_was_off_stays_off() -> None:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa.enable():
            pass
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_wrong_use() -> None:
    with pytest.raises(RuntimeError, match="not enabled"):
        sdpa.disable()
    with pytest.raises(ValueError, match="must be of cpu, cuda, got 'mps'"):
        sdpa.enable("mps")
    with sdpa.enable(), pytest.raises(RuntimeError, match="enabled already, for cpu"):
        sdpa.enable("cuda")
    with sdpa.enable() as enabled:
        sdpa.disable()  # inside: the end of the block has nothing to do
    assert enabled is not sdpa.enabled()


def test_one_of_many_threads_enables() -> None:
    outcomes = []

    def enable() -> None:
        try:
            sdpa.enable()
            outcomes.append("enabled")
        except RuntimeError:
            outcomes.append("refused")

    threads = [threading.Thread(target=enable) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["enabled"] + ["refused"] * 7
