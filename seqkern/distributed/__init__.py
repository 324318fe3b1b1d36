"""Sequences longer than a device's memory, over the processes of torch.distributed: `import seqkern.distributed`."""

from seqkern.distributed._attention import ring_attention
from seqkern.distributed._sequence import local_positions, shard_sequence, unshard_sequence

__all__ = [
    "local_positions",
    "ring_attention",
    "shard_sequence",
    "unshard_sequence",
]
