"""Sampling: what is kept against the equations and transformers, draws by chi-squared, seeds, edges, errors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import seqkern
from seqkern import reference
from seqkern.ops.sample import GOLDEN, cost
from seqkern.testing import poison

ORDERS = ("transformers", "vllm", "llama.cpp")
INFINITY = math.inf


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def logits(kind, rows=3, classes=1000, dtype=torch.float32):
    z = draw(rows, classes, seed=rows + classes)
    if kind == "tied":
        z = (z * 2).round() / 2
    elif kind == "equal":
        z = torch.zeros_like(z)
    elif kind == "sharp":
        z = z * 20
    elif kind == "flat":
        z = z / 1000
    elif kind == "far from 0":
        z = z + 500
    elif kind == "with impossible ones":
        z = z.masked_fill(draw(rows, classes, seed=1) > 0, -INFINITY).index_fill(1, torch.tensor([0]), 0.0)
    elif kind == "few possible ones":
        z = torch.where(torch.arange(classes) % (classes // 3 + 1) == 0, z, -INFINITY)
    return z.to(dtype)


KINDS = (
    "plain", "tied", "equal", "sharp", "flat", "far from 0", "with impossible ones", "few possible ones",
)  # fmt: skip
OPTIONS = {
    "none": {},
    "temperature": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 50},
    "top_k of one": {"top_k": 1},
    "top_k of all": {"top_k": 10**9},
    "top_p": {"top_p": 0.9},
    "top_p of one": {"top_p": 0.0},
    "top_p of nearly all": {"top_p": 0.9999},
    "min_p": {"min_p": 0.05, "temperature": 1.5},
    "typical_p": {"typical_p": 0.3},
    "every": {"temperature": 0.8, "top_k": 300, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.9},
    "of rows": {
        "temperature": torch.tensor([1.0, 0.5, 0.0]), "top_k": torch.tensor([0, 5, 10]),
        "top_p": torch.tensor([0.5, 1.0, 0.2]), "min_p": torch.tensor([0.0, 0.3, 0.1]),
    },
}  # fmt: skip


def check_same(z, options):
    """Of seqkern and of the equations: which tokens are left, their logits, tokens drawn and log-probabilities."""
    with poison():
        left = seqkern.filter_logits(z, **options)
        draws = [
            seqkern.sample(z, seed=5, position=position, return_logprob=which, **options)
            for position, which in ((0, "processed"), (1, "raw"), (2**40, "processed"))
        ]
    with seqkern.use_backend("reference"):
        expected = seqkern.filter_logits(z, **options)
        assert torch.equal(left > -INFINITY, expected > -INFINITY)
        torch.testing.assert_close(left, expected)
        for (token, logprob), (position, which) in zip(draws, ((0, "processed"), (1, "raw"), (2**40, "processed")),
                                                        strict=True):  # fmt: skip
            tokens, logprobs = seqkern.sample(z, seed=5, position=position, return_logprob=which, **options)
            assert torch.equal(token, tokens)
            torch.testing.assert_close(logprob, logprobs)
    return left


# ---- what is left -------------------------------------------------------------------------------------------------


# In every order those that ties and filters tell apart, the others in one.
PAIRS = [(kind, order) for kind in KINDS for order in (ORDERS if kind in ("plain", "tied") else ORDERS[:1])]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("kind", "order"), PAIRS)
def test_against_the_equations(kind, options, order, isa):
    check_same(logits(kind), options | {"order": order})


@pytest.mark.parametrize("classes", [1, 2, 15, 16, 17, 255, 256, 257, 5000])
def test_sizes(classes, dtype, isa):
    for name in ("top_k", "top_p", "every"):
        check_same(logits("plain", classes=classes, dtype=dtype), OPTIONS[name])


@pytest.mark.parametrize("order", ORDERS)
def test_history(order, isa):
    z = logits("tied")
    history = torch.randint(-3, 1003, (3, 40), generator=torch.Generator().manual_seed(1))
    history[0, 1:] = history[0, 0]  # one token again and again counts once
    penalties = torch.tensor([1.5, 0.7, 1.0])
    for penalty, lengths in itertools.product((1.3, penalties), (None, torch.tensor([40, 0, 7]))):
        options = {"repetition_penalty": penalty, "history": history, "history_lengths": lengths, "order": order}
        check_same(z, options)
        check_same(z, options | OPTIONS["every"])
    options = {"repetition_penalty": 2.0, "history": torch.tensor([[5, 6, 5]]), "order": order}
    changed = seqkern.filter_logits(torch.tensor([[0.0, 0, 0, 0, 0, 3, -3]]), **options)
    assert changed.tolist() == [[0, 0, 0, 0, 0, 1.5, -6]]


def test_the_orders_differ():
    """llama.cpp's temperature is last: what it leaves does not depend on it."""
    z = torch.tensor([3.0, 2, 1])
    kept = {o: (seqkern.filter_logits(z, top_p=0.8, temperature=0.5, order=o) > -INFINITY).tolist() for o in ORDERS}
    assert kept["llama.cpp"] == [True, True, False]
    assert kept["transformers"] == kept["vllm"] == [True, False, False]
    z = torch.tensor([0.4, 0.3, 0.1, 0.1, 0.1]).log()  # min_p first: the first token is then 4/7 of what is left
    kept = {o: int((seqkern.filter_logits(z, top_p=0.55, min_p=0.5, order=o) > -INFINITY).sum()) for o in ORDERS}
    assert kept == {"transformers": 2, "vllm": 1, "llama.cpp": 2}


