"""Word vectors, trained on the CPU: `Word2Vec` (skip-gram and CBOW, negative sampling), `FastText` (with subwords)."""

from seqkern.embeddings.fasttext import FastText
from seqkern.embeddings.word2vec import TrainingReport, Word2Vec

__all__ = ["FastText", "TrainingReport", "Word2Vec"]
