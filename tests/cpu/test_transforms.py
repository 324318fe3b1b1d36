"""Compositions of torch.func's transforms: every op against the equations in plain PyTorch, in float64.

Each op is a function of two numbers that move all its tensors, so that a wrong derivative of any of them shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func

import seqkern

AT, ALONG = torch.tensor([0.3, -0.2]).double(), torch.tensor([0.7, 0.4]).double()
SAMPLES = torch.stack([AT, 2 * AT, ALONG])


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def attention() -> tuple[Any, ...]:
    lengths = torch.tensor([5, 2])

    def op(q, k, v, mask, slopes, sinks):
        return seqkern.attention(
            q, k, v, causal=True, window=(3, 0), softcap=3.0, key_lengths=lengths, attn_mask=mask,
            alibi_slopes=slopes, sinks=sinks, return_lse=True,
        )  # fmt: skip

    shapes = [(2, 4, 3, 2), (2, 2, 5, 2), (2, 2, 5, 3), (2, 1, 3, 5), (2, 4), (4,)]
    return op, *(draw(*shape) for shape in shapes)


def attention_dropout() -> tuple[Any, ...]:
    def op(q, k, v):
        torch.manual_seed(3)  # the same mask in every call
        return seqkern.scaled_dot_product_attention(q, k, v, dropout_p=0.4)

    return op, draw(1, 2, 3, 2), draw(1, 2, 5, 2), draw(1, 2, 5, 3)


def attention_varlen() -> tuple[Any, ...]:
    starts_q, starts_k = torch.tensor([0, 2, 2, 5]), torch.tensor([0, 4, 5, 9])

    def op(q, k, v, mask, slopes, sinks):
        return seqkern.attention_varlen(
            q, k, v, starts_q, starts_k, 3, 4, causal=True, softcap=2.0, attn_mask=mask, alibi_slopes=slopes,
            sinks=sinks, return_lse=True,
        )  # fmt: skip

    shapes = [(7, 4, 2), (10, 2, 2), (10, 2, 3), (3, 1, 3, 4), (3, 4), (4,)]  # two rows belong to no sequence
    return op, *(draw(*shape) for shape in shapes)


def attention_weights() -> tuple[Any, ...]:
    def op(q, k, slopes, sinks):
        return seqkern.attention_weights(q, k, causal=True, alibi_slopes=slopes, sinks=sinks, softcap=2.0)

    return op, draw(2, 4, 3, 2), draw(2, 2, 5, 2), draw(2, 4), draw(4)


def merge_attention() -> tuple[Any, ...]:
    return seqkern.merge_attention, draw(2, 3, 4), draw(2, 3), draw(2, 3, 4), draw(2, 3)


def additive_attention() -> tuple[Any, ...]:
    lengths = torch.tensor([5, 0])

    def op(q, k, v, w, b, mask):
        return seqkern.additive_attention(
            q, k, v, w, b, key_lengths=lengths, mask=mask, return_weights=True, return_lse=True
        )

    shapes = [(2, 3, 4), (2, 5, 4), (2, 5, 3), (4,), (4,), (2, 1, 5)]
    return op, *(draw(*shape) for shape in shapes)


def attention_rnn() -> tuple[Any, ...]:
    lengths = torch.tensor([3, 2])

    def op(x, k, v, w_ih, w_hh, b, w_query, w_score, w_out, h, c, feed):
        luong = seqkern.attention_rnn(
            x, k, v, w_ih, w_hh, b, w_query=w_query, w_score=w_score, w_out=w_out, state=(h, c, feed), order="luong",
            key_lengths=lengths, return_weights=True,
        )  # fmt: skip
        bahdanau = seqkern.attention_rnn(x, k, v, w_ih[:6], w_hh[:6], w_query=w_query, cell="gru")
        return luong.output, luong.context, luong.weights, luong.state.c, bahdanau.output, bahdanau.context

    shapes = [(2, 2, 2), (2, 3, 3), (2, 3, 2), (8, 4), (8, 2), (8,), (3, 2), (3,), (2, 4), (2, 2), (2, 2), (2, 2)]
    return op, *(draw(*shape) for shape in shapes)


def highway() -> tuple[Any, ...]:
    def op(x, w, b):
        return [seqkern.highway(x, w, b, activation) for activation in ("relu", "tanh", "gelu", "silu")]

    return op, draw(3, 4), draw(8, 4), draw(8)


def tree_lstm() -> tuple[Any, ...]:
    schedule = seqkern.TreeSchedule.from_parents([-1, 0, 0, 1, -1])

    def op(x, w_ih, w_hh, b, w_nary):
        child_sum = seqkern.tree_lstm(x, schedule, w_ih, w_hh, b)
        return *child_sum, *seqkern.tree_lstm(x, schedule, w_ih, w_nary, kind="nary")

    return op, *(draw(*shape) for shape in [(5, 3), (8, 3), (8, 2), (8,), (10, 4)])


def sequence_pool() -> tuple[Any, ...]:
    def op(x, packed):
        starts = torch.tensor([0, 1, 5])
        return [seqkern.sequence_pool(x, [4, 2], kind) for kind in ("mean", "max", "last", "logsumexp")] + [
            seqkern.sequence_pool(packed, None, kind, cu_seqlens=starts) for kind in ("sum", "min", "logsumexp")
        ]

    return op, draw(2, 4, 3), draw(6, 3)


def conv1d() -> tuple[Any, ...]:
    def op(x, w, b):
        return seqkern.conv1d(x, w, b, stride=2, padding=(2, 0), dilation=2, lengths=[4, 1])

    return op, draw(2, 4, 3), draw(5, 2, 3), draw(5)


def conv1d_max() -> tuple[Any, ...]:
    def op(x, w, b, packed):
        starts = torch.tensor([0, 1, 5])
        padded = seqkern.conv1d_max(x, w, b, "tanh", [4, 1])
        return padded, seqkern.conv1d_max(packed, w, None, "sigmoid", cu_seqlens=starts)

    return op, draw(2, 4, 3), draw(5, 2, 3), draw(5), draw(6, 3)


def layer_norm() -> tuple[Any, ...]:
    return lambda x, w, b: seqkern.layer_norm(x, (4,), w, b), draw(2, 3, 4), draw(4), draw(4)


def rms_norm() -> tuple[Any, ...]:
    return lambda x, w: seqkern.rms_norm(x, (3, 4), w), draw(2, 3, 4), draw(3, 4)


def add_layer_norm() -> tuple[Any, ...]:
    def op(x, residual, w, b):
        return seqkern.add_layer_norm(x, residual, (4,), w, b, dropout_p=0.3, seed=5)

    return op, draw(2, 3, 4), draw(2, 3, 4), draw(4), draw(4)


def add_rms_norm() -> tuple[Any, ...]:
    return lambda x, r, w: seqkern.add_rms_norm(x, r, (4,), w), draw(2, 3, 4), draw(2, 3, 4), draw(4)


def swiglu() -> tuple[Any, ...]:
    return seqkern.swiglu, draw(3, 4), draw(3, 4)


def geglu() -> tuple[Any, ...]:
    return seqkern.geglu, draw(3, 4), draw(3, 4)


def rope() -> tuple[Any, ...]:
    return lambda q, k: seqkern.rope(q, k, 3, theta=50.0, rotary_dim=2)[:2], draw(1, 2, 3, 4), draw(1, 1, 3, 4)


CLASSES = torch.tensor([2, 0, -100, 1])


def cross_entropy() -> tuple[Any, ...]:
    def op(z):
        weights = torch.tensor([0.3, 1.0, 2.0]).double()
        return seqkern.cross_entropy(
            z, CLASSES, class_weight=weights, label_smoothing=0.2, z_loss=0.1, softcap=2.0, return_lse=True
        )

    return op, draw(4, 3)


def linear_cross_entropy() -> tuple[Any, ...]:
    def op(x, w, b):
        weights = torch.tensor([0.3, 1.0, 2.0]).double()
        return seqkern.linear_cross_entropy(
            x, w, CLASSES, b, class_weight=weights, label_smoothing=0.2, z_loss=0.1, softcap=2.0, return_lse=True
        )

    return op, draw(4, 2), draw(3, 2), draw(3)


def linear_cross_entropy_mean() -> tuple[Any, ...]:
    """The gradients that come with the loss."""
    return lambda x, w: seqkern.linear_cross_entropy(x, w, CLASSES), draw(4, 2), draw(3, 2)


def sgns_loss() -> tuple[Any, ...]:
    ids = torch.tensor([1, 0, 2]), torch.tensor([2, 2, 0]), torch.tensor([[0, 1], [2, 0], [1, 1]])
    return lambda a, b: seqkern.sgns_loss(*ids, a, b, reduction="none"), draw(3, 2), draw(3, 2)


GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1, "additive_rnn": 1, "interpolated_rnn": 2}


def recurrent(name: str) -> Callable[[], tuple[Any, ...]]:
    def make() -> tuple[Any, ...]:
        rows, pair = 3 * GATES[name], name == "lstm"
        norms = 6 if pair else 4
        resets = torch.tensor([[0, 0], [0, 1], [1, 0]], dtype=torch.bool)
        options: dict[str, Any] = {"return_all_c": True, "recompute": True} if pair else {}

        def op(x, h, c, peephole, *tensors):
            own = options | ({"peepholes": [peephole]} if pair else {})
            return getattr(seqkern, name)(
                x, (h, c) if pair else h, tensors[norms:], norms=tensors[:norms], lengths=[3, 2], training=True,
                recurrent_dropout=0.3, zoneout=0.2, resets=resets, seed=7, **own,
            )  # fmt: skip

        of_norms = [draw(3) if n > 3 else draw(rows) for n in range(norms)]
        weights = draw(rows, 2), draw(rows, 3), draw(rows), draw(rows)
        return op, draw(3, 2, 2), draw(1, 2, 3), draw(1, 2, 3), draw(3, 3), *of_norms, *weights

    return make


def cell(name: str) -> Callable[[], tuple[Any, ...]]:
    def make() -> tuple[Any, ...]:
        rows = 3 * GATES[name]

        def op(x, h, c, *weights):
            return getattr(seqkern, f"{name}_cell")(x, (h, c) if name == "lstm" else h, *weights)

        weights = draw(rows, 2), draw(rows, 3), draw(rows), draw(rows)
        return op, draw(2, 2), draw(2, 3), draw(2, 3), *weights

    return make


OPS: dict[str, Callable[[], tuple[Any, ...]]] = {
    f.__name__: f
    for f in (
        attention, attention_dropout, attention_varlen, attention_weights, merge_attention, additive_attention,
        attention_rnn, highway, tree_lstm, sequence_pool, conv1d, conv1d_max, layer_norm, rms_norm,
        add_layer_norm, add_rms_norm, swiglu, geglu, rope, cross_entropy, linear_cross_entropy,
        linear_cross_entropy_mean, sgns_loss,
    )
}  # fmt: skip
OPS |= {name: recurrent(name) for name in GATES} | {f"{name}_cell": cell(name) for name in list(GATES)[:4]}


def path(op: Callable[..., Any], *tensors: Tensor) -> Callable[[Tensor], Tensor]:
    """A number that depends on all results of the op, as a function of two numbers that move all its tensors."""
    directions = [(torch.randn_like(t) / 2, torch.randn_like(t) / 2) for t in tensors]

    def function(at: Tensor) -> Tensor:
        moved = (t + at[0] * a + at[1] * b for t, (a, b) in zip(tensors, directions, strict=True))
        total = at.new_zeros(())
        for result in torch.utils._pytree.tree_leaves(op(*moved)):
            weights = torch.linspace(0.5, 1.5, result.numel(), dtype=result.dtype).view(result.shape)
            total = total + (result * weights).masked_fill(result.isinf(), 0).sin().sum()
        return total

    return function


def forward(f):
    return func.jacfwd(f, randomness="same")


def mapped(f):
    return func.vmap(f, randomness="same")


def total(f):
    return lambda samples: mapped(f)(samples).sum()


def pushed(f, along=ALONG):
    return lambda at: func.jvp(f, (at,), (along,))[1]


def gradient(f):
    """Ordinary backward through what transforms computed."""

    def function(at):
        at = at.detach().requires_grad_()
        return torch.autograd.grad(f(at).sum(), at)[0]

    return function


def of_pullback(f):
    """Forward mode over forward mode of a pullback, outside the transform that it comes from."""

    def function(at):
        output, pullback = func.vjp(f, at)
        return forward(forward(lambda v: pullback(v)[0].square().sum()))(torch.ones_like(output))

    return function


PAIRS = torch.stack([SAMPLES, SAMPLES / 2])
QUICK = {
    "forward forward": lambda f: forward(forward(f))(AT),
    "reverse forward": lambda f: func.jacrev(forward(f))(AT),
    "vmap of grad of vmap": lambda f: mapped(func.grad(total(f)))(PAIRS),
    "jvp of vmap": lambda f: pushed(mapped(f), SAMPLES.cos())(SAMPLES),
    "backward of jvp of jvp": lambda f: gradient(pushed(pushed(f), AT))(AT),
    "pullback": lambda f: of_pullback(f)(AT),
}
SLOW = {
    "forward reverse": lambda f: forward(func.jacrev(f))(AT),
    "reverse reverse": lambda f: func.jacrev(func.jacrev(f))(AT),
    "jvp of jvp": lambda f: pushed(pushed(f), AT)(AT),
    "three forward": lambda f: forward(forward(forward(f)))(AT),
    "forward forward reverse": lambda f: forward(forward(func.jacrev(f)))(AT),
    "backward of vmap of vmap": lambda f: gradient(mapped(mapped(f)))(PAIRS),
    "grad of vmap of grad": lambda f: func.grad(lambda a: mapped(func.grad(f))(a).square().sum())(SAMPLES),
    "vmap of vmap of grad": lambda f: mapped(mapped(func.grad(f)))(PAIRS),
    "vmap of jvp": lambda f: mapped(pushed(f))(SAMPLES),
    "vmap of jvp of vmap of jvp": lambda f: mapped(pushed(mapped(pushed(f)), SAMPLES.cos()))(PAIRS),
    "jvp of grad of vmap": lambda f: pushed(func.grad(total(f)), SAMPLES.cos())(SAMPLES),
    "vmap of grad of grad of vmap": lambda f: mapped(func.grad(lambda a: func.grad(total(f))(a).square().sum()))(PAIRS),
    "reverse forward reverse": lambda f: func.jacrev(forward(func.jacrev(f)))(AT),
    "forward reverse forward": lambda f: forward(func.jacrev(forward(f)))(AT),
    "three reverse": lambda f: func.jacrev(func.jacrev(func.jacrev(f)))(AT),
}


@pytest.mark.parametrize(
    "transform",
    [*QUICK.values(), *(pytest.param(t, marks=pytest.mark.slow) for t in SLOW.values())],
    ids=[*QUICK, *SLOW],
)
@pytest.mark.parametrize("name", OPS)
def test_composition(name, transform):
    function = path(*OPS[name]())
    ours = transform(function)
    with seqkern.use_backend("reference"):
        theirs = transform(function)
    assert theirs.count_nonzero()
    torch.testing.assert_close(ours, theirs)


def test_norms_of_a_recurrence_by_finite_differences():
    """torch's own layer norm has a second derivative in forward mode that is none: the reference does without it."""
    function = path(*OPS["gru"]())
    step = 1e-5 * torch.eye(2, dtype=torch.float64)
    columns = [(func.grad(function)(AT + h) - func.grad(function)(AT - h)) / 2e-5 for h in step]
    for hessian in (forward(forward(function)), func.jacrev(forward(function)), func.hessian(function)):
        torch.testing.assert_close(hessian(AT), torch.stack(columns, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transform", [func.vmap, forward, func.grad])
def test_decoding_refuses(transform):
    def decode(q):
        return seqkern.attention_decode(q, cache, cache, torch.tensor([2])).sum()

    cache, query = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 1, 8)
    with pytest.raises(NotImplementedError, match="use attention"):
        transform(decode)(query[None] if transform is func.vmap else query)