def test_ties(isa):
    z = torch.tensor([1.0, 2, 2, 0, 2, 2])
    assert (seqkern.filter_logits(z, top_k=2) > 0).tolist() == [False, True, True, False, True, True]
    exact = seqkern.filter_logits(z, top_k=2, order="llama.cpp")
    assert (exact > 0).tolist() == [False, True, True, False, False, False]
    for order in ORDERS:
        half = seqkern.filter_logits(torch.zeros(10), top_p=0.9, order=order)
        assert half.isfinite().tolist() == [True] * 9 + [False]
    assert seqkern.sample(z, temperature=0) == 1


def near_a_limit(z, options):
    """Rows where a probability that is added up lies within 2e-6 of a limit, which rounding decides."""
    near = torch.zeros(len(z), dtype=torch.bool)
    if options.get("top_p") is not None:
        mass = z.sort(descending=True).values.softmax(-1).cumsum(-1)
        near |= ((mass - options["top_p"]).abs() < 2e-6).any(-1)
    if options.get("typical_p") is not None:
        log_p = z.log_softmax(-1)
        distance = (-log_p + (log_p * log_p.exp()).nansum(-1, keepdim=True)).abs()
        order = distance.argsort(-1)
        mass = log_p.exp().gather(1, order).cumsum(-1)
        near |= ((mass - options["typical_p"]).abs() < 2e-6).any(-1)
        nearest = distance.sort().values
        near |= (nearest.diff() < 1e-5).any(-1) & (nearest.diff() != 0).any(-1)
    return near


