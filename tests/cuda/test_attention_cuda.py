"""What users call, with attention's kernels in CUDA C++, in the host executor (tests/simt).

Every `check_*` runs on a device: "cpu" in a process whose CPU tensors stand for the GPU's memory. The launchers are
asked what those of the Triton kernels are asked too: test_attention_triton.py has the cases and the formula. The same
checks on a GPU, and those that need one: test_attention_gpu.py.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_checks import checks_of, run_words
from torch import Tensor

import seqkern
from seqkern.testing import assert_passed, attention_case, check_case
from seqkern.testing import attention_calls as calls
from seqkern.testing.attention_calls import CASES, sample

HERE = Path(__file__)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Of hopper/test_flash_attn.py in FlashAttention-3: lengths of queries and of keys.
LENGTHS = [
    (1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128), (128, 217), (113, 211),
    (108, 256), (256, 512), (384, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023), (4096, 4096),
    (4224, 4224),
]  # fmt: skip


def qkv(queries: int, keys: int, device: str = "cpu", dtype: torch.dtype = torch.float32, **sizes: int) -> list[Tensor]:
    heads, dim = sizes.get("heads", 2), sizes.get("dim", 16)
    generator = torch.Generator().manual_seed(queries * 1009 + keys)
    shapes = [(2, heads, queries, dim)] + [(2, sizes.get("kv_heads", heads), keys, dim)] * 2
    return [torch.randn(shape, generator=generator).to(dtype).to(device) for shape in shapes]


def everything(function: Callable[..., Any], tensors: dict[str, Tensor]) -> list[Tensor]:
    """Output, log-sum-exp, and the gradient of every floating-point tensor."""
    leaves = {n: t.detach().requires_grad_(t.is_floating_point()) for n, t in tensors.items()}
    torch.manual_seed(11)
    out, lse = function(**leaves, return_lse=True)
    wanted = [t for t in leaves.values() if t.requires_grad]
    grads = torch.autograd.grad((out, lse), wanted, (torch.cos(out.detach()), torch.sin(lse.detach())))
    return [out.detach(), lse.detach(), *grads]


def moved(t: Tensor, device: str) -> Tensor:
    """On the device with its strides, at its place in memory."""
    memory = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()).to(device, copy=True)
    return memory.as_strided(t.shape, t.stride(), t.storage_offset())


def both(function: Callable[..., Any], tensors: dict[str, Tensor], device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """The same by the kernels in CUDA C++ and by those for the CPU."""
    with seqkern.use_backend("cuda"):
        ours = everything(function, {name: moved(t, device) for name, t in tensors.items()})
    with seqkern.use_backend("cpu"):
        right = everything(function, tensors)
    return zip((t.cpu() for t in ours), right, strict=True)


# ---- numbers -------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"queries": 70, "keys": 90, "head_dim": 40, "value_dim": 24},
    "upper left": {"queries": 70, "keys": 50, "causal_align": "upper_left", "kv_heads": 1},
    "full": {"queries": 66, "keys": 130, "causal": False, "head_dim": 72},
    "wide": {"queries": 20, "keys": 37, "head_dim": 130, "value_dim": 256, "heads": 1},
    "window": {"queries": 130, "window": (20, 0), "head_dim": 32},
    "lengths": {"queries": 9, "keys": 70, "batch": 2, "lengths": (70, 13), "head_dim": 16},
    "mask": {"queries": 33, "keys": 70, "mask": "added", "causal": False, "head_dim": 16},
    "bool mask": {"queries": 33, "keys": 70, "mask": "bool", "mask_shape": (33, 70), "head_dim": 16},
    "slopes": {"queries": 40, "slopes": "own", "head_dim": 16},
    "softcap": {"queries": 40, "softcap": 3.0, "head_dim": 16},
    "sinks": {"queries": 40, "sinks": True, "head_dim": 16},
    "dropout": {"queries": 40, "keys": 70, "dropout_p": 0.3, "head_dim": 16, "heads": 4, "kv_heads": 2},
    "packed": {"packed": [(5, 9), (33, 70), (1, 1)], "head_dim": 16},
}
OPTIONS["all"] = {name: v for n in OPTIONS for name, v in OPTIONS[n].items() if name not in ("packed", "mask_shape")}
OPTIONS["all"] |= {"queries": 40, "keys": 70, "mask": "added", "head_dim": 24, "value_dim": 40}


def by_the_rule(device: str, pairs: Iterable[tuple[str, torch.dtype]]) -> None:
    with seqkern.use_backend("cuda"):
        for name, dtype in pairs:
            case = attention_case(**OPTIONS[name])
            assert_passed(check_case(case, dtype, device=device), name, dtype)


def check_error_rule(device: str) -> None:
    """Every option, outputs and all gradients, by FlashAttention-3's rule."""
    by_the_rule(device, zip(OPTIONS, itertools.cycle((torch.bfloat16, *FLOATS))))


