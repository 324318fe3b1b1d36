"""Whole systems of the field's textbooks, composed of seqkern's modules: to read, to train, to take as a start.

Each file is one system. Every model has `loss(...)`, which trains it; those that write have `start` and `step` for
`seqkern.generate`. `examples/<system>.py` trains each on real data, beside a twin in plain torch.
"""

from seqkern.models.bert import BERT, BERTClassifier, MaskedLM, mask_tokens
from seqkern.models.char_lm import CharAwareLM
from seqkern.models.classifier import CNNClassifier, RNNClassifier, TransformerClassifier
from seqkern.models.encoder_decoder import EncoderDecoder
from seqkern.models.gpt import GPT, GPTBlock
from seqkern.models.recurrent_lm import RecurrentLM
from seqkern.models.seq2seq import RNNEncoderDecoder
from seqkern.models.skip_gram import SkipGram
from seqkern.models.tagger import Tagger
from seqkern.models.tree_classifier import TreeClassifier
from seqkern.models.vit import ViT

__all__ = [
    "BERT",
    "GPT",
    "BERTClassifier",
    "CNNClassifier",
    "CharAwareLM",
    "EncoderDecoder",
    "GPTBlock",
    "MaskedLM",
    "RNNClassifier",
    "RNNEncoderDecoder",
    "RecurrentLM",
    "SkipGram",
    "Tagger",
    "TransformerClassifier",
    "TreeClassifier",
    "ViT",
    "mask_tokens",
]
