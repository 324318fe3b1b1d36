"""Replays a call like an earlier one without planning it again.

The work of a launcher before its kernels run (tiles, strides, constants, and Triton's own binding of every argument)
depends on shapes, strides, dtypes and options alone, and takes longer than many kernels. So `planned` keeps, for each
kind of call, what it allocates and launches, with placeholders for the tensors. The next call of that kind fills them.

What Triton would specialise on is part of the kind (integers, which all follow from it) or checked here: whether
tensors start at a multiple of 16 bytes. A call with a tensor that does not is planned again and launched by Triton's
JIT. On AMD the JIT also specialises on the size of a storage; there it launches every call, of a plan that is kept all
the same.

Triton's launch hooks are called as ever. The settings that its JIT reads at every launch (debug, instrumentation) are
read when a call is planned: `forget()` makes all calls new.

benchmarks/host_time.py measures the cost of a call. Half of what is left is the allocation of results.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ._common import INTERPRETED, Launch, launch, on, options_of

MOST = 1024  # kinds of calls kept; the oldest goes first. A cache that grows by one key a token makes many
_KEPT: dict[tuple, "_Replay"] = {}
_LOCK = threading.Lock()  # for writers; readers need none


class Memory:
    """What a plan allocates: results, and workspaces between its launches."""

    def __init__(self, device: str | None = None) -> None:
        self.device = device  # where all of it is; None: each tensor beside the one that it is like
        self.tensors: list[torch.Tensor] = []
        self.made: list[Callable[[list], torch.Tensor]] = []  # makes each again, given the ones before

    def empty(self, like: torch.Tensor, shape, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Contiguous, uninitialised, on the device of `like` and, unless another is given, of its dtype."""
        dtype, shape, device = dtype or like.dtype, tuple(shape), self.device or like.device
        strides, elements = [], 1
        for size in reversed(shape):
            strides.insert(0, elements)
            elements *= max(size, 1)
        # a third less time than torch.empty, which parses more arguments
        return self._keep(lambda _: torch.empty_strided(shape, strides, dtype=dtype, device=device))

    def full(self, like: torch.Tensor, shape, value: float, dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype, shape, device = dtype or like.dtype, tuple(shape), self.device or like.device
        return self._keep(lambda _: torch.full(shape, value, dtype=dtype, device=device))

    def view(self, tensor: torch.Tensor, view: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """`view(tensor)` of a tensor that this memory allocated."""
        place = next(i for i, each in enumerate(self.tensors) if each is tensor)
        return self._keep(lambda before: view(before[place]))

    def _keep(self, make: Callable[[list], torch.Tensor]) -> torch.Tensor:
        self.tensors.append(make(self.tensors))
        self.made.append(make)
        return self.tensors[-1]


class _Replay:
    """One kind of call: what it allocates, launches and returns. Tensors are indices into all tensors of a call."""

    def __init__(self, tensors, memory: Memory, launches: list[Launch], compiled: list, results) -> None:
        places = {id(each): i for i, each in enumerate((*tensors, *memory.tensors)) if each is not None}

        def place(tensor: torch.Tensor) -> int:
            if id(tensor) not in places:
                raise RuntimeError("seqkern: a plan uses a tensor that is neither an argument nor from its Memory")
            return places[id(tensor)]

        self.given = [i for i, each in enumerate(tensors) if each is not None]
        self.made = memory.made
        self.results = [place(each) for each in results]
        self.steps = []
        for step, kernel in zip(launches, compiled, strict=True):
            if 0 in step.grid:
                continue
            call, arguments = _prepared(step, kernel)
            slots = [(i, place(each)) for i, each in enumerate(arguments) if isinstance(each, torch.Tensor)]
            for i, _ in slots:
                arguments[i] = None  # keeps no tensor alive
            self.steps.append((call, arguments, slots))

    def __call__(self, tensors) -> tuple | None:
        """The results, or None if a tensor is not aligned as the kept kernels require."""
        bits = 0
        for i in self.given:
            bits |= tensors[i].data_ptr()
        if bits & 15:
            return None
        made: list[torch.Tensor] = []
        for make in self.made:
            made.append(make(made))
        every = (*tensors, *made)
        for call, arguments, slots in self.steps:
            arguments = arguments.copy()
            for i, place in slots:
                arguments[i] = every[place]
            call(*arguments)
        return tuple([every[place] for place in self.results])


def _prepared(step: Launch, kernel: Any) -> tuple[Callable[..., None], list]:
    """A launch as a function, and its arguments. `kernel` is what was compiled for it; None asks the JIT."""
    if kernel is None or INTERPRETED or torch.version.hip is not None:
        jit, constants, options = step.kernel[step.grid], step.constants, options_of(step)
        return lambda *arguments: jit(*arguments, **constants, **options), list(step.arguments)
    names = step.kernel.arg_names[len(step.arguments) :]
    grid = (*step.grid, 1, 1)[:3]
    return kernel[grid], [*step.arguments, *(step.constants[name] for name in names)]


def planned(plan: Callable[..., tuple], tensors: tuple, options: tuple, device: torch.device) -> tuple:
    """The results of `plan(memory, *tensors, *options)`, which returns them and the launches that write them.

    The plan may depend only on the tensors' shapes, strides and dtypes, on the options and on the device. Its launches
    and results may use only those tensors themselves, not views of them, and tensors from the memory.
    """
    kinds = [None if each is None else (each.dtype, each.shape, each.stride()) for each in tensors]
    key = (plan, device, options, *kinds)
    if _noted is not None:
        results, launches = plan(Memory("meta"), *tensors, *options)
        _noted.extend(launches)
        return results
    with on(device):
        kept = _KEPT.get(key)
        if kept is not None:
            results = kept(tensors)
            if results is not None:
                return results
        return _planned(plan, tensors, options, key)


_noted: list[Launch] | None = None


@contextlib.contextmanager
def noted() -> Iterator[list[Launch]]:
    """The launches that calls of `planned` would make. They are not made, and nothing is allocated for them."""
    global _noted
    before, _noted = _noted, []
    try:
        yield _noted
    finally:
        _noted = before


def _planned(plan, tensors, options, key):
    once: set[int] = set()
    apart = []
    for each in tensors:  # self attention: one index each, although the tensors are the same
        apart.append(each.detach() if each is not None and id(each) in once else each)
        once.add(id(each))
    memory = Memory()
    results, launches = plan(memory, *apart, *options)
    compiled = [launch(step) for step in launches]
    askew = any(each is not None and each.data_ptr() & 15 for each in tensors)
    if not askew and not any(each != each for each in options):  # no call would find a NaN again
        replay = _Replay(apart, memory, launches, compiled, results)
        with _LOCK:
            while len(_KEPT) >= MOST:
                del _KEPT[next(iter(_KEPT))]
            _KEPT[key] = replay
    return results


class Repeated:
    """A launch that is repeated with the same tensors and another last argument, an integer."""

    def __init__(self, step: Launch) -> None:
        self._step = step
        self._call: Callable[..., None] | None = None
        self._arguments: list = []

    def __call__(self, last: int) -> None:
        if 0 in self._step.grid:
            return
        if self._call is None:
            step = self._step._replace(arguments=(*self._step.arguments[:-1], last))
            self._call, self._arguments = _prepared(step, launch(step))
            self._place = len(step.arguments) - 1
        else:
            self._arguments[self._place] = last
            self._call(*self._arguments)


def forget() -> None:
    """Drops what was kept, as Triton's own caches are dropped when another device takes the place of this one."""
    with _LOCK:
        _KEPT.clear()
