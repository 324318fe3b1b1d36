"""The Triton kernels of convolutions over rows."""

import torch

from .._common import accumulator
from . import conv1d, conv1d_max
from .conv1d import conv1d_bwd, conv1d_fwd
from .conv1d_max import conv1d_max_bwd, conv1d_max_fwd

__all__ = ["aot_configurations", "conv1d_bwd", "conv1d_fwd", "conv1d_max_bwd", "conv1d_max_fwd", "explained"]


def explained(op, x, weight=None, *_):
    """The launches of a call, forward and backward; nothing is launched."""
    if x.dim() != 3 or weight is None:
        return []
    if op == "conv1d":
        return conv1d.plans(x, weight, None, None)
    return conv1d_max.plans(x, weight, None, None, None, 1)


def aot_configurations(limit, thorough):
    """The launches that tests/triton/test_triton_aot.py compiles, as (name, launch). They use little shared memory."""
    dtypes = (torch.bfloat16, torch.float32, torch.float64, torch.float16) if thorough else (torch.bfloat16,)
    for dtype in dtypes:
        weight = torch.empty(100, 5, 128, dtype=dtype, device="meta")
        bias = torch.empty(100, dtype=accumulator(dtype), device="meta")
        for packed in (False, True):
            x = torch.empty((100, 128) if packed else (4, 25, 128), dtype=dtype, device="meta")
            whole = torch.empty(5 if packed else 4, dtype=torch.int64, device="meta")
            of = (None, whole) if packed else (whole, None)
            launches = [
                step
                for activation in range(4)
                for step in conv1d_max.plans(x, weight, bias if activation else None, *of, activation)
                if activation == 0 or step.name == "conv1d_max_forward"
            ]
            if not packed:
                launches += [*conv1d.plans(x, weight, None, None), *conv1d.plans(x, weight, bias, whole)]
            for number, launch in enumerate(launches):
                kind = f"{number}{'-packed' * packed}"
                yield f"{launch.name}-{kind}-{str(dtype).removeprefix('torch.')}", launch
