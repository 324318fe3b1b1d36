"""Sequences longer than a device's memory, over the processes of torch.distributed: `import seqkern.distributed`."""

from seqkern.distributed._attention import ring_attention
from seqkern.distributed._context import context_parallel
from seqkern.distributed._dtensor import register_dtensor
from seqkern.distributed._rnn import gru, lstm, rnn_relu, rnn_tanh
from seqkern.distributed._sequence import local_positions, shard_sequence, unshard_sequence

__all__ = [
    "context_parallel",
    "gru",
    "local_positions",
    "lstm",
    "register_dtensor",
    "ring_attention",
    "rnn_relu",
    "rnn_tanh",
    "shard_sequence",
    "unshard_sequence",
]
