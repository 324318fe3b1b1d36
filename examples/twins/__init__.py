"""The models of seqkern.models once more, in plain torch: the same parameters by the same names, nothing of seqkern.

torch.nn's own Transformer layers are not used: in evaluation they take another path, whose results differ.
"""

from examples.twins import gpt, layers, recurrent_lm

__all__ = ["gpt", "layers", "recurrent_lm"]
