"""Whether autocast is on, in a way that torch.compile of every torch from 2.10 on can trace.

Dynamo of 2.10 and 2.11 does not know `torch.amp.is_autocast_available`, so this module calls it once, when seqkern is
imported (tests/package/test_versions.py keeps such functions out of compiled code).
"""

from __future__ import annotations

import torch
from torch import Tensor

# The devices known to torch for which torch.is_autocast_enabled raises.
_DEVICES = ("meta", "lazy", "ve", "vulkan", "fpga", "hip")
_WITHOUT = frozenset(device for device in _DEVICES if not torch.amp.is_autocast_available(device))


def autocasts(t: Tensor) -> bool:
    """Whether autocast is on for the tensor's device."""
    device = t.device.type
    return device not in _WITHOUT and torch.is_autocast_enabled(device)
