"""The error rule itself: what it lets pass, what it does not, and how it fares on random options."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from unittest import mock

import pytest
import torch

from seqkern.testing import _checks, attention_case, check_case, compare, glu_case
from seqkern.testing.random_options import Summary, outcomes, random_case, summarise


def test_numbers_stand_for_cases():
    first, again = random_case(12), random_case(12)
    assert str(first) == str(again)
    assert len({str(random_case(number)) for number in range(50)}) == 50
    assert {random_case(number).op for number in range(50)} >= {"attention", "attention_varlen", "layer_norm", "rnn"}


@pytest.mark.parametrize("count", [150, pytest.param(2000, marks=pytest.mark.slow)])
def test_random_options(count, capsys):
    summary = summarise(list(outcomes(count)))
    with capsys.disabled():
        print(f"\n{summary}")
    assert summary.cases == count
    assert summary.passed, summary


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask", "alibi_slopes", "sinks"])
def test_wrong_gradient_is_found(name):
    """A gradient that is off by a thousandth, through an op that is right."""
    case = attention_case(33, 65, head_dim=16, mask="added", slopes="shared", sinks=True)

    def wrong(**tensors):
        seen = tensors[name]
        scaled = torch.where(seen.isfinite(), seen.detach() + 1.001 * (seen - seen.detach()), seen)
        return case.ours(**(tensors | {name: scaled}))

    failed = [report.name for report in check_case(replace(case, ours=wrong), torch.float32) if not report.passed]
    assert failed == [f"grad {name}"]


def test_summary_counts_violations():
    found = list(outcomes(3))
    wrong = replace(found[1].reports[0], error=3 * found[1].reports[0].bound, passed=False)
    summary = summarise([found[0], replace(found[1], reports=[wrong, *found[1].reports[1:]]), found[2]])
    assert (summary.cases, summary.violations, summary.passed) == (3, 1, True)
    assert summary.worst_share == pytest.approx(3)
    assert re.match(r"1 of 3 random option sets \(33\.33%\) break", str(summary))


@pytest.mark.parametrize(("violations", "share", "passed"), [(20, 4.0, True), (21, 1.1, False), (1, 4.1, False)])
def test_many_or_large_violations_fail(violations, share, passed):
    assert Summary(2000, 14000, violations, share, "one").passed == passed


def test_nan_is_the_worst():
    nan = torch.tensor([1.0, float("nan")])
    report = compare(nan, torch.ones(2), torch.ones(2, dtype=torch.float64))
    assert not report.passed
    assert report.share_of_bound == float("inf")


def test_several_draws():
    """Luck in a draw or two is forgiven; a kernel that is a little wrong each time, or once by much, is not."""
    case = glu_case("swiglu", 2, 3)
    one = check_case(case, torch.float32)[0]
    assert one.passed
    assert one.draws == 1

    def judged(*errors, theirs=1.0):
        reports = [[replace(one, error=e, torch_error=theirs, unit=1.0, bound=4.0, passed=e <= 4)] for e in errors]
        with mock.patch.object(_checks, "_judge", side_effect=reports):
            return check_case(case, torch.float32)[0]

    usual = [2.0] * (_checks.MOST_DRAWS - 2)
    lucky = judged(6.0, 5.0, *usual)
    assert lucky.passed
    assert lucky.draws == _checks.MOST_DRAWS
    assert "passed over 32 draws: error 2.38, bound 4 " in str(lucky)
    assert not judged(*[4.2] * _checks.MOST_DRAWS).passed
    assert not judged(6.0, 16.1, *usual).passed
    assert not judged(6.0, math.inf, *usual).passed
    assert not judged(6.0, math.nan, *usual).passed
    assert judged(4.2, 4.2, *[4.2] * len(usual), theirs=1.2).passed


def test_unit_of_a_difference():
    """A difference that is exactly 0 has the rounding of its terms, and no more."""
    zero, terms = torch.zeros(1, dtype=torch.float64), torch.tensor([8.0], dtype=torch.float64)
    last_place = torch.finfo(torch.float32).eps * 8
    near, far = torch.tensor([last_place]), torch.tensor([3 * last_place])
    assert not compare(near, torch.zeros(1), zero).passed
    assert compare(near, torch.zeros(1), zero, terms=terms).passed
    assert not compare(far, torch.zeros(1), zero, terms=terms).passed