@pytest.mark.parametrize("order", ["transformers", "vllm"])
def test_transformers_leaves_the_same(order):
    """On 10,000 rows, by its own warpers in float64: as many tokens, with the same logits (of equal ones any)."""
    process = pytest.importorskip("transformers.generation.logits_process")
    generator = torch.Generator().manual_seed(0)
    compared = left_out = 0
    for number in range(500):
        z = torch.randn(20, (64, 300, 2000)[number % 3], generator=generator) * (0.5, 2, 8)[number // 3 % 3]
        if number % 2:
            z = (z * 4).round() / 4
        ids = torch.randint(z.size(1), (20, 9), generator=generator)
        chosen = [(number >> bit) % 4 for bit in range(5)]
        options = {
            "temperature": (1.0, 0.7, 2.0, 1.3)[chosen[0]], "top_k": (None, 1, 20, 200)[chosen[1]],
            "top_p": (None, 0.31, 0.87, 0.993)[chosen[2]], "min_p": (None, 0.013, 0.11, 0.47)[chosen[3]],
            "typical_p": (None, None, 0.23, 0.91)[chosen[4]],
        }  # fmt: skip
        penalty = 1.3 if number % 5 == 0 else None
        theirs = z.double()
        near = torch.zeros(len(z), dtype=torch.bool)
        if penalty:
            theirs = process.RepetitionPenaltyLogitsProcessor(penalty)(ids, theirs)
        warpers = {
            "temperature": process.TemperatureLogitsWarper, "top_k": process.TopKLogitsWarper,
            "top_p": process.TopPLogitsWarper, "min_p": process.MinPLogitsWarper,
            "typical_p": process.TypicalLogitsWarper,
        }  # fmt: skip
        names = list(warpers) if order == "transformers" else ["temperature", "min_p", "top_k", "top_p", "typical_p"]
        for name in names:
            if options[name] is not None:
                near |= near_a_limit(theirs, {name: options[name]})
                theirs = warpers[name](options[name])(None, theirs)
        history = {"repetition_penalty": penalty, "history": ids} if penalty else {}
        ours = seqkern.filter_logits(z, order=order, **options, **history)
        compared += int((~near).sum())
        left_out += int(near.sum())
        for mine, other in zip(ours[~near].sort().values, theirs[~near].float().sort().values, strict=True):
            assert torch.equal(mine > -INFINITY, other > -INFINITY), (number, options)
            torch.testing.assert_close(mine, other)
    assert compared + left_out == 10_000
    assert left_out <= 2_000, f"only {compared} rows are compared"


# ---- draws --------------------------------------------------------------------------------------------------------


def surprise(observed, expected):
    """The chi-squared statistic in standard deviations above its mean, of classes that are expected often enough."""
    often = expected >= 5
    rest = (~often).any()
    o = torch.cat((observed[often], observed[~often].sum()[None])) if rest else observed[often]
    e = torch.cat((expected[often], expected[~often].sum()[None])) if rest else expected[often]
    degrees = len(o) - 1
    return float((((o - e) ** 2 / e).sum() - degrees) / (2 * degrees) ** 0.5)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.6, "top_k": 20}, {"top_p": 0.8}, {"typical_p": 0.7}])
@pytest.mark.parametrize("by", ["position", "seed", "row"])
def test_draws_have_the_probabilities(by, options, isa):
    """Over positions of a seed, over seeds, and over the rows of one call."""
    count, z = 40_000, draw(60) * 2
    if by == "row":
        tokens = seqkern.sample(z.expand(count, -1), seed=3, **options)
    else:
        numbers = torch.arange(count)
        same = torch.full((count,), 7)
        seeds, positions = (same, numbers) if by == "position" else (numbers, same)
        tokens = seqkern.sample(z.expand(count, -1), seed=seeds, position=positions, **options)
    expected = seqkern.filter_logits(z, **options).double().softmax(0) * count
    observed = tokens.bincount(minlength=60).double()
    assert not observed[expected == 0].any()
    assert abs(surprise(observed[expected > 0], expected[expected > 0])) < 5


def test_neighbouring_seeds_and_positions_are_independent():
    """Pairs of draws from two equally probable tokens."""
    z, count = torch.zeros(20_000, 2), 20_000
    numbers = torch.arange(count)
    for first, second in (
        ({"seed": numbers, "position": 0}, {"seed": numbers, "position": 1}),
        ({"seed": numbers, "position": 0}, {"seed": numbers + 1, "position": 0}),
        ({"seed": 3, "position": 5}, {"seed": 4, "position": 5}),
    ):
        pairs = 2 * seqkern.sample(z, **first) + seqkern.sample(z, **second)
        expected = torch.full((4,), count / 4, dtype=torch.float64)
        assert abs(surprise(pairs.bincount(minlength=4).double(), expected)) < 5


def test_the_number_is_philox():
    """As reference/dropout.py has it, whose words are checked against known ones."""
    seeds, positions = torch.tensor([0, 1, -1, 2**62]), torch.tensor([0, 5, 2**40, -7])
    u = reference.uniform(seeds, positions)
    assert ((u > 0) & (u < 1)).all()
    z = torch.zeros(4, 1 << 20)  # the token tells 20 bits of it
    tokens = seqkern.sample(z, seed=seeds, position=positions)
    assert torch.equal(tokens, (u * (1 << 20)).long())


@pytest.mark.parametrize("options", [OPTIONS["none"], OPTIONS["every"]])
def test_a_row_is_the_same_whatever_is_beside_it(options, isa):
    z, seeds, positions = logits("plain", rows=40), torch.arange(40) * 17, torch.arange(40) + 3
    tokens, logprobs = seqkern.sample(z, seed=seeds, position=positions, return_logprob=True, **options)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            for rows in (torch.arange(40).flip(0), torch.tensor([5]), torch.tensor([3, 3, 39])):
                again = seqkern.sample(
                    z[rows], seed=seeds[rows], position=positions[rows], return_logprob=True, **options
                )
                assert torch.equal(again[0], tokens[rows])
                assert torch.equal(again[1], logprobs[rows])
    finally:
        torch.set_num_threads(before)


