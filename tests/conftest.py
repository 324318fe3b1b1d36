"""Fixtures that every op's tests share: dtypes, instruction-set tiers, poisoned memory, kernels without a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import proven
import pytest
import torch

from seqkern import _library
from seqkern._slices import ALL
from seqkern.testing import assert_passed, poison

ROOT = Path(__file__).parent.parent
if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the processors: one thread each, and in the processes that they start. (Threads that spin while they
    # wait take twice the time from each other.) What is about threads sets their number itself.
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


PROCESSES = {
    "simt",
    "interpreted",
    "wheel",
    "compiled_ahead",
    "type_check",
    "gloo",
    "manual",
}  # fixtures of tests that start long ones


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--unchanged", action="store_true", help="run what is proven for these sources, too (proven.py)")


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`isa` is every tier that this machine can run and that the op has kernels of its own for.

    Of the tiers for bfloat16 alone the slow tests have all, the others the last.
    """
    if "isa" in metafunc.fixturenames:
        own = any(f"test_{slice.name}" in metafunc.module.__name__ for slice in ALL if slice.own_bf16)
        tiers = [i for i in _library.available_isas() if own or i not in _library.BF16_ISAS]
        quick = {i for i in tiers if i not in _library.BF16_ISAS or i == tiers[-1]}
        marked = [pytest.param(i, marks=() if i in quick else pytest.mark.slow) for i in tiers]
        metafunc.parametrize("isa", marked, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What starts processes takes longest and comes first, so that workers come to their ends together.

    In other types the tiers of bfloat16 would only repeat avx512.
    """
    repeated = [item for item in items if _repeats_avx512(getattr(item, "callspec", None))]
    config.hook.pytest_deselected(items=repeated)
    left = set(items).difference(repeated)
    items[:] = [item for item in items if item in left]
    items.sort(key=lambda item: PROCESSES.isdisjoint(getattr(item, "fixturenames", ())))
    for item in items:
        module = item.path.stem
        if proven.stands_for(module, getattr(item, "fixturenames", ())):
            item.user_properties.append(("proof", module))
            if not config.getoption("unchanged", True) and proven.is_proven(module):
                item.add_marker(pytest.mark.skip(reason=proven.reason(module)))


def _repeats_avx512(call: Any) -> bool:
    parameters = call.params if call else {}
    return parameters.get("isa") in _library.BF16_ISAS and parameters.get("dtype", torch.bfloat16) != torch.bfloat16


@pytest.fixture(
    params=[
        pytest.param(("aot_eager", False), id="static"),
        pytest.param(("inductor", True), id="dynamic"),
        pytest.param(("inductor", False), id="static-inductor", marks=pytest.mark.slow),
    ]
)
def compilation(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Arguments of torch.compile, for whole graphs. Inductor compiles C++, which takes long: once an op."""
    torch._dynamo.reset()
    backend, dynamic = request.param
    if dynamic and request.module.__name__.rpartition(".")[2] in ("test_attention", "test_attention_sequences"):
        backend = "aot_eager"  # test_attention_options.py has the same op with more arguments
    return {"backend": backend, "dynamic": dynamic, "fullgraph": True}


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """A tier, forced."""
    with _library.use_cpu_isa(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest) -> Iterator[None]:
    """A fixed seed, and uninitialised memory full of NaN."""
    torch.manual_seed(0)
    with poison():
        yield


@pytest.fixture
def passes() -> Callable[..., None]:
    """Asserts that every report keeps its bound, and prints the ones that do not."""
    return assert_passed


@pytest.fixture
def interpreted() -> Callable[..., None]:
    """Runs `python arguments` where Triton kernels are interpreted on CPU tensors; fails when it does."""

    def run(*arguments: object) -> None:
        environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", *map(str, arguments)]
        result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr

    return run


@pytest.fixture
def every_target() -> None:
    """A name that tells tests/proven.py that a test reads the machine code which the build left."""


@pytest.fixture(scope="session")
def simt_build() -> ModuleType:
    """tests/simt/build.py."""
    spec = importlib.util.spec_from_file_location("simt_build", ROOT / "tests" / "simt" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def simt(simt_build: ModuleType) -> Callable[..., str]:
    """Runs `python arguments` where the CUDA kernels run on CPU tensors (tests/simt); fails when it does.

    Under AddressSanitizer and UndefinedBehaviorSanitizer unless `sanitize=False`, or with a search for races with
    `race=True`; settings as `seed=3, arch=80` become SEQKERN_SIMT_SEED=3 and so on. Triton kernels are interpreted
    there, torch has one thread. Returns what it printed.
    """

    return simt_build.run
