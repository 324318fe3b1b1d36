"""What the processes of the tests do."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import seqkern
import seqkern.distributed as sd
from seqkern.testing import assert_passed, compare

BATCH, LENGTH, DIM = 2, 48, 16


def every_case() -> dict[str, dict[str, Any]]:
    """Every method, layout, causal, window and number of key heads; options and dtypes besides."""
    windows = (None, (7, 3), (5, -1))
    found = {}
    for method, layout, causal, window, kv_heads in itertools.product(
        ("allgather", "ring", "ulysses"), ("zigzag", "contiguous"), (False, True), windows, (8, 4)
    ):
        name = f"{method}-{layout}-{'causal' if causal else 'full'}-{window}-{kv_heads}"
        found[name] = {"method": method, "layout": layout, "causal": causal, "window": window, "kv_heads": kv_heads}
    plain = {"layout": "zigzag", "causal": True, "window": None, "kv_heads": 4}
    for method in ("allgather", "ring", "ulysses"):
        of_method = plain | {"method": method}
        found[f"{method}-options"] = of_method | {"softcap": 5.0, "sinks": True, "slopes": True, "window": (20, None)}
        found[f"{method}-scale"] = of_method | {"scale": 0.5, "layout": "contiguous", "sinks": True}
        found[f"{method}-float64"] = of_method | {"dtype": torch.float64, "sinks": True, "slopes": True}
        found[f"{method}-bfloat16"] = of_method | {"dtype": torch.bfloat16, "sinks": True}
        found[f"{method}-float16"] = of_method | {"dtype": torch.float16, "causal": False}
    for layout, causal, window in itertools.product(("zigzag", "contiguous"), (False, True), windows[:2]):
        name = f"dropout-{layout}-{'causal' if causal else 'full'}-{window}"
        found[name] = plain | {
            "method": "allgather", "layout": layout, "causal": causal, "window": window, "dropout_p": 0.3,
        }  # fmt: skip
    found["dropout-options"] = plain | {"method": "allgather", "dropout_p": 0.3, "sinks": True, "slopes": True}
    found["dropout-bfloat16"] = plain | {"method": "allgather", "dropout_p": 0.3, "dtype": torch.bfloat16}
    return found


def attention_cases(rank: int, ranks: int, report: Any) -> None:
    for name, case in every_case().items():
        report(name, lambda case=case: attention_case(rank, ranks, **case))


def attention_case(
    rank: int, ranks: int, method: str, layout: str, causal: bool, window: Any, kv_heads: int,
    dtype: torch.dtype = torch.float32, softcap: float | None = None, sinks: bool = False, slopes: bool = False,
    scale: float | None = None, dropout_p: float = 0.0,
) -> None:  # fmt: skip
    """Output, log-sum-exp and every gradient of the group against those of one process and the float64 result."""
    g = torch.Generator().manual_seed(1)
    q, grad_out = (torch.randn(BATCH, 8, LENGTH, DIM, generator=g) for _ in range(2))
    k, v = (torch.randn(BATCH, kv_heads, LENGTH, DIM, generator=g) for _ in range(2))
    grad_lse = torch.randn(BATCH, 8, LENGTH, generator=g)
    tensors = {"query": q, "key": k, "value": v}
    if sinks:
        tensors["sinks"] = torch.randn(8, generator=g)
    if slopes:
        tensors["alibi_slopes"] = torch.rand(8, generator=g)
    options: dict[str, Any] = {
        "causal": causal, "window": window, "softcap": softcap, "scale": scale, "dropout_p": dropout_p,
        "return_lse": True,
    }  # fmt: skip
    tensors = {name: t.to(dtype) for name, t in tensors.items()}
    grad_out = grad_out.to(dtype)

    def cut(t: Tensor) -> Tensor:
        return sd.shard_sequence(t, layout=layout)

    local = {
        name: (cut(t) if name in ("query", "key", "value") else t.clone()).requires_grad_()
        for name, t in tensors.items()
    }
    torch.manual_seed(7 + rank)  # the first process decides
    out, lse = sd.ring_attention(**local, **options, method=method, layout=layout)
    assert out.dtype == dtype
    torch.autograd.backward([out, lse], [cut(grad_out), cut(grad_lse.to(lse.dtype))])
    results = {"out": out, "lse": lse} | {f"grad of {name}": t.grad for name, t in local.items()}
    for name, t in results.items():
        assert t is not None, name
        if name in ("grad of sinks", "grad of alibi_slopes"):
            results[name] = t.detach().double()
            dist.all_reduce(results[name])
            results[name] = results[name].to(dtype)
        else:
            results[name] = sd.unshard_sequence(t.detach(), layout=layout)
    if rank == 0:
        exact = whole(tensors, options, grad_out, grad_lse, torch.float64)
        # Of float64, the exact result has one process's own errors: the formula's say how large errors are.
        with seqkern.use_backend("reference" if dtype == torch.float64 else "auto"):
            one = whole(tensors, options, grad_out, grad_lse, dtype)
        assert_passed([compare(t, one[name], exact[name], name=name) for name, t in results.items()])


def whole(
    tensors: dict[str, Tensor], options: dict[str, Any], grad_out: Tensor, grad_lse: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    leaves = {name: t.to(dtype).clone().requires_grad_() for name, t in tensors.items()}
    torch.manual_seed(7)
    out, lse = seqkern.attention(**leaves, **options)
    torch.autograd.backward([out, lse], [grad_out.to(dtype), grad_lse.to(lse.dtype)])
    found = {"out": out, "lse": lse} | {f"grad of {name}": t.grad for name, t in leaves.items()}
    return {name: t.detach() for name, t in found.items() if t is not None}


def rnn_case_list() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for cell, method in itertools.product(("lstm", "gru", "rnn_tanh", "rnn_relu"), ("alltoall", "relay")):
        found[f"{cell}-{method}"] = {"cell": cell, "method": method}
        found[f"{cell}-{method}-state"] = {"cell": cell, "method": method, "state": True, "layers": 2}
    for method in ("alltoall", "relay"):
        found[f"lstm-{method}-batch_first"] = {"cell": "lstm", "method": method, "batch_first": True, "state": True}
        found[f"lstm-{method}-float64"] = {"cell": "lstm", "method": method, "dtype": torch.float64, "layers": 2}
        found[f"lstm-{method}-peepholes"] = {"cell": "lstm", "method": method, "peepholes": True, "state": True}
        found[f"gru-{method}-norms"] = {"cell": "gru", "method": method, "norms": True, "state": True}
    found["lstm-alltoall-both"] = {"cell": "lstm", "method": "alltoall", "directions": 2, "layers": 2, "state": True}
    found["gru-alltoall-lengths"] = {"cell": "gru", "method": "alltoall", "lengths": True, "directions": 2}
    found["lstm-alltoall-zigzag"] = {"cell": "lstm", "method": "alltoall", "layout": "zigzag"}
    found["lstm-relay-slices"] = {"cell": "lstm", "method": "relay", "slices": 3, "state": True}
    found["gru-relay-few"] = {"cell": "gru", "method": "relay", "slices": 20, "state": True}
    found["lstm-alltoall-bfloat16"] = {"cell": "lstm", "method": "alltoall", "dtype": torch.bfloat16}
    return found


def rnn_cases(rank: int, ranks: int, report: Any) -> None:
    for name, case in rnn_case_list().items():
        report(name, lambda case=case: rnn_case(rank, ranks, **case))


def rnn_case(
    rank: int, ranks: int, cell: str, method: str, layers: int = 1, directions: int = 1, state: bool = False,
    batch_first: bool = False, lengths: bool = False, norms: bool = False, peepholes: bool = False,
    layout: str = "contiguous", slices: int | None = None, dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    g = torch.Generator().manual_seed(2)
    steps, batch, width, hidden = 16, 8, 6, 10
    gates = {"lstm": 4, "gru": 3}.get(cell, 1) * hidden

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).to(dtype)

    weights = []
    for layer, _ in itertools.product(range(layers), range(directions)):
        inputs = width if layer == 0 else directions * hidden
        weights += [draw(gates, inputs) * 0.3, draw(gates, hidden) * 0.3, draw(gates), draw(gates)]
    x, grad_y = draw(steps, batch, width), draw(steps, batch, directions * hidden)
    hx = [draw(layers * directions, batch, hidden) for _ in range(1 + (cell == "lstm"))]
    grad_state = [draw(*t.shape) for t in hx]
    extra: dict[str, Any] = {}
    if norms:
        extra["norms"] = [draw(gates) for _ in range(4 * layers * directions)]
    if peepholes:
        extra["peepholes"] = [draw(3, hidden) for _ in range(layers * directions)]
    options: dict[str, Any] = {"num_layers": layers, "batch_first": batch_first, "bidirectional": directions == 2}
    if lengths:
        options["lengths"] = torch.randint(0, steps + 1, (batch,), generator=g)
    dim = 0
    if batch_first:
        x, grad_y, dim = x.transpose(0, 1), grad_y.transpose(0, 1), 1

    def results(function: Any, x: Tensor, grad_y: Tensor, share: int, dtype: torch.dtype, **more: Any) -> Any:
        def leaf(t: Tensor) -> Tensor:
            return t.to(dtype).detach().clone().requires_grad_()

        x, ws, state_leaves = leaf(x), [leaf(t) for t in weights], [leaf(t) for t in hx]
        others = {name: [leaf(t) for t in ts] for name, ts in extra.items()}
        given = (tuple(state_leaves) if cell == "lstm" else state_leaves[0]) if state else None
        y, end = function(x, given, ws, **others, **options, **more)
        ends = list(end) if isinstance(end, tuple) else [end]
        cotangents = [
            grad_y,
            *(t / share for t in grad_state),
        ]  # every process has the final state: a share of its loss
        torch.autograd.backward([y, *ends], [t.to(dtype) for t in cotangents])
        rows = {"output": y, "grad of input": x.grad}
        same = {f"state {i}": t for i, t in enumerate(ends)}
        leaves = [*ws, *(state_leaves if state else []), *(t for ts in others.values() for t in ts)]
        shares = {f"grad {i}": t.grad for i, t in enumerate(leaves)}
        return [{name: t.detach() for name, t in of.items() if t is not None} for of in (rows, same, shares)]

    def cut(t: Tensor) -> Tensor:
        return sd.shard_sequence(t, dim=dim, layout=layout)

    more: dict[str, Any] = {"method": method, "layout": layout}
    if slices is not None:
        more["slices"] = slices
    rows, same, shares = results(getattr(sd, cell), cut(x), cut(grad_y), ranks, dtype, **more)
    found = {name: sd.unshard_sequence(t, dim=dim, layout=layout) for name, t in rows.items()} | same
    for name, t in shares.items():
        total = t.double()
        dist.all_reduce(total)
        found[name] = total.to(dtype)
    exact, one = {}, {}
    for of in results(getattr(seqkern, cell), x, grad_y, 1, torch.float64):
        exact |= of
    with seqkern.use_backend("reference" if dtype == torch.float64 else "auto"):
        for of in results(getattr(seqkern, cell), x, grad_y, 1, dtype):
            one |= of
    assert found.keys() == exact.keys()
    assert_passed([compare(t, one[name], exact[name], name=name) for name, t in found.items()])


# ---- sequences, modules, training ----------------------------------------------------------------------------------


def other_cases(rank: int, ranks: int, report: Any) -> None:
    for name in OTHERS:
        report(name, globals()[name], rank, ranks)


def sequence_and_positions(rank: int, ranks: int) -> None:
    for layout, dim in itertools.product(("zigzag", "contiguous"), (0, 2, -1)):
        x = torch.randn(16, 8, 24, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        x.requires_grad_()
        part = sd.shard_sequence(x, dim=dim, layout=layout)
        where = sd.local_positions(x.shape[dim], layout=layout)
        assert torch.equal(part, x.index_select(dim, where))
        back = sd.unshard_sequence(part, dim=dim, layout=layout)
        assert torch.equal(back, x)
        weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        (grad,) = torch.autograd.grad((back * weight).sum(), x)
        dist.all_reduce(grad)  # shares of a loss that every process has
        assert torch.allclose(grad, ranks * weight, rtol=0, atol=1e-14 * float(ranks * weight.abs().max()))


def double_backward_of_exchanges(rank: int, ranks: int) -> None:
    g = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, 4, 16, 8, generator=g, dtype=torch.float64) for _ in range(3))

    def penalty(attend: Any, tensors: list[Tensor]) -> list[Tensor]:
        out = attend(*tensors)
        found = torch.autograd.grad(out.sum(), tensors[0], create_graph=True)[0]
        return list(torch.autograd.grad(found.pow(2).sum(), tensors))

    def ulysses(*tensors: Tensor) -> Any:
        return sd.ring_attention(*tensors, causal=True, method="ulysses")

    ours = penalty(ulysses, [sd.shard_sequence(t).requires_grad_() for t in (q, k, v)])
    one = penalty(lambda *t: seqkern.attention(*t, causal=True), [t.clone().requires_grad_() for t in (q, k, v)])
    with seqkern.use_backend("reference"):
        peer = penalty(lambda *t: seqkern.attention(*t, causal=True), [t.clone().requires_grad_() for t in (q, k, v)])
    whole_of = [sd.unshard_sequence(t.detach()) for t in ours]
    assert_passed([compare(a, p, b) for a, p, b in zip(whole_of, peer, one, strict=True)])


class Model(torch.nn.Module):
    """Layer norm, rotary embeddings and causal attention by torch's function: one block of a decoder."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = seqkern.nn.LayerNorm(32, dtype=dtype)
        self.qkv = torch.nn.Linear(32, 96, dtype=dtype)
        self.project = torch.nn.Linear(32, 32, dtype=dtype)
        self.head = torch.nn.Linear(32, 11, dtype=dtype)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        angle = positions[:, None] / 50.0 ** torch.arange(8, dtype=x.dtype).div(8)
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        q, k = (t * angle.cos() + t.roll(4, -1) * angle.sin() for t in (q, k))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.project(out.transpose(1, 2).flatten(2)))