def check_error_rule_everywhere(device: str) -> None:
    by_the_rule(device, itertools.product(OPTIONS, FLOATS))


def launchers(device: str, names: list[str], seeds: range) -> None:
    """The cases of the Triton kernels; what is float64 there is float32 here."""
    found = [(name, CASES[name], 0) for name in names]
    found += [(f"sample {seed}", sample(seed), seed) for seed in seeds]
    for name, case, seed in found:
        case = replace(case, device=device, kernels="seqkern._attention_cuda")
        if case.dtype in (torch.float32, torch.float64):
            # 0.9 dropped: products of tf32, times ten
            case = replace(case, dtype=torch.float32, slack=3.0 if case.dropout_p == 0.9 else 1.0)
        try:
            calls.check(case, seed)
        except BaseException:
            print(name, case, flush=True)
            raise


def check_launchers(device: str) -> None:
    quick = ["window", "packed", "mask shared by packed sequences", "one query sees one key", "any scale", "everything"]
    launchers(device, quick, range(2000, 2004))


def check_launchers_everywhere(device: str) -> None:
    launchers(device, list(CASES), range(2000, 2040))
    calls.sequences_apart(device, "seqkern._attention_cuda")
    calls.most_negative_numbers(device, "seqkern._attention_cuda")


def lengths_list(device: str, pairs: list[tuple[int, int]], *dims: int) -> None:
    with seqkern.use_backend("cuda"):
        for (queries, keys), dim, causal in itertools.product(pairs, dims, (True, False)):
            size = {"queries": queries, "keys": keys, "head_dim": dim, "heads": 2, "kv_heads": 1, "causal": causal}
            for dtype in (torch.bfloat16, torch.float16)[: 1 if device == "cpu" else 2]:
                assert_passed(check_case(attention_case(**size), dtype, device=device), size, dtype)


def check_hidden_tiles(device: str) -> None:
    calls.hidden_tiles(device, "seqkern._attention_cuda")


def check_lengths(device: str) -> None:
    """FlashAttention-3's list, the lengths below 240 with tiny heads."""
    lengths_list(device, [pair for pair in LENGTHS if max(pair) < 240], 16)


def check_unseen_rows(device: str) -> None:
    """Rows that see nothing, whole tiles of them: 0, -inf, and no gradient. Rows whose log-sum-exp is below -88.7."""
    q, k, v = (t.requires_grad_() for t in qkv(150, 20, device))
    with seqkern.use_backend("cuda"):
        out, lse = seqkern.attention(q, k, v, causal=True, return_lse=True)  # the first 130 see none
        grads = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))
        assert (out[:, :, :130] == 0).all()
        assert lse[:, :, :130].isneginf().all()
        assert (grads[0][:, :, :130] == 0).all()
        assert all(t.isfinite().all() for t in (out, lse[:, :, 130:], *grads))
        seen = torch.arange(150, device=device).view(150, 1) % 3 > 0  # every third row sees nothing
        out, lse = seqkern.attention(q, k, v, attn_mask=seen.expand(150, 20), return_lse=True)
        assert torch.equal(lse.isneginf(), ~seen.T.expand(2, 2, 150))
        grad_lse = torch.where(lse.isneginf(), torch.inf, 1.0)  # whatever the gradient of an lse of -inf is
        grads = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), grad_lse))
        assert (grads[0][:, :, ::3] == 0).all()
        assert all(t.isfinite().all() for t in (out, *grads))
        low = torch.full((192, 192), -100.0, device=device)
        out, lse = seqkern.attention(*qkv(192, 192, device), attn_mask=low, return_lse=True)
        right = seqkern.attention(*qkv(192, 192, device), return_lse=True)
    torch.testing.assert_close(out, right[0], rtol=0, atol=5e-6)
    torch.testing.assert_close(lse, right[1] - 100, rtol=0, atol=2e-5)  # of numbers near 100


