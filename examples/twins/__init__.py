"""The models of seqkern.models once more, in plain torch: the same parameters by the same names, nothing of seqkern.

torch.nn's own Transformer layers are not used: in evaluation they take another path, whose results differ.
"""

from examples.twins import (
    bert,
    char_lm,
    classifier,
    encoder_decoder,
    gpt,
    layers,
    recurrent_lm,
    seq2seq,
    skip_gram,
    tagger,
    tree_classifier,
    vit,
)

__all__ = [
    "bert",
    "char_lm",
    "classifier",
    "encoder_decoder",
    "gpt",
    "layers",
    "recurrent_lm",
    "seq2seq",
    "skip_gram",
    "tagger",
    "tree_classifier",
    "vit",
]