def test_a_number_for_all_rows_is_one_for_each():
    z, rows = logits("plain"), torch.arange(3)
    tokens = seqkern.sample(z, seed=11, position=4, top_p=0.9, top_k=40)
    of_rows = {"top_p": torch.full((3,), 0.9).double(), "top_k": torch.full((3,), 40)}
    again = seqkern.sample(z, seed=11 + GOLDEN * rows, position=torch.full((3,), 4), **of_rows)
    assert torch.equal(tokens, again)


def test_without_a_seed_torch_draws_one():
    z = torch.zeros(8, 1 << 20)
    torch.manual_seed(5)
    first, second = seqkern.sample(z), seqkern.sample(z)
    torch.manual_seed(5)
    assert torch.equal(seqkern.sample(z), first)
    assert not (first == second).any()
    assert len(first.unique()) == 8


# ---- layouts and edges --------------------------------------------------------------------------------------------


def test_layouts(isa):
    z = logits("plain")
    expected = seqkern.sample(z, seed=3, **OPTIONS["every"])
    padded = torch.full((3, 1100), 99.0)
    padded[:, 50:1050] = z
    for layout in (
        padded[:, 50:1050], z.t().contiguous().t(), z.repeat_interleave(2, 1)[:, ::2], z[None], z[:, None],
    ):  # fmt: skip
        before = layout.clone()
        tokens = seqkern.sample(layout, seed=3, **OPTIONS["every"])
        assert tokens.shape == layout.shape[:-1]
        assert torch.equal(tokens.flatten(), expected)
        assert torch.equal(layout, before)
    assert seqkern.sample(z[0], seed=3).shape == ()
    assert seqkern.filter_logits(z[None]).shape == (1, 3, 1000)


def test_empty(isa):
    assert seqkern.sample(torch.zeros(0, 5)).shape == (0,)
    assert seqkern.filter_logits(torch.zeros(2, 0, 5), top_k=2).shape == (2, 0, 5)
    tokens, logprobs = seqkern.sample(torch.zeros(0, 5), return_logprob="raw")
    assert logprobs.shape == tokens.shape == (0,)


def test_one_possible_token(isa):
    z = torch.full((2, 300), -INFINITY)
    z[0, 299], z[1, 0] = -1e30, 1e30
    for options in OPTIONS.values():
        if "of rows" not in options and not any(isinstance(v, torch.Tensor) for v in options.values()):
            tokens, logprobs = seqkern.sample(z, seed=1, return_logprob=True, **options)
            assert tokens.tolist() == [299, 0]
            assert logprobs.tolist() == [0, 0]


@pytest.mark.parametrize("bad", [math.nan, INFINITY])
def test_bad_rows(bad, isa):
    z = logits("plain")
    z[1, 999] = bad
    for function in (seqkern.sample, seqkern.filter_logits):
        with pytest.raises(RuntimeError, match=f" {function.__name__}: .* must not be nan or infinite, but row 1 is"):
            function(z, top_k=3)
        with pytest.raises(RuntimeError, match="all logits of row 0 are minus infinity: no token is possible"):
            function(torch.full((1, 5), -INFINITY))


@pytest.mark.parametrize("order", ORDERS)
def test_what_would_overflow(order, isa):
    """Tiny temperatures are 0; quotients and penalties that make a logit infinite raise, instead of a token of nan."""
    z = torch.tensor([[1.0, 3.0, 2.0]])
    for temperature in (1e-45, 1e-31):
        assert seqkern.sample(z, temperature=temperature, order=order) == 1
    assert seqkern.sample(z, temperature=1e-29, order=order) == 1
    for sign in (1, -1):
        with pytest.raises(RuntimeError, match="must not be nan or infinite|are minus infinity"):
            seqkern.sample(sign * 1e30 * z, temperature=1e-20, order=order)
    with pytest.raises(RuntimeError, match="must not be nan or infinite"):
        seqkern.sample(z, repetition_penalty=1e-45, history=torch.tensor([[1]]), order=order)
    with pytest.raises(RuntimeError, match="must not be nan or infinite"):
        seqkern.sample(z * 1e38, repetition_penalty=0.1, history=torch.tensor([[1]]), order=order)
    far = seqkern.sample(-1e38 * z, repetition_penalty=10.0, history=torch.tensor([[0, 1]]), order=order, temperature=0)
    assert far == 2  # the others became minus infinity