def check_nothing_else_is_read(device: str) -> None:
    """NaN behind a sequence's keys, and between the rows of tensors, stays where it is."""
    for dtype, dim in itertools.product((torch.float32, torch.bfloat16), (16, 13)):
        wide = [torch.full((2, 2, 40, dim + 8), torch.nan, dtype=dtype, device=device) for _ in range(3)]
        for t, own in zip(wide, qkv(40, 40, device, dtype, dim=dim), strict=True):
            t[..., :dim] = own
        lengths = torch.tensor([17, 0], device=device)
        for t in wide[1:]:
            t[0, :, 17:] = torch.nan
            t[1] = torch.nan
        views = [t[..., :dim].requires_grad_() for t in wide]
        plain = [t.detach().nan_to_num(7.0).contiguous().requires_grad_() for t in views]
        with seqkern.use_backend("cuda"):
            results = []
            for q, k, v in (views, plain):
                out, lse = seqkern.attention(q, k, v, key_lengths=lengths, return_lse=True)
                results.append([out, lse, *torch.autograd.grad(out.sum(), (q, k, v))])
        assert all(map(torch.equal, *results)), (dtype, dim)


def check_layouts(device: str) -> None:
    """Heads last, one key head expanded to all, a transposed last dimension, memory that begins anywhere, no rows."""
    q, k, v = qkv(33, 20, "cpu", heads=4)
    attend = functools.partial(seqkern.attention, causal=True, causal_align="upper_left")
    shifted = torch.empty(q.numel() + 1)[1:].view_as(q).copy_(q)
    variants = [
        (q.transpose(1, 2).contiguous().transpose(1, 2), k, v), (q, k[:, :1].expand(k.shape), v[:, :1].expand(v.shape)),
        (q.mT.contiguous().mT, k, v), (shifted, k, v), (q[:, :, :0], k, v), (q, k[:, :, :0], v[:, :, :0]),
        (q[:0], k[:0], v[:0]), (q[:, :0], k[:, :0], v[:, :0]),
    ]  # fmt: skip
    for n, tensors in enumerate(variants):
        pairs = both(attend, dict(zip(("query", "key", "value"), tensors, strict=True)), device)
        for ours, right in pairs:
            torch.testing.assert_close(ours, right, rtol=1e-6, atol=3e-6, msg=lambda m, n=n: f"{n}: {m}")


# ---- the API -------------------------------------------------------------------------------------------------------


def check_api(device: str) -> None:
    """torch's interface, packed sequences and decoding: as with the CPU kernels."""
    q, k, v = qkv(33, 33, kv_heads=1)

    def sdpa(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, return_lse: bool) -> Any:
        out = seqkern.scaled_dot_product_attention(query, key, value, bias, is_causal=True, enable_gqa=True)
        return out, out.sum(-1)

    starts = torch.tensor([0, 5, 5, 40])
    packed = dict(zip(("query", "key", "value"), (torch.randn(43, 4, 24) for _ in range(3)), strict=True))
    varlen = functools.partial(seqkern.attention_varlen, max_seqlen_q=35, max_seqlen_k=35, causal=True, window=(9, 0))
    pairs = [*both(sdpa, {"query": q, "key": k, "value": v, "bias": torch.randn(2, 1, 1, 33)}, device)]
    pairs += both(varlen, packed | {"cu_seqlens_q": starts, "cu_seqlens_k": starts.int()}, device)
    results = []
    for backend, where in (("cuda", device), ("cpu", "cpu")):
        torch.manual_seed(3)
        caches = [torch.randn(2, 2, 50, 16).to(where) for _ in range(2)]
        query, key, value = (torch.randn(2, h, 3, 16).to(where) for h in (4, 2, 2))
        lengths = torch.tensor([7, 41], device=where)
        with seqkern.use_backend(backend):
            out, lse = seqkern.attention_decode(query, *caches, lengths, key=key, value=value, return_lse=True)
        results.append([t.cpu() for t in (out, lse, *caches)])
    for ours, right in [*pairs, *zip(*results, strict=True)]:
        torch.testing.assert_close(ours, right, rtol=1e-6, atol=3e-6)


