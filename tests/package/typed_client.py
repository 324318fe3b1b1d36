"""A user's program, for `mypy --strict`: every public function and module, and what comes back.

Lines with `type: ignore` are mistakes, which a type checker has to report (test_build.py takes the comments out).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from typing_extensions import assert_type

import seqkern
from seqkern.embeddings import FastText, Word2Vec
from seqkern.models import GPT, RecurrentLM
from seqkern.nn import AddLayerNorm, AddRMSNorm
from seqkern.ops.attention_rnn import AttentionRnnOutput, AttentionRnnState

Pair = tuple[Tensor, Tensor]


def attention(wanted: bool) -> None:
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    assert_type(seqkern.attention(q, k, v), Tensor)
    assert_type(seqkern.attention(q, k, v, causal=True, window=(3, None), softcap=20.0, return_lse=False), Tensor)
    out, lse = assert_type(seqkern.attention(q, k, v, sinks=torch.zeros(4), return_lse=True), Pair)
    assert_type(seqkern.attention(q, k, v, return_lse=wanted), Tensor | Pair)
    assert_type(seqkern.merge_attention(out, lse, out, lse), Pair)
    assert_type(seqkern.attention_weights(q, k, torch.tensor([5]), causal=True), Tensor)
    assert_type(seqkern.scaled_dot_product_attention(q, q, q, None, 0.0, True, scale=0.5), Tensor)
    options: dict[str, Any] = {"is_causal": True}
    assert_type(seqkern.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options), Tensor)

    x, starts = torch.randn(6, 2, 8), torch.tensor([0, 2, 6])
    assert_type(seqkern.attention_varlen(x, x, x, starts, starts, 4, 4, causal=True), Tensor)
    assert_type(seqkern.attention_varlen(x, x, x, starts, starts, 4, 4, return_lse=True), Pair)
    assert_type(seqkern.attention_varlen(x, x, x, starts, starts, 4, 4, return_lse=wanted), Tensor | Pair)

    cache, lengths, new = torch.zeros(2, 2, 16, 8), torch.tensor([3, 5]), torch.randn(2, 2, 1, 8)
    newest = torch.randn(2, 4, 1, 8)
    assert_type(seqkern.attention_decode(newest, cache, cache.clone(), lengths, key=new, value=new), Tensor)
    assert_type(seqkern.attention_decode(newest, cache, cache, lengths, return_lse=True), Pair)
    assert_type(seqkern.attention_decode(newest, cache, cache, lengths, return_lse=wanted), Tensor | Pair)


def additive(wanted: bool) -> None:
    q, memory, w = torch.randn(2, 3, 8), torch.randn(2, 6, 8), torch.randn(8)
    lengths = torch.tensor([6, 2])
    assert_type(seqkern.additive_attention(q, memory, memory, w, w, key_lengths=lengths), Tensor)
    assert_type(seqkern.additive_attention(q, memory, memory, w, return_weights=True), Pair)
    assert_type(seqkern.additive_attention(q, memory, memory, w, return_lse=True), Pair)
    assert_type(
        seqkern.additive_attention(q, memory, memory, w, return_weights=wanted, return_lse=wanted),
        Tensor | Pair | tuple[Tensor, Tensor, Tensor],
    )
    attend = seqkern.nn.AdditiveAttention(8, 8)
    assert_type(attend.forward(q[:, 0], memory, key_lengths=lengths), tuple[Tensor, Tensor | None])
    keys = attend.project_key(memory)
    assert_type(attend.forward(q, memory, projected_key=keys), tuple[Tensor, Tensor | None])
    assert_type(seqkern.nn.BilinearAttention(8, 8).forward(q, memory, need_weights=True), tuple[Tensor, Tensor | None])
    assert_type(seqkern.nn.DotAttention(scale=None).forward(q, memory), tuple[Tensor, Tensor | None])


def decoding() -> None:
    x, memory, w = torch.randn(2, 3, 8), torch.randn(2, 6, 8), torch.randn(32, 16)
    found = seqkern.attention_rnn(x, memory, memory, w, w[:, :8], return_weights=True, key_lengths=torch.tensor([6, 2]))
    assert_type(found, AttentionRnnOutput)
    assert_type(found.state, AttentionRnnState)
    assert_type(found.state.c, Tensor | None)
    decoder = seqkern.nn.AttentionDecoder(8, 8, 8, cell="gru", order="luong", score="bilinear")
    keys = decoder.project_key(memory)
    assert_type(decoder.forward(x, memory, projected_key=keys), AttentionRnnOutput)
    assert_type(decoder.forward(x[:, 0], memory, state=(x[:, 0], None, None)).output, Tensor)


def trees() -> None:
    schedule = seqkern.TreeSchedule.from_parents([-1, 0, 0, -1], [3, 1])
    assert_type(schedule.roots, Tensor)
    x, cell = torch.randn(4, 8), torch.nn.LSTMCell(8, 8)
    assert_type(seqkern.tree_lstm(x, schedule.to("cpu"), cell.weight_ih, cell.weight_hh), Pair)
    assert_type(seqkern.nn.ChildSumTreeLSTM(8, 8).forward(x, schedule), Pair)
    binary = seqkern.TreeSchedule.from_nested([(("a", "b"), "c")])
    assert_type(seqkern.nn.NaryTreeLSTM(8, 8, slots=2).forward(torch.randn(binary.nodes, 8), binary), Pair)


def pooling() -> None:
    x, starts = torch.randn(2, 3, 8), torch.tensor([0, 2, 3])
    assert_type(seqkern.sequence_pool(x, [3, 1], "max"), Tensor)
    assert_type(seqkern.highway(x, torch.randn(16, 8), activation="tanh"), Tensor)
    assert_type(seqkern.nn.Highway(8, layers=2).forward(x), Tensor)
    assert_type(seqkern.conv1d(x, torch.randn(5, 2, 8), padding="causal", lengths=[3, 1]), Tensor)
    assert_type(seqkern.conv1d_max(x, torch.randn(5, 2, 8), torch.zeros(5), "tanh", [3, 1]), Tensor)
    assert_type(seqkern.sequence_pool(x[0], None, "last", cu_seqlens=starts, bidirectional=True), Tensor)


def norms() -> None:
    x, weight = torch.randn(3, 8), torch.ones(8)
    assert_type(seqkern.layer_norm(x, (8,), weight, torch.zeros(8), 1e-6), Tensor)
    assert_type(seqkern.layer_norm(x, 8, eps=1e-6), Tensor)
    assert_type(seqkern.rms_norm(x, x.shape[-1:], weight), Tensor)
    assert_type(seqkern.add_layer_norm(x, x, [8], dropout_p=0.1, seed=3), Pair)
    y, residual = assert_type(seqkern.add_rms_norm(x, None, 8, weight), Pair)
    assert_type(seqkern.add_rms_norm(y, residual, 8, weight, training=False), Pair)


def gated() -> None:
    gate, up = torch.randn(3, 8), torch.randn(3, 8)
    assert_type(seqkern.swiglu(gate, up), Tensor)
    assert_type(seqkern.geglu(gate, up, approximate="tanh"), Tensor)
    assert_type(seqkern.rope(gate[None], gate[None], 3), Pair)
    assert_type(seqkern.rope(gate[None], None, 3), tuple[Tensor, None])
    assert_type(seqkern.rope_tables(torch.arange(3), 8), Pair)
    assert_type(seqkern.nn.RotaryEmbedding(8).forward(gate[None]), tuple[Tensor, Tensor | None])


def words() -> None:
    ids, tables = torch.zeros(3, dtype=torch.int64), (torch.randn(9, 4), torch.randn(9, 4))
    assert_type(seqkern.sgns_loss(ids, ids, ids[:, None], *tables, reduction="sum", sparse=True), Tensor)
    model = Word2Vec(4, sg=False, min_count=1, parity="word2vec", threads=1)
    report = model.train([["a", "b"], ["b", "a"]], compute_loss=True)
    assert_type(report.loss, float | None)
    assert_type(model["a"], Tensor)
    assert_type(model.most_similar("a", topn=1), list[tuple[str, float]])
    assert_type(model.evaluate_pairs([("a", "b", 1.0)]), tuple[float, int])
    FastText(4, min_n=2, max_n=3, min_count=1, threads=1).train([["a", "b"], ["b", "a"]])


def blocks() -> None:
    table, ids = torch.randn(5, 8), torch.zeros(2, 3, dtype=torch.int64)
    assert_type(seqkern.embedding(ids, table, positions="sinusoidal", norm=(None, table[0]), dropout_p=0.1), Tensor)
    x, w1, w2 = torch.randn(3, 8), torch.randn(32, 8), torch.randn(8, 16)
    assert_type(seqkern.ffn(x, w1, torch.zeros(32), w2, None, "swiglu", recompute=True), Tensor)
    assert_type(seqkern.nn.FeedForward(8, 16, "relu").forward(x), Tensor)


def losses() -> None:
    hidden, weight, target = torch.randn(3, 8), torch.randn(5, 8), torch.zeros(3, dtype=torch.int64)
    assert_type(seqkern.cross_entropy(weight, torch.zeros(5, dtype=torch.int64), label_smoothing=0.1), Tensor)
    assert_type(seqkern.cross_entropy(hidden, target, return_lse=True), Pair)
    assert_type(seqkern.linear_cross_entropy(hidden, weight, target, torch.zeros(5), reduction="none"), Tensor)
    loss, lse = assert_type(seqkern.linear_cross_entropy(hidden, weight, target, return_lse=True), Pair)
    assert_type(loss + lse.mean(), Tensor)
    assert_type(seqkern.nn.LinearCrossEntropy(8, 5, softcap=30.0).forward(hidden, target), Tensor)


def sampling() -> None:
    logits, rows = torch.randn(3, 8), torch.arange(3)
    assert_type(seqkern.sample(logits, top_k=5, temperature=0.7, seed=1, position=2), Tensor)
    assert_type(seqkern.sample(logits, top_p=torch.rand(3), seed=rows, position=rows, return_logprob=True), Pair)
    assert_type(seqkern.sample(logits, order="vllm", return_logprob="raw"), Pair)
    assert_type(seqkern.beam_step(logits[None], torch.zeros(1, 3), candidates=4).tokens, Tensor)
    found = seqkern.generate(lambda chunk, state: (logits, state), None, rows[:, None], max_new_tokens=2, beams=2)
    assert_type(found.scores, Tensor | None)
    assert_type(seqkern.filter_logits(logits, min_p=0.1, history=rows[:, None], repetition_penalty=1.2), Tensor)


def recurrent(wanted: bool) -> None:
    x, resets = torch.randn(5, 3, 4), torch.zeros(5, 3, dtype=torch.bool)
    weights = {gates: [torch.randn(gates * 8, 4), torch.randn(gates * 8, 8)] for gates in (1, 3, 4)}
    state = torch.zeros(1, 3, 8)
    output, (h_n, c_n) = seqkern.lstm(x, None, weights[4])
    assert_type(output, Tensor)
    assert_type(c_n, Tensor)
    output, (h_n, c_n), cells = seqkern.lstm(x, (h_n, c_n), weights[4], lengths=[5, 1, 2], return_all_c=True)
    assert_type(cells, Tensor)
    assert_type(
        seqkern.lstm(x, None, weights[4], zoneout=(0.1, 0.2), return_all_c=wanted),
        tuple[Tensor, Pair] | tuple[Tensor, Pair, Tensor],
    )
    assert_type(seqkern.gru(x, state, weights[3], resets=resets, training=True, zoneout=0.1, seed=1), Pair)
    assert_type(seqkern.rnn_tanh(x, state, weights[1], lengths=torch.tensor([5, 1, 2])), Pair)
    assert_type(seqkern.rnn_relu(x, None, weights[1], recompute=True), Pair)
    assert_type(seqkern.additive_rnn(x, state, weights[1]), Pair)
    assert_type(seqkern.nn.AdditiveRNN(4, 8).forward(x), Pair)
    interpolated = seqkern.nn.InterpolatedRNN(4, 8, layer_norm=True)
    assert_type(interpolated.forward(x, lengths=[3, 1, 2]), Pair)
    assert_type(seqkern.interpolated_rnn(x, None, list(seqkern.nn.InterpolatedRNN(4, 8).parameters())), Pair)

    h = torch.zeros(3, 8)
    assert_type(seqkern.lstm_cell(x[0], (h, h), *weights[4]), Pair)
    assert_type(seqkern.gru_cell(x[0], h, *weights[3]), Tensor)
    assert_type(seqkern.rnn_tanh_cell(x[0], h, *weights[1]), Tensor)
    assert_type(seqkern.rnn_relu_cell(x[0], h, *weights[1]), Tensor)


class Block(torch.nn.Module):
    """A pre-norm block, whose first has no residual yet."""

    def __init__(self, width: int, *, rms: bool = False) -> None:
        super().__init__()
        self.norm = AddRMSNorm(width, dropout=0.1) if rms else AddLayerNorm(width, bias=False, dropout=0.1)
        self.rnn = seqkern.nn.GRU(width, width, batch_first=True, layer_norm=True)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Pair:
        y, residual = assert_type(self.norm.forward(x, residual), Pair)
        y, _ = assert_type(self.rnn.forward(y), Pair)
        return y, residual


class Narrow(seqkern.nn.LSTM):
    """A class of a user's own, with a constructor and a forward of its own."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, peephole=True, zoneout=(0.1, 0.0))

    def forward(self, input: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(input)[0]


def modules(wanted: bool) -> None:
    x, packed = torch.randn(5, 3, 8), pack_sequence([torch.randn(2, 8), torch.randn(1, 8)])
    residual: Tensor | None = None
    for block in (Block(8), Block(8, rms=True)):
        x, residual = block(x, residual)
    norm: torch.nn.LayerNorm = seqkern.nn.LayerNorm((3, 8), eps=1e-6, device="cpu", dtype=torch.float32)
    assert_type(norm.forward(x), Tensor)
    assert_type(seqkern.nn.LayerNorm(8).forward(x), Tensor)
    assert_type(seqkern.nn.RMSNorm([8], elementwise_affine=False).forward(x), Tensor)

    theirs: torch.nn.LSTM = seqkern.nn.LSTM(8, 4, num_layers=2, bidirectional=True)
    assert_type(theirs.forward(x), tuple[Tensor, Pair])
    lstm = seqkern.nn.LSTM(8, 4, proj_size=2, recurrent_dropout=0.1)
    assert_type(lstm.forward(x, None, [5, 1, 2]), tuple[Tensor, Pair])
    assert_type(lstm.forward(x, return_all_c=True), tuple[Tensor, Pair, Tensor])
    assert_type(lstm.forward(x, return_all_c=wanted), tuple[Tensor, Pair] | tuple[Tensor, Pair, Tensor])
    assert_type(lstm.forward(packed), tuple[PackedSequence, Pair])
    assert_type(lstm.forward(packed, return_all_c=True), tuple[PackedSequence, Pair, PackedSequence])
    assert_type(seqkern.nn.RNN(8, 4, nonlinearity="relu").forward(x, lengths=torch.tensor([5, 1, 2])), Pair)
    assert_type(seqkern.nn.GRU(8, 4).forward(packed), tuple[PackedSequence, Tensor])
    assert_type(seqkern.nn.GRU(8, 4).forward(x[:, 0], lengths=3), Pair)
    assert_type(Narrow(8).forward(x), Tensor)

    attention: torch.nn.MultiheadAttention = seqkern.nn.MultiheadAttention(8, 2, num_kv_heads=1, qk_norm=True)
    assert_type(attention(x, x, x)[0], Any)
    own = seqkern.nn.MultiheadAttention(8, 2, window=(3, 0), head_dim=8)
    assert_type(own.forward(x, x, x, need_weights=False, is_causal=True), tuple[Tensor, Tensor | None])
    assert_type(own.make_cache(3, 16), seqkern.nn.AttentionCache)
    assert_type(own.make_cache(3, 16, pages=seqkern.nn.AttentionPages(3, 16)).pages, seqkern.nn.AttentionPages | None)
    layer = seqkern.nn.TransformerEncoderLayer(8, 2, 16, head_dim=3)
    other = seqkern.nn.TransformerDecoderLayer(8, 2, 16, head_dim=3)
    assert_type(seqkern.nn.TransformerEncoder(layer, 2).forward(x, is_causal=True), Tensor)
    assert_type(seqkern.nn.TransformerDecoder(other, 2).forward(x, x, tgt_is_causal=True), Tensor)
    assert_type(seqkern.nn.Transformer(8, 2, 1, 1, 16, head_dim=3).forward(x, x), Tensor)

    assert_type(seqkern.nn.LSTMCell(8, 4).forward(x[0]), Pair)
    assert_type(seqkern.nn.GRUCell(8, 4, bias=False).forward(x[0], torch.zeros(3, 4)), Tensor)
    assert_type(seqkern.nn.RNNCell(8, 4, nonlinearity="relu").forward(x[0]), Tensor)


def the_rest() -> None:
    x = torch.randn(3, 8)
    with seqkern.use_backend("reference"):
        assert_type(seqkern.explain("layer_norm", x).kernel, str)
    assert_type(seqkern.reference.layer_norm(x, None, None, 1e-5), Tensor)
    model = seqkern.optimize(torch.nn.LayerNorm(8))
    assert_type(model, torch.nn.LayerNorm)
    assert_type(seqkern.restore(model), torch.nn.LayerNorm)
    seqkern.release_memory()


def mistakes(x: Tensor, padding: Tensor) -> None:
    """What is wrong at run time, too."""
    seqkern.attention(x, x, x, is_causal=True)  # type: ignore[call-overload]
    seqkern.attention(x, x, x, key_padding_mask=padding)  # type: ignore[call-overload]
    seqkern.attention(x, x, x, return_lse=True).sum()  # type: ignore[attr-defined]
    seqkern.attention_decode(x, x, x, padding, causal=True)  # type: ignore[call-overload]
    seqkern.attention_varlen(x, x, x, padding, padding, 4)  # type: ignore[call-overload]
    seqkern.scaled_dot_product_attention(x, x, x, causal=True)  # type: ignore[arg-type]
    seqkern.layer_norm(x, (8,), gamma=x)  # type: ignore[arg-type]
    seqkern.layer_norm(x, 8.0)  # type: ignore[arg-type]
    seqkern.rms_norm(x)  # type: ignore[call-arg]
    seqkern.add_layer_norm(x, 8)  # type: ignore[call-arg, arg-type]
    _, _, _ = seqkern.lstm(x, None, [x])  # type: ignore[misc]
    seqkern.gru(x, (x, x), [x])  # type: ignore[arg-type]
    seqkern.gru(x, None, [x], sequence_lengths=[1])  # type: ignore[arg-type]
    seqkern.lstm_cell(x, x, x, x)  # type: ignore[arg-type]
    seqkern.nn.LSTM(8, 8, layers=2)  # type: ignore[arg-type]
    seqkern.nn.LSTM("8", 8)  # type: ignore[arg-type]
    seqkern.nn.GRU(8, 8).forward(x, (x, x))  # type: ignore[call-overload]
    seqkern.nn.AddRMSNorm(8, bias=True)  # type: ignore[arg-type]
    seqkern.nn.AddRMSNorm(8).forward(x, x).sum()  # type: ignore[attr-defined]
    seqkern.explain(x)  # type: ignore[call-overload]
    GPT(30, 16, 4, 2, positions="none")  # type: ignore[arg-type]
    RecurrentLM(30, 8, 8, cell="elman")  # type: ignore[arg-type]


def models() -> None:
    tokens = torch.zeros(2, 6, dtype=torch.long)
    gpt = seqkern.models.GPT(30, 16, 4, 2, positions="rotary", norm="rms", activation="swiglu", bias=False)
    assert_type(gpt, GPT)
    assert_type(gpt.loss(tokens, tokens), Tensor)
    lstm = RecurrentLM(30, 8, 8, cell="gru", tie_weights=True)
    assert_type(lstm.loss(tokens, tokens), Tensor)
    assert_type(seqkern.generate(lstm.step, lstm.start(2, 9), tokens, max_new_tokens=3).tokens, Tensor)
    lengths, labels = torch.tensor([6, 4]), torch.tensor([0, 2])
    bert = seqkern.models.BERT(30, 16, 4, 1, local=2)
    generator = torch.Generator()
    inputs, targets = assert_type(seqkern.models.mask_tokens(tokens, lengths, generator, 30, 1), Pair)
    assert_type(seqkern.models.MaskedLM(bert).loss(inputs, targets, lengths), Tensor)
    assert_type(seqkern.models.BERTClassifier(bert, 3).loss(tokens, labels, lengths), Tensor)
    assert_type(seqkern.models.Tagger(30, 5, 8, 8).loss(tokens, tokens % 5, lengths), Tensor)
    for classifier in (
        seqkern.models.RNNClassifier(30, 3, 8, 8, pool="max"),
        seqkern.models.CNNClassifier(30, 3, 8, 4, (2, 3)),
        seqkern.models.TransformerClassifier(30, 3, 16, 4, 1),
    ):
        assert_type(classifier.loss(tokens, labels, lengths), Tensor)
    for pairs in (
        seqkern.models.RNNEncoderDecoder(30, 30, 8, 8, score="dot", order="luong"),
        seqkern.models.EncoderDecoder(30, 30, 16, 4, 1, 1),
    ):
        assert_type(pairs.loss(tokens, lengths, tokens, tokens), Tensor)
    schedule = seqkern.TreeSchedule.from_parents([-1, 0, 0])
    trees = seqkern.models.TreeClassifier(30, 3, 8, 8)
    assert_type(trees.loss(torch.tensor([1, 2, 3]), schedule, torch.tensor([2])), Tensor)
    vit = seqkern.models.ViT(8, 2, 10, 16, 4, 1)
    assert_type(vit.loss(torch.rand(2, 1, 8, 8), labels), Tensor)
    assert_type(seqkern.models.SkipGram(30, 8).loss(labels, labels, torch.zeros(2, 5, dtype=torch.long)), Tensor)
    words = seqkern.models.CharAwareLM(torch.ones(30, 7, dtype=torch.long), torch.full((30,), 7), 30, 4, (5, 5), 8)
    assert_type(words.loss(tokens, tokens), Tensor)
    assert_type(seqkern.models.GPTBlock(16, 4, 32)(torch.rand(2, 6, 16)), Any)


def main() -> None:
    models()
    attention(True)
    additive(True)
    decoding()
    trees()
    pooling()
    norms()
    recurrent(True)
    modules(True)
    the_rest()


if __name__ == "__main__":
    main()