def train(model: Any, batches: list[tuple[Tensor, Tensor]], context: Any, steps: int = 4) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for x, labels in batches[:steps]:
        x, labels, positions = x.clone(), labels.clone(), torch.arange(x.shape[1])
        with context([x, labels, positions], [1, 1, 0]):
            loss = torch.nn.functional.cross_entropy(model(x, positions).flatten(0, 1), labels.flatten())
            loss.backward()
        assert x.shape[1] == labels.shape[1] == positions.shape[0] == 16  # whole again
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def training_with_context_parallel_and_ddp(rank: int, ranks: int) -> None:
    """2 x (R / 2): each half of the batch on a group over which the sequence is split; equal to one process."""
    import contextlib

    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel

    g = torch.Generator().manual_seed(6)
    batches = [
        (torch.randn(4, 16, 32, generator=g).double(), torch.randint(11, (4, 16), generator=g)) for _ in range(4)
    ]
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("data", "sequence"))
    data = mesh["data"].get_local_rank()
    half = [tuple(t[2 * data : 2 * data + 2] for t in batch) for batch in batches]
    for method, layout in itertools.product(("allgather", "ring", "ulysses"), ("zigzag", "contiguous")):

        @contextlib.contextmanager
        def parallel(buffers: list[Tensor], dims: list[int], method: str = method, layout: str = layout) -> Any:
            with sd.context_parallel(
                mesh["sequence"], buffers=buffers, buffer_seq_dims=dims, method=method, layout=layout
            ):
                yield

        model = DistributedDataParallel(Model())
        losses = torch.tensor(train(model, half, parallel), dtype=torch.float64)  # type: ignore[arg-type]
        dist.all_reduce(losses)
        one = Model()
        expected = torch.tensor(train(one, batches, lambda *_: contextlib.nullcontext()), dtype=torch.float64)
        with seqkern.use_backend("reference"), seqkern.integrations.sdpa.enable():
            peer_model = Model()
            peer = torch.tensor(train(peer_model, batches, lambda *_: contextlib.nullcontext()), dtype=torch.float64)
        reports = [compare(losses / ranks, peer, expected, name="losses")]
        for (name, a), p, b in zip(
            model.module.named_parameters(), peer_model.parameters(), one.parameters(), strict=True
        ):
            reports.append(compare(a.detach(), p.detach(), b.detach(), name=f"{method} {layout} {name}"))
        assert_passed(reports)


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = seqkern.nn.LayerNorm(8, dtype=torch.float64)
        self.lstm = seqkern.nn.LSTM(8, 12, num_layers=2, dtype=torch.float64)
        self.head = torch.nn.Linear(12, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(self.norm(x))
        return self.head(y)


def fsdp2_of_layer_norm_and_lstm(rank: int, ranks: int) -> None:
    """fully_shard, each process its part of the batch: losses and whole gradients as of one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (ranks,))
    x = torch.randn(6, 8, 8, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    model, one = Recurrent(), Recurrent()
    for module in (model.norm, model.lstm, model):
        fully_shard(module, mesh=mesh)
    for _ in range(2):  # parameters are freed and filled again between
        model.zero_grad()
        one.zero_grad()
        model(x.chunk(ranks, 1)[rank]).pow(2).mean().backward()
        one(x).pow(2).mean().backward()
    with seqkern.use_backend("reference"):
        peer = Recurrent()
        peer(x).pow(2).mean().backward()
    reports = []
    for (name, a), p, b in zip(model.named_parameters(), peer.parameters(), one.parameters(), strict=True):
        assert a.grad is not None
        assert p.grad is not None
        assert b.grad is not None
        reports.append(compare(a.grad.full_tensor(), p.grad, b.grad, name=name))  # type: ignore[attr-defined]
    assert_passed(reports)


def ddp_of_a_split_lstm(rank: int, ranks: int) -> None:
    """distributed.lstm under DDP: the mean of the ranks' gradients of means is one process's."""
    from torch.nn.parallel import DistributedDataParallel

    class Split(Recurrent):
        method = "alltoall"

        def forward(self, x: Tensor) -> Tensor:
            y, _ = sd.lstm(self.norm(x), None, list(self.lstm.parameters()), num_layers=2, method=self.method)
            return self.head(y)

    x = torch.randn(8, 8, 8, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    one = Recurrent()
    one(x).pow(2).mean().backward()
    with seqkern.use_backend("reference"):
        peer = Recurrent()
        peer(x).pow(2).mean().backward()
    for method in ("alltoall", "relay"):
        module = Split()
        module.method = method
        model = DistributedDataParallel(module)
        model(sd.shard_sequence(x, dim=0, layout="contiguous")).pow(2).mean().backward()
        assert_passed(
            [
                compare(a.grad, p.grad, b.grad, name=f"{method} {name}")  # type: ignore[arg-type]
                for (name, a), p, b in zip(module.named_parameters(), peer.parameters(), one.parameters(), strict=True)
            ]
        )


def raises(error: type[Exception], pattern: str, function: Any, *args: Any, **kwargs: Any) -> None:
    import re

    try:
        function(*args, **kwargs)
    except error as e:
        found = str(e)
    else:
        raise AssertionError(f"{pattern}: nothing was raised")
    assert re.search(pattern, found), found


def bad_input(rank: int, ranks: int) -> None:
    """Every check is of what one process sees: all raise, nobody waits."""
    from torch.distributed.device_mesh import init_device_mesh

    x = torch.randn(2, 8, 16, 8)
    y = torch.randn(4, ranks, 6)
    w = [torch.randn(20, 6), torch.randn(20, 5), torch.randn(20), torch.randn(20)]
    attend, mesh = sd.ring_attention, init_device_mesh("cpu", (ranks,))
    square = init_device_mesh("cpu", (2, ranks // 2))
    elsewhere = torch.empty(2, 8, 16, 8, device="meta")
    alone = dist.new_group([0])
    if rank:
        raises(ValueError, "group must be one that this process", attend, x, x, x, group=alone)
    raises(TypeError, "group must be a torch.distributed.ProcessGroup", attend, x, x, x, group=3)
    raises(ValueError, "layout must be one of 'zigzag', 'contiguous', got 'striped'", attend, x, x, x, layout="striped")
    raises(ValueError, "method must be one of .* got 'p2p'", attend, x, x, x, method="p2p")
    odd = x[:, :, :15]
    raises(ValueError, f"multiple of {2 * ranks} for layout 'zigzag'", attend, odd, odd, odd)
    raises(ValueError, "key must have as many rows as query, 16, got 15", attend, x, odd, odd)
    few = x[:, :1]
    raises(ValueError, f"key must have a multiple of {ranks} heads", attend, x, few, few, method="ulysses")
    raises(ValueError, "query must be on cpu, as the group's backend gloo asks, got meta", attend, *[elsewhere] * 3)
    raises(NotImplementedError, "dropout_p must be 0 by method 'ring'", attend, x, x, x, method="ring", dropout_p=0.1)
    raises(NotImplementedError, "dropout_p must be 0 by", attend, x, x, x, method="ulysses", dropout_p=0.1)
    raises(ValueError, "sinks must have shape", attend, x, x, x, sinks=torch.zeros(3))
    raises(ValueError, r"x.shape\[2\] must be a multiple of", sd.shard_sequence, odd)
    raises(ValueError, "dim must be a dimension of x", sd.shard_sequence, x, dim=4)
    raises(TypeError, "x must be a tensor", sd.shard_sequence, [1])
    raises(ValueError, f"n must be a multiple of {ranks}", sd.local_positions, ranks + 1, layout="contiguous")
    raises(TypeError, "n must be a whole number", sd.local_positions, 2.0)
    raises(ValueError, "method must be one of 'alltoall', 'relay'", sd.lstm, y, None, w, method="ring")
    raises(ValueError, "batch that is a multiple", sd.lstm, torch.randn(4, ranks + 1, 6), None, w)
    raises(
        NotImplementedError, "bidirectional by method 'relay'", sd.gru, y, None, w, method="relay", bidirectional=True
    )
    raises(NotImplementedError, "layout must be 'contiguous'", sd.lstm, y, None, w, method="relay", layout="zigzag")
    raises(ValueError, "slices must be", sd.lstm, y, None, w, method="relay", slices=0)
    raises(ValueError, "w_hh", sd.lstm, y, None, [w[0], w[1][:3], *w[2:]], method="relay")
    raises(ValueError, r"hx\[1\] must have 3 dimensions", sd.lstm, y, (y, y[:, :1]), w)

    def context(mesh: Any, **options: Any) -> None:
        with sd.context_parallel(mesh, **options):
            torch.nn.functional.scaled_dot_product_attention(*options.pop("call", (x, x, x)))

    raises(TypeError, "mesh must be a torch.distributed.DeviceMesh", context, "cpu")
    raises(ValueError, "mesh must have one dimension, got 2", context, square)
    raises(ValueError, "buffer_seq_dims must be as many as buffers", context, mesh, buffers=[x], buffer_seq_dims=[])
    raises(ValueError, r"buffer_seq_dims\[0\] must be", context, mesh, buffers=[x], buffer_seq_dims=[4])
    raises(ValueError, "no_restore_buffers must be among", context, mesh, no_restore_buffers={x})
    leaf = x.clone().requires_grad_()
    raises(ValueError, "must not require a gradient", context, mesh, buffers=[leaf], buffer_seq_dims=[2])
    before = x.clone()
    mask = torch.ones(16, 16, dtype=torch.bool)

    def masked() -> None:
        with sd.context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
            torch.nn.functional.scaled_dot_product_attention(x, x, x, mask)

    def nested() -> None:
        with sd.context_parallel(mesh), sd.context_parallel(mesh):
            pass

    raises(NotImplementedError, "attn_mask must be None", masked)
    assert torch.equal(x, before)  # restored, whatever was raised
    raises(RuntimeError, "within another such block", nested)
    from seqkern.integrations import sdpa

    assert sdpa.enabled() is None


def recurrent_layers_under_autocast(rank: int, ranks: int) -> None:
    """Both methods cast as one process does; by relay, states cross in bfloat16, too."""
    g = torch.Generator().manual_seed(10)
    weights = [torch.randn(40, 6, generator=g) * 0.3, torch.randn(40, 10, generator=g) * 0.3]
    x = torch.randn(16, 8, 6, generator=g)
    hx = (torch.randn(1, 8, 10, generator=g), torch.randn(1, 8, 10, generator=g))
    exact, _ = seqkern.lstm(x.double(), tuple(t.double() for t in hx), [w.double() for w in weights])
    with torch.autocast("cpu", torch.bfloat16):
        one, _ = seqkern.lstm(x, hx, weights)
        for method in ("alltoall", "relay"):
            part = sd.shard_sequence(x, dim=0, layout="contiguous")
            y, (h, _) = sd.lstm(part, hx, weights, method=method)
            assert y.dtype == h.dtype == torch.bfloat16
            y = sd.unshard_sequence(y, dim=0, layout="contiguous")
            assert_passed([compare(y, one, exact, name=method)])


def _distributed(mesh: Any, function: Any, tensors: dict[str, Tensor], places: dict[str, Any]) -> tuple[Any, Any]:
    """The output and the gradients on DTensors, and where the output is split."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    leaves = {
        name: distribute_tensor(t, mesh, [places.get(name, Replicate())]).requires_grad_()
        for name, t in tensors.items()
    }
    out = function(**leaves)
    out.pow(2).sum().backward()
    found = {"output": out.detach().full_tensor()}
    return found | {name: t.grad.full_tensor() for name, t in leaves.items()}, out.placements