def check_same_mask(device: str) -> None:
    """Dropout drops what the CPU kernels drop: with one-hot values the output tells of every weight."""
    q, k, _ = qkv(9, 40, heads=3)
    value = torch.eye(40).expand(2, 3, 40, 40)
    for p in (0.25, 0.9):
        kept = []
        for backend, where in (("cuda", device), ("cpu", "cpu")):
            torch.manual_seed(5)
            seed = torch.tensor(0x1234_5678_9ABC, device=where)
            with seqkern.use_backend(backend), pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys.modules["seqkern.ops.attention"], "_seed", lambda *_, seed=seed: seed)
                kept.append(seqkern.attention(q.to(where), k.to(where), value.to(where), dropout_p=p).cpu() != 0)
        assert torch.equal(*kept)
        assert abs(kept[0].float().mean() - (1 - p)) < 0.05


def check_derivatives(device: str) -> None:
    """First derivatives by the kernels against differences, second ones and forward mode against the CPU's."""
    results = []
    for backend, where in (("cuda", device), ("cpu", "cpu")):
        inputs = [t.to(where).requires_grad_() for t in qkv(5, 7, dim=8)]
        tangent = torch.linspace(-1, 1, inputs[0].numel()).view_as(inputs[0]).to(where)

        def run(q: Tensor, k: Tensor = inputs[1], v: Tensor = inputs[2]) -> Tensor:
            return seqkern.attention(q, k, v, causal=True, softcap=4.0)

        with seqkern.use_backend(backend):
            (grad,) = torch.autograd.grad(run(inputs[0]).square().sum(), inputs[0], create_graph=True)
            second = torch.autograd.grad(grad.square().sum(), inputs)
            forward = torch.func.jvp(run, (inputs[0],), (tangent,))[1]
            with torch.no_grad():
                ahead, behind = (run(inputs[0] + h * tangent) for h in (1e-2, -1e-2))
            difference = (ahead.square().sum() - behind.square().sum()) / 2e-2
            torch.testing.assert_close((grad * tangent).sum(), difference, rtol=3e-4, atol=3e-4)
        results.append([t.cpu() for t in (grad, *second, forward)])
    for ours, right in zip(*results, strict=True):
        torch.testing.assert_close(ours, right, rtol=2e-6, atol=1.5e-5)


