"""A call that is like an earlier one is not planned again.

What a launcher does before its kernels run (tiles, strides, constants, and Triton's own binding of every argument)
depends on shapes, strides, dtypes and options alone, and takes longer than many kernels. So `planned` keeps of each
kind of call what it allocates and launches, with places for the tensors; the next call of the kind fills the places.

What Triton would look at again is part of the kind (integers, which all follow from it) or is looked at here: whether
tensors begin at a multiple of 16 bytes. A call with one that does not is planned anew and launched by Triton's JIT. On
AMD the JIT, which notes the size of a storage there as well, launches every call, of a plan that is kept all the same.

Triton's launch hooks are called as ever. What its JIT asks at every launch beside (debug, instrumentation) is asked
when a call is planned: `forget()` makes all calls new ones.

What a call costs is measured by benchmarks/host_time.py. Of what is left, half are the results' allocations.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch

from ._common import INTERPRETED, Launch, launch, on, options_of

MOST = 1024  # kinds of calls that are kept: the oldest goes first. A cache that grows by a key a token makes many
_KEPT: dict[tuple, "_Replay"] = {}
_LOCK = threading.Lock()  # of those who keep; those who look one up need none


class Memory:
    """What a plan allocates: results, and what its launches hand on to each other."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.made: list[Callable[[list], torch.Tensor]] = []  # makes each again, given those before it

    def empty(self, like: torch.Tensor, shape, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Contiguous, uninitialised, on the device of `like` and, unless another is given, of its dtype."""
        dtype, shape, device = dtype or like.dtype, tuple(shape), like.device
        strides, elements = [], 1
        for size in reversed(shape):
            strides.insert(0, elements)
            elements *= max(size, 1)
        # a third less time than torch.empty, which has more to read
        return self._keep(lambda _: torch.empty_strided(shape, strides, dtype=dtype, device=device))

    def full(self, like: torch.Tensor, shape, value: float, dtype: torch.dtype | None = None) -> torch.Tensor:
        dtype, shape, device = dtype or like.dtype, tuple(shape), like.device
        return self._keep(lambda _: torch.full(shape, value, dtype=dtype, device=device))

    def view(self, tensor: torch.Tensor, view: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """`view(tensor)` of a tensor that this memory made."""
        place = next(i for i, each in enumerate(self.tensors) if each is tensor)
        return self._keep(lambda before: view(before[place]))

    def _keep(self, make: Callable[[list], torch.Tensor]) -> torch.Tensor:
        self.tensors.append(make(self.tensors))
        self.made.append(make)
        return self.tensors[-1]


class _Replay:
    """One kind of call: what it allocates, launches and returns, its tensors as places among all of a call's."""

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
                arguments[i] = None  # nothing is kept alive
            self.steps.append((call, arguments, slots))

    def __call__(self, tensors) -> tuple | None:
        """The results, or None where a tensor is not aligned as the kept kernels expect it."""
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
    """A launch as a function of its arguments, and those. `kernel` is what was compiled for it, None to ask the JIT."""
    if kernel is None or INTERPRETED or torch.version.hip is not None:
        jit, constants, options = step.kernel[step.grid], step.constants, options_of(step)
        return lambda *arguments: jit(*arguments, **constants, **options), list(step.arguments)
    names = step.kernel.arg_names[len(step.arguments) :]
    grid = (*step.grid, 1, 1)[:3]
    return kernel[grid], [*step.arguments, *(step.constants[name] for name in names)]


def planned(plan: Callable[..., tuple], tensors: tuple, options: tuple, device: torch.device) -> tuple:
    """The results of `plan(memory, *tensors, *options)`, which returns them and the launches that write them.

    The plan may depend on the tensors' shapes, strides and dtypes, on the options and on the device, and on nothing
    else; what its launches use and what it returns are those tensors themselves, not views of them, or from the memory.
    """
    kinds = [None if each is None else (each.dtype, each.shape, each.stride()) for each in tensors]
    key = (plan, device, options, *kinds)
    with on(device):
        kept = _KEPT.get(key)
        if kept is not None:
            results = kept(tensors)
            if results is not None:
                return results
        return _planned(plan, tensors, options, key)


def _planned(plan, tensors, options, key):
    once: set[int] = set()
    apart = []
    for each in tensors:  # self attention: a place each, although the tensors are one
        apart.append(each.detach() if each is not None and id(each) in once else each)
        once.add(id(each))
    memory = Memory()
    results, launches = plan(memory, *apart, *options)
    compiled = [launch(step) for step in launches]
    askew = any(each is not None and each.data_ptr() & 15 for each in tensors)
    if not askew and not any(each != each for each in options):  # a NaN would be found by no call
        replay = _Replay(apart, memory, launches, compiled, results)
        with _LOCK:
            while len(_KEPT) >= MOST:
                del _KEPT[next(iter(_KEPT))]
            _KEPT[key] = replay
    return results


class Repeated:
    """A launch that is made many times, with the same tensors and another last argument, an integer."""

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
    """Drops what was kept, as Triton's own caches are dropped when the device behind them becomes another."""
    with _LOCK:
        _KEPT.clear()
