"""The error rule, and running a case in seqkern, in torch and in the reference."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqkern import _library


@dataclass(frozen=True)
class ErrorReport:
    """The error of one tensor and torch's: the largest absolute error, its bound, and the relative L2 error.

    Of several draws all are root mean squares over the draws.
    """

    error: float
    torch_error: float
    unit: float
    bound: float
    relative_l2: float
    torch_relative_l2: float
    passed: bool
    name: str = ""
    draws: int = 1

    @property
    def share_of_bound(self) -> float:
        """The error divided by its bound: above 1 the rule is broken. Infinite if the error is NaN or infinite."""
        if self.bound:
            return self.error / self.bound if math.isfinite(self.error) else math.inf
        return 0.0 if self.error == 0 else math.inf

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        if self.draws > 1:
            verdict += f" over {self.draws} draws"
        return (
            f"{self.name or 'tensor'} {verdict}: error {self.error:.3g}, bound {self.bound:.3g} "
            f"(torch {self.torch_error:.3g}, unit {self.unit:.3g}); "
            f"relative L2 {self.relative_l2:.3g}, torch {self.torch_relative_l2:.3g}"
        )


def compare(
    actual: Tensor,
    torch_result: Tensor,
    oracle: Tensor,
    *,
    factor: float = 2.0,
    terms: Tensor | None = None,
    name: str = "",
) -> ErrorReport:
    """Applies the error rule.

    Args:
        actual: the result under test; its dtype sets the unit.
        torch_result: torch's result in the same dtype, same shape.
        oracle: the float64 result, same shape. Where it is infinite or NaN, `actual` must be exactly that.
        factor: how many times torch's error is allowed.
        terms: float64, any shape: the terms of a result that is a difference. The unit then includes their rounding,
            which remains when the difference cancels.

    Raises:
        ValueError: the shapes differ.
    """
    if not actual.shape == torch_result.shape == oracle.shape:
        raise ValueError(f"shapes differ: {tuple(actual.shape)}, {tuple(torch_result.shape)}, {tuple(oracle.shape)}")
    dtype = actual.dtype
    actual, torch_result, oracle = (t.detach().cpu() for t in (actual, torch_result, oracle))
    wide, theirs, oracle = actual.double(), torch_result.double(), oracle.double()
    finite = oracle.isfinite()
    same_elsewhere = bool(((wide == oracle) | (wide.isnan() & oracle.isnan()))[~finite].all())
    exact, wide = oracle[finite], wide[finite]
    # Where torch is not finite, its error counts as 0.
    theirs = torch.where(theirs[finite].isfinite(), theirs[finite], exact)

    unit = max(_unit(exact, dtype), 0.0 if terms is None else _unit(terms[terms.isfinite()], dtype))
    error, torch_error = _max_abs(wide - exact) if same_elsewhere else math.inf, _max_abs(theirs - exact)
    bound = (factor * torch_error + 2 * unit) * (2 if dtype == torch.float64 else 1)
    norm = exact.norm().item() or 1.0
    return ErrorReport(
        error=error,
        torch_error=torch_error,
        unit=unit,
        bound=bound,
        relative_l2=(wide - exact).norm().item() / norm,
        torch_relative_l2=(theirs - exact).norm().item() / norm,
        passed=error <= bound,  # a NaN error fails
        name=name,
    )


def _unit(exact: Tensor, dtype: torch.dtype) -> float:
    rounded = exact.to(dtype)
    half_last_place = torch.finfo(dtype).eps / 2 * _max_abs(exact)
    return max(_max_abs((rounded + 0.3 - 0.3).double() - rounded.double()), half_last_place)


def _max_abs(t: Tensor) -> float:
    return t.abs().max().item() if t.numel() else 0.0


@dataclass(frozen=True)
class Case:
    """One op and inputs for it: the same call in seqkern, in torch and in the reference.

    `inputs` makes the tensors, in float64. The functions take them by name and return a tensor or a tuple of tensors.
    If the op is not differentiable, gradients are not compared.
    """

    inputs: Callable[[torch.Generator], dict[str, Tensor]]
    ours: Callable[..., Any]
    torch: Callable[..., Any]
    reference: Callable[..., Any]
    # The reference, but a gradient that is a difference is only its first term, which `compare` adds to the unit.
    terms: Callable[..., Any] | None = None
    outputs: tuple[str, ...] | None = None  # their names, as in `run`
    differentiable: bool = True


def run(
    function: Callable[..., Any],
    inputs: dict[str, Tensor],
    cotangent_dtypes: Sequence[torch.dtype] | None = None,
    cotangent_seed: int = 1,
    names: Sequence[str] | None = None,
    differentiate: bool = True,
) -> dict[str, Tensor]:
    """Outputs of function(**inputs) and the gradients of every input, for fixed random cotangents.

    Cotangents are rounded to `cotangent_dtypes` (default: the outputs' own), so that a float64 run can use those of a
    run in another dtype. `names` are the outputs' (default: output, or output 0 and so on).
    """
    leaves = {
        name: t.detach().clone().requires_grad_(differentiate and t.is_floating_point()) for name, t in inputs.items()
    }
    result = function(**leaves)
    outputs = (result,) if isinstance(result, Tensor) else tuple(result)
    if names is None:
        names = ["output"] if len(outputs) == 1 else [f"output {i}" for i in range(len(outputs))]
    tensors = {name: o.detach() for name, o in zip(names, outputs, strict=True)}
    if not differentiate:
        return tensors
    generator = torch.Generator().manual_seed(cotangent_seed)
    cotangents = [
        torch.randn(o.shape, dtype=torch.float64, generator=generator).to(dtype).to(o)
        for o, dtype in zip(outputs, cotangent_dtypes or [o.dtype for o in outputs], strict=True)
    ]
    wanted = {name: t for name, t in leaves.items() if t.requires_grad}
    grads = torch.autograd.grad(outputs, list(wanted.values()), cotangents, allow_unused=True)
    return tensors | {f"grad {name}": g for name, g in zip(wanted, grads, strict=True) if g is not None}


MOST_DRAWS, ELEMENTS, LARGEST_SHARE = 32, 1 << 20, 4.0


def check_case(case: Case, dtype: torch.dtype, *, device: str = "cpu", seed: int = 0) -> list[ErrorReport]:
    """Runs a case in `dtype` under the active backend: one report for every output and gradient.

    Uses the inputs of `seed`. If those break a bound and are few, it adds the inputs of the next seeds. The largest of
    a few errors is a matter of luck, for torch too: now and then a single draw breaks the rule with errors like
    torch's. Then the rule is asked of the root mean squares over the draws, and no error may be above LARGEST_SHARE of
    that bound. (The largest errors over the draws would be those of the worst conditioned draw, and luck again.)
    """
    first = _draw(case, dtype, device, seed)
    reports = _judge(case, first)
    if all(report.passed for report in reports):
        return reports
    elements = sum(t.numel() for t in first[0].values())
    seeds = range(seed + 1, seed + min(MOST_DRAWS, ELEMENTS // max(1, elements)))
    draws = [reports, *(_judge(case, _draw(case, dtype, device, other)) for other in seeds)]
    return reports if len(draws) == 1 else [_together(of_one, dtype) for of_one in zip(*draws, strict=True)]


def _draw(case: Case, dtype: torch.dtype, device: str, seed: int) -> tuple[dict[str, Tensor], ...]:
    """Seqkern's, torch's and the oracle's results."""
    exact = case.inputs(torch.Generator().manual_seed(seed))
    rounded = {name: t.to(dtype).to(device) for name, t in exact.items()}
    options: dict[str, Any] = {"names": case.outputs, "differentiate": case.differentiable}
    ours = run(case.ours, rounded, **options)
    dtypes = [t.dtype for name, t in ours.items() if not name.startswith("grad ")]
    theirs = run(case.torch, rounded, dtypes, **options)
    wide = {name: t.double().cpu() for name, t in rounded.items()}
    results = [ours, theirs, run(case.reference, wide, dtypes, **options)]
    return (*results, run(case.terms, wide, dtypes, **options)) if case.terms else tuple(results)


def _judge(case: Case, draw: tuple[dict[str, Tensor], ...]) -> list[ErrorReport]:
    return [
        compare(*(draw[which][name] for which in range(3)), terms=draw[3][name] if case.terms else None, name=name)
        for name in draw[2]
    ]


def _together(draws: Sequence[ErrorReport], dtype: torch.dtype) -> ErrorReport:
    def mean(values: Iterable[float]) -> float:
        return math.sqrt(sum(value * value for value in values) / len(draws))

    error, torch_error = mean(report.error for report in draws), mean(report.torch_error for report in draws)
    unit = mean(report.unit for report in draws)
    bound = (2 * torch_error + 2 * unit) * (2 if dtype == torch.float64 else 1)
    return ErrorReport(
        error=error,
        torch_error=torch_error,
        unit=unit,
        bound=bound,
        relative_l2=mean(report.relative_l2 for report in draws),
        torch_relative_l2=mean(report.torch_relative_l2 for report in draws),
        passed=error <= bound and all(report.error <= LARGEST_SHARE * bound for report in draws),
        name=draws[0].name,
        draws=len(draws),
    )


@contextlib.contextmanager
def poison() -> Iterator[None]:
    """Fills every uninitialised tensor with NaN, so that elements that no kernel wrote are found."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    _library._extension.seqkern_pool_set_poison(1)
    try:
        yield
    finally:
        _library._extension.seqkern_pool_set_poison(0)
        torch.use_deterministic_algorithms(deterministic)
        settings.fill_uninitialized_memory = fill


def normal(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=generator) * scale


def assert_passed(reports: Iterable[ErrorReport], *about: object) -> None:
    """Raises AssertionError, with `about` and every report that breaks its bound, unless all keep theirs."""
    reports = list(reports)
    failed = [str(report) for report in reports if not report.passed]
    assert reports, about
    assert not failed, f"{about}\n" + "\n".join(failed)