def check_autocast(device: str) -> None:
    q, k, v = qkv(20, 20, device)
    with seqkern.use_backend("cuda"), torch.autocast(device, torch.bfloat16):
        out, lse = seqkern.attention(q, k, v, attn_mask=torch.randn(20, 20, device=device), return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    with seqkern.use_backend("cpu"):
        right = seqkern.attention(*(t.bfloat16().cpu() for t in (q, k, v)))
    assert out.shape == right.shape


def check_refusals(device: str) -> None:
    """What the kernels do not take is said before anything runs, by the API and by the ops."""
    q, k, v = qkv(4, 6, device)
    numbers = (4, 6, 0, False, -1, -1, 0.5, 0.0, 0.0)
    forward = torch.ops.seqkern_cuda.attention_fwd

    def op(*tensors: Tensor | None, numbers: Any = numbers, path: str = "auto") -> Any:
        return forward(*tensors, *[None] * (10 - len(tensors)), *numbers, False, path)

    out, lse = op(q, k, v)
    with seqkern.use_backend("cuda"):
        with pytest.raises(NotImplementedError, match=r'got float64; use_backend\("triton"\) runs it'):
            seqkern.attention(*(t.double() for t in (q, k, v)))
        with pytest.raises(NotImplementedError, match=r'1 to 256, got query .*; use_backend\("reference"\) runs any'):
            seqkern.attention(*(torch.ones(1, 1, 4, 257, device=device) for _ in range(3)))
    refused: list[tuple[str, Callable[[], Any]]] = [
        ("got float64", lambda: op(q.double(), k.double(), v.double())),
        ("head dimensions of 1 to 256, got 300 of value", lambda: op(q, k, v.new_ones(2, 2, 6, 300))),
        ("path must be auto, mma or hopper, got fast", lambda: op(q, k, v, path="fast")),
        ("key must have ScalarType 6, got 15", lambda: op(q, k.bfloat16(), v)),
        ("multiple of the 2 heads of key", lambda: op(torch.cat([q, q[:, :1]], 1), k, v)),
        ("max_keys must be the lengths 4 and 6", lambda: op(q, k, v, numbers=(4, 7, *numbers[2:]))),
        ("attn_mask must have size 6 in dimension 3, got 5", lambda: op(q, k, v, q.new_ones(1, 1, 4, 5))),
        ("query_starts and key_starts go together", lambda: op(q, k, v, None, torch.tensor([0, 4], device=device))),
        ("needs a seed", lambda: op(q, k, v, numbers=(*numbers[:-1], 0.5))),
        ("seed must have ScalarType 4, got 6", lambda: op(q, k, v, *[None] * 6, q.new_zeros(()))),  # looked at or not
        ("fewer than 2^28 queries, got 268435456", lambda: op(
            q[:1], k[:1], v[:1], None, *[torch.tensor([0, 4], device=device)] * 2, numbers=(2**28, *numbers[1:]))),
        ("need_slopes without", lambda: torch.ops.seqkern_cuda.attention_bwd(
            out, None, q, k, v, out, lse, *[None] * 6, *numbers, False, True, False, "auto")),
    ]  # fmt: skip
    for words, call in refused:
        with pytest.raises(RuntimeError) as error:
            call()
        assert words in str(error.value), words


def check_lengths_out_of_range(device: str) -> None:
    """Starts and lengths are read on the device: those beyond the tensors are cut, and reach no other memory."""
    q, k, v = (torch.randn(1, 2, 12, 16, device=device) for _ in range(3))
    numbers = (12, 12, 0, False, -1, 0, 0.5, 0.0, 0.0)
    for integer in (torch.int32, torch.int64):
        far = torch.tensor([-5, 4, 99], dtype=integer, device=device)
        near = torch.tensor([0, 4, 12], dtype=integer, device=device)
        beyond = [99, -1] if integer == torch.int32 else [2**32 + 1, 5 - 2**32]  # also of 32 bits
        results = []
        for starts, lengths in ((far, beyond), (near, [4, 0])):
            tensors = (None, starts, starts, torch.tensor(lengths, dtype=integer, device=device), None)
            out, lse = torch.ops.seqkern_cuda.attention_fwd(q, k, v, *tensors, None, None, *numbers, False, "auto")
            grads = torch.ops.seqkern_cuda.attention_bwd(
                out, None, q, k, v, out, lse, *tensors, None, *numbers, False, False, False, "auto"
            )
            results.append([out, lse, *grads])
        assert all(map(torch.equal, *results))
        tensors, none = (None, near, near, None, None, None, None), (0, 0, *numbers[2:])  # of 0 queries at most
        out, lse = torch.ops.seqkern_cuda.attention_fwd(q, k, v, *tensors, *none, False, "auto")
        assert not out.count_nonzero()
        assert lse.isneginf().all()


def check_explained(device: str) -> None:
    q, _, v = qkv(4, 6, device, dim=72)
    with seqkern.use_backend("cuda"):
        choice = seqkern.explain("attention", q, q, v)
        assert choice.kernel.startswith("CUDA C++, ")
        for words in ("forward mma.sync in tiles of ", "backward mma.sync in tiles of ", " queries by ", " keys by "):
            assert words in choice.reason, choice
        assert choice.reason == seqkern.explain("attention_varlen", q[0], q[0], v[0]).reason
        assert choice.reason == seqkern.explain("scaled_dot_product_attention", q[0, 0], q[0, 0], v[0, 0]).reason
        wide = seqkern.explain("attention", q, q, v.new_ones(2, 2, 6, 130))
        assert wide.reason != choice.reason  # the larger of the two head dimensions decides
        with pytest.raises(NotImplementedError, match="float64"):
            seqkern.explain("attention", q.double())


def check_decoding(device: str) -> None:
    """What is refused leaves the caches as they are; float32 compiles, whatever torch's flag for tf32."""
    lengths = torch.tensor([3, 0], device=device)

    def tensors(dim: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        caches = [torch.zeros(2, 1, 8, dim, device=device, dtype=dtype) for _ in range(2)]
        return [torch.randn(2, 2, 1, dim, device=device).to(dtype), *caches], [
            torch.randn(2, 1, 1, dim, device=device).to(dtype) for _ in range(2)
        ]

    def decode(tokens: list[Tensor], new: list[Tensor]) -> Tensor:
        return seqkern.attention_decode(*tokens, lengths, key=new[0], value=new[1])

    with seqkern.use_backend("cuda"):
        for dim, dtype in ((257, torch.float32), (64, torch.float64)):
            tokens, new = tensors(dim, dtype)
            with pytest.raises(NotImplementedError, match="attention: the CUDA C"):
                decode(tokens, new)
            assert not any(cache.any() for cache in tokens[1:])
        tokens, new = tensors(64, torch.float32)
        again = [t.clone() for t in tokens]
        found = torch.compile(decode, backend="aot_eager", fullgraph=True)(tokens, new)
        assert torch.equal(found, decode(again, new))
        assert all(torch.equal(a, b) for a, b in zip(tokens, again, strict=True))
        assert "keys split over blocks" in seqkern.explain("attention_decode", *tokens).reason
        with pytest.raises(ValueError, match="attention: query must have at least 3 dimensions"):
            seqkern.explain("attention", torch.ones((), device=device))


CHECKS = checks_of(globals())
QUICK = [name for name in CHECKS if not name.endswith("_everywhere")]


# ---- in the host executor ------------------------------------------------------------------------------------------


def test_executor_api(simt: Callable[..., str]) -> None:
    simt(HERE, *(name for name in QUICK if name != "check_lengths"), seed=1)


def test_executor_lengths(simt: Callable[..., str]) -> None:
    simt(HERE, "check_lengths", seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_executor_everything(seed: int, simt: Callable[..., str]) -> None:
    simt(HERE, *CHECKS, seed=seed, timeout=7200)


@pytest.mark.slow
def test_executor_finds_no_race(simt: Callable[..., str]) -> None:
    simt(HERE, "check_error_rule", "check_launchers", seed=3, race=True, timeout=7200)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["lengths_to_1024", "lengths_beyond"])
def test_executor_all_lengths(words: str, simt: Callable[..., str]) -> None:
    simt(HERE, words, seed=4, timeout=7200)


def test_needs_the_executor() -> None:
    """Without it, CPU tensors are refused: none of these checks passes by running something else."""
    with seqkern.use_backend("cuda"), pytest.raises(NotImplementedError, match="host executor"):
        seqkern.attention(*qkv(4, 4))


def lengths_to_1024(device: str) -> None:
    lengths_list(device, [pair for pair in LENGTHS if max(pair) <= 1024], 16)


def lengths_beyond(device: str) -> None:
    lengths_list(device, [pair for pair in LENGTHS if max(pair) > 1024], 16)


if __name__ == "__main__":
    run_words(CHECKS | {each.__name__: each for each in (lengths_to_1024, lengths_beyond)}, "cpu")