def test_no_gradient(isa):
    z = logits("plain").requires_grad_()
    tokens, logprobs = seqkern.sample(z, seed=3, return_logprob=True)
    assert not logprobs.requires_grad
    assert not seqkern.filter_logits(z).requires_grad
    assert torch.equal(tokens, seqkern.sample(z.detach(), seed=3))


def test_opcheck():
    z, row = logits("plain"), torch.ones(3)
    numbers = (1.0, None, 5, None, 0.9, None, 0.1, None, 0.8, None, 1.2, None)
    of_rows = (1.0, row.double(), 0, row.long(), 1.0, row.double() / 2, 0.0, None, 1.0, None, 1.0, row.double() + 1)
    history = torch.zeros(3, 4, dtype=torch.int64)
    for given, past in ((numbers, (None, 0, None)), (of_rows, (history, 4, row.long()))):
        torch.library.opcheck(torch.ops.seqkern.sample.default, (z, 3, None, 5, None, *given, *past, 0, 1))
        torch.library.opcheck(torch.ops.seqkern.sample.default, (z, 0, row.long(), 0, row.long(), *given, *past, 1, 0))
        torch.library.opcheck(torch.ops.seqkern.filter_logits.default, (z, *given, *past, 2))


def test_compiled(compilation):
    z = logits("plain")

    def model(z):
        token, logprob = seqkern.sample(z * 2, temperature=0.8, top_k=20, seed=3, position=9, return_logprob=True)
        return token + 1, logprob, seqkern.filter_logits(z, top_p=0.5)

    torch.testing.assert_close(torch.compile(model, **compilation)(z), model(z))


def test_vmap():
    z = draw(4, 3, 50)
    tokens = torch.func.vmap(lambda z: seqkern.sample(z, seed=3, top_k=5))(z)
    assert torch.equal(tokens, torch.stack([seqkern.sample(each, seed=3, top_k=5) for each in z]))
    left = torch.func.vmap(lambda z: seqkern.filter_logits(z, top_k=5))(z)
    assert torch.equal(left, seqkern.filter_logits(z, top_k=5))


def test_symbolic_trace():
    graph = torch.fx.symbolic_trace(lambda z: seqkern.sample(z, top_k=3, seed=1) + 1)
    assert "sample" in str(graph.graph)
    assert torch.equal(graph(logits("plain")), seqkern.sample(logits("plain"), top_k=3, seed=1) + 1)


# ---- Triton, errors, cost -----------------------------------------------------------------------------------------


def test_interpreted_triton(interpreted):
    interpreted(__file__)


def interpreted_cases() -> None:
    with seqkern.use_backend("triton"):
        for order, (name, options) in itertools.product(ORDERS, OPTIONS.items()):
            for kind in ("tied", "with impossible ones") if name in ("every", "top_p", "typical_p") else ("tied",):
                check_same(logits(kind, classes=100), options | {"order": order})
        for dtype in (torch.float64, torch.bfloat16, torch.float16):
            check_same(logits("plain", classes=2100, dtype=dtype), OPTIONS["every"])  # two blocks of a row
        z, ids = logits("tied", classes=50), torch.randint(-3, 53, (3, 20))
        history = {"history": ids, "repetition_penalty": torch.tensor([1.5, 0.7, 1.0])}
        check_same(z, history | {"history_lengths": torch.tensor([20, 0, 7])})
        check_same(z, history | OPTIONS["every"])
        z = logits("plain", classes=40)
        z[0, 3], z[1] = math.nan, -INFINITY
        tokens, logprobs = seqkern.sample(z, top_k=4, seed=1, return_logprob=True)
        assert tokens[:2].tolist() == [0, 0]
        assert logprobs.isnan().tolist() == [True, True, False]