def dtensor_of_every_op(rank: int, ranks: int) -> None:
    """Split over the batch or over heads, against one process; the result stays split."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    sd.register_dtensor()
    sd.register_dtensor()  # again: nothing
    mesh, g = init_device_mesh("cpu", (ranks,)), torch.Generator().manual_seed(11)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    def check(name: str, function: Any, tensors: dict[str, Tensor], split: dict[str, Any], expected: Any) -> None:
        found, placements = _distributed(mesh, function, tensors, split)
        assert placements == (expected,), (name, placements)

        def of_one(dtype: torch.dtype) -> dict[str, Tensor]:
            leaves = {n: t.to(dtype).clone().requires_grad_() for n, t in tensors.items()}
            out = function(**leaves)
            out.pow(2).sum().backward()
            return {"output": out.detach()} | {n: t.grad for n, t in leaves.items() if t.grad is not None}

        one, exact = of_one(torch.float32), of_one(torch.float64)
        assert found.keys() == exact.keys()
        assert_passed([compare(t, one[n], exact[n], name=f"{name} {n}") for n, t in found.items()])

    batch, heads, length = 4, 8, 12
    qkv = {"query": draw(batch, heads, length, 8)} | {n: draw(batch, 4, length, 8) for n in ("key", "value")}

    def attend(query: Tensor, key: Tensor, value: Tensor, **options: Tensor) -> Any:
        return seqkern.attention(query, key, value, causal=True, **options)

    def of_torch(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return seqkern.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    for d in (0, 1):
        split = {name: Shard(d) for name in qkv}
        check(
            f"attention {d}", attend, qkv | {"sinks": draw(heads), "alibi_slopes": draw(heads).abs()}, split, Shard(d)
        )
        check(f"mask {d}", attend, qkv | {"attn_mask": draw(1, 1, length, length)}, split, Shard(d))
        whole_mask = {"attn_mask": draw(batch, heads, length, length)}
        check(f"own mask {d}", attend, qkv | whole_mask, split | {"attn_mask": Shard(d)}, Shard(d))
        check(f"sdpa {d}", of_torch, qkv, split, Shard(d))
    check("rows", attend, qkv, {name: Shard(2) for name in qkv}, Replicate())  # gathered
    x, rows = draw(batch, 6, 16), {"weight": draw(16), "bias": draw(16)}
    for name in ("layer_norm", "rms_norm"):
        given = rows if name == "layer_norm" else {"weight": rows["weight"]}

        def norm(x: Tensor, name: str = name, **given: Tensor) -> Any:
            return getattr(seqkern, name)(x, (16,), **given)

        def add_norm(x: Tensor, r: Tensor, name: str = name, **given: Tensor) -> Any:
            out, total = getattr(seqkern, f"add_{name}")(x, r, (16,), **given)
            return out + total

        check(name, norm, {"x": x} | given, {"x": Shard(0)}, Shard(0))
        both = {"x": Shard(0), "r": Shard(0)}
        check(f"add_{name}", add_norm, {"x": x, "r": draw(batch, 6, 16)} | given, both, Shard(0))
    for name, d in itertools.product(("swiglu", "geglu"), (0, 2)):
        both = {"gate": Shard(d), "up": Shard(d)}
        check(f"{name} {d}", getattr(seqkern, name), {"gate": x, "up": draw(batch, 6, 16)}, both, Shard(d))
    for cell, gates in (("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1)):
        shapes = ((8 * gates, 16), (8 * gates, 8), (8 * gates,), (8 * gates,))
        weights = {f"w{i}": draw(*shape) * 0.3 for i, shape in enumerate(shapes)}

        def layer(x: Tensor, cell: str = cell, **w: Tensor) -> Any:
            return getattr(seqkern, cell)(x, None, list(w.values()), batch_first=True)[0]

        def step(x: Tensor, h: Tensor, cell: str = cell, **w: Tensor) -> Any:
            out = getattr(seqkern, f"{cell}_cell")(x, (h, h) if cell == "lstm" else h, *w.values())
            return out[0] if cell == "lstm" else out

        check(cell, layer, {"x": x} | weights, {"x": Shard(0)}, Shard(0))
        both = {"x": Shard(0), "h": Shard(0)}
        check(f"{cell}_cell", step, {"x": x[:, 0].clone(), "h": draw(batch, 8)} | weights, both, Shard(0))
    q = distribute_tensor(qkv["query"], mesh, [Shard(0)])
    torch.manual_seed(3)  # on all processes
    dropped = seqkern.attention(q, q, q, dropout_p=0.5).full_tensor()  # type: ignore[attr-defined]
    torch.manual_seed(3)
    assert torch.equal(dropped, seqkern.attention(*[qkv["query"]] * 3, dropout_p=0.5))
    raises(RuntimeError, "mixed torch.Tensor and DTensor", seqkern.attention, q, qkv["query"], qkv["query"])
    plain = {"x": x, "w": draw(32, 16), "u": draw(32, 8)}
    split = {n: distribute_tensor(t, mesh, [Shard(0) if n == "x" else Replicate()]) for n, t in plain.items()}

    def seeded(function: Any, given: dict[str, Tensor], **options: Any) -> Tensor:
        torch.manual_seed(4)
        if function is seqkern.lstm:
            weights = [given["w"], given["u"]]
            return function(given["x"], None, weights, batch_first=True, training=True, **options)[0]
        return function(given["x"], given["x"], (16,), **options)[0]

    for function, options in ((seqkern.lstm, {"zoneout": 0.5}), (seqkern.add_layer_norm, {"dropout_p": 0.5})):
        found = seeded(function, split, **options).full_tensor()  # type: ignore[attr-defined]
        assert torch.equal(found, seeded(function, plain, **options)), options
    raises(RuntimeError, "mixed torch.Tensor and DTensor", seeded, seqkern.lstm, split, recurrent_dropout=0.5)


def memory(rank: int, ranks: int, report: Any, folder: str, method: str, length: int) -> None:
    """The growth of this process's largest resident set in a forward and backward pass, in kB."""

    def status(name: str) -> int:
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith(name))

    def run(rows: int) -> int:
        q, k, v = (torch.randn(1, ranks, rows, 64).requires_grad_() for _ in range(3))
        dist.barrier()
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")  # the largest resident set starts from here
        before = status("VmRSS")
        out = sd.ring_attention(q, k, v, causal=True, window=(64, 0), layout="contiguous", method=method)
        assert isinstance(out, Tensor)
        out.sum().backward()
        return status("VmHWM") - before

    run(512)  # code and buffers of the group
    torch.save(run(length // ranks), f"{folder}/memory{rank}.pt")


OTHERS = (
    "recurrent_layers_under_autocast",
    "dtensor_of_every_op",
    "sequence_and_positions",
    "double_backward_of_exchanges",
    "training_with_context_parallel_and_ddp",
    "fsdp2_of_layer_norm_and_lstm",
    "ddp_of_a_split_lstm",
    "bad_input",
)