Z = torch.zeros(2, 3, 5)
H = torch.zeros(2, 3, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        (TypeError, {"temperature": "hot"}, "temperature must be a number or a tensor of them, got 'hot'"),
        (ValueError, {"temperature": -1.0}, "temperature must be at least 0, got -1.0"),
        (ValueError, {"temperature": INFINITY}, "temperature must be at least 0, got inf"),
        (ValueError, {"temperature": math.nan}, "temperature must be at least 0, got nan"),
        (TypeError, {"top_k": 2.5}, "top_k must be a whole number or a tensor of them, got 2.5"),
        (TypeError, {"top_k": True}, "top_k must be a whole number or a tensor of them, got True"),
        (ValueError, {"top_k": -1}, "top_k must be at least 0, got -1"),
        (ValueError, {"top_k": 2**63}, "top_k must be at least 0, got 9223372036854775808"),
        (TypeError, {"top_k": torch.ones(2, 3)}, "top_k must have whole numbers, got torch.float32"),
        (ValueError, {"top_p": 1.1}, "top_p must be at least 0 and at most 1, got 1.1"),
        (TypeError, {"top_p": torch.ones(2, 3).long()}, "top_p must have floating point numbers, got torch.int64"),
        (ValueError, {"top_p": torch.ones(3)}, r"top_p must be a number or have the rows' shape \(2, 3\), got \(3,\)"),
        (ValueError, {"min_p": -0.1}, "min_p must be at least 0 and at most 1, got -0.1"),
        (ValueError, {"typical_p": 0.0}, "typical_p must be above 0 and at most 1, got 0.0"),
        (ValueError, {"repetition_penalty": 1.2}, "repetition_penalty needs history, got None"),
        (ValueError, {"history": H}, "history needs repetition_penalty, got None"),
        (ValueError, {"history_lengths": 3}, "history_lengths needs history, got None"),
        (ValueError, {"history": H, "repetition_penalty": 0.0}, "repetition_penalty must be above 0, got 0.0"),
        (
            TypeError,
            {"history": H.int(), "repetition_penalty": 1.1},
            "history must be an int64 tensor, got torch.int32",
        ),
        (ValueError, {"history": H[0], "repetition_penalty": 1.1}, r"history must have shape \(2, 3, 'L'\)"),
        (ValueError, {"order": "best"}, 'order must be "transformers", "vllm" or "llama.cpp", got \'best\''),
        (ValueError, {"top_p": torch.ones(2, 3, device="meta")}, "top_p must be on logits's device cpu, got meta"),
    ],
)
def test_errors(error, options, message):
    for function in (seqkern.sample, seqkern.filter_logits):
        with pytest.raises(error, match=message):
            function(Z, **options)


@pytest.mark.parametrize(
    ("error", "arguments", "options", "message"),
    [
        (TypeError, ([1.0],), {}, "logits must be a tensor, got list"),
        (TypeError, (Z.long(),), {}, "logits must be float64, float32, bfloat16 or float16, got torch.int64"),
        (ValueError, (Z[..., :0],), {}, r"logits must have shape \(..., V\) with V >= 1, got \(2, 3, 0\)"),
        (TypeError, (Z,), {"seed": 1.5}, "seed must be a whole number of 64 bits, or an int64 tensor, got 1.5"),
        (TypeError, (Z,), {"seed": 2**63}, "seed must be a whole number of 64 bits"),
        (TypeError, (Z,), {"seed": torch.ones(2, 3)}, "seed must be int64, got torch.float32"),
        (ValueError, (Z,), {"position": H[0, 0]}, r"position must be a number or have the rows' shape \(2, 3\)"),
        (ValueError, (Z,), {"return_logprob": "all"}, 'return_logprob must be False, True, "processed" or "raw"'),
        (RuntimeError, (Z,), {"temperature": torch.full((2, 3), -1.0)}, "temperature must be at least 0, got -1 in"),
        (RuntimeError, (Z,), {"top_p": torch.full((2, 3), math.nan)}, "top_p must be at least 0 and at most 1, got"),
    ],
)  # fmt: skip
def test_errors_of_sample(error, arguments, options, message):
    with pytest.raises(error, match=message):
        seqkern.sample(*arguments, **options)


def test_cost():
    assert cost(2, 100, torch.bfloat16).bytes == 400


if __name__ == "__main__":
    interpreted_cases()
