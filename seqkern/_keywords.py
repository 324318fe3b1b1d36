"""Unknown keywords of the public functions: a TypeError that names the right one.

A public function ends in `**unexpected: NoReturn`. Type checkers let no argument into it, and `explicit` hides it from
`inspect.signature` and `help`. If an argument arrives there anyway, `refuse` raises an error that says what to write
instead. Without it, Python would raise its own error before the function runs.

It costs a call an empty dict. Parameters with the wrong names as well would cost more and be visible; a wrapper would
cost several times as much, and torch.compile would have to trace through it (csrc/common/NOTES.md).
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def explicit(function: F) -> F:
    """The same function, with a signature of its named parameters only."""
    signature = inspect.signature(function)
    named = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    return function


def refuse(function: Callable[..., Any], unexpected: Mapping[str, Any], module: str = "") -> NoReturn:
    """Raises TypeError in Python's words, with what to write instead. `module` is the class of a method."""
    op = f"{module}.{function.__name__}" if module else function.__name__
    told = [f"got an unexpected keyword argument '{name}': {_instead(function, op, name)}" for name in unexpected]
    raise TypeError(f"{op}() {'; '.join(told)}")


def _instead(function: Callable[..., Any], op: str, name: str) -> str:
    hint = HINTS.get(op, HINTS.get(function.__name__, {})).get(name)
    if hint is not None:
        return hint
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    similar = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {similar[0]}?" if similar else f"it takes {', '.join(names)}"


# ---- what to write instead ----------------------------------------------------------------------------------------


def _use(right: str, *wrong: str) -> dict[str, str]:
    return dict.fromkeys(wrong, f"use {right}")


_PADDING = "attn_mask=~key_padding_mask[:, None, None, :], where True is visible"
_QKV = _use("query", "q") | _use("key", "k") | _use("value", "v")
_SCALE = _use("scale", "softmax_scale", "sm_scale", "scaling")
_MASK = _use("attn_mask", "mask", "attention_mask", "attn_bias", "bias")
_DROPOUT = _use("dropout_p", "p", "dropout", "dropout_prob", "attention_dropout")
_DETERMINISTIC = {"deterministic": "leave it out: results and gradients are the same in every run"}
_SHARED = {
    **_QKV,
    **_SCALE,
    **_MASK,
    **_DROPOUT,
    **_DETERMINISTIC,
    **_use("window=(left, right)", "window_size", "sliding_window"),
    **_use("softcap", "logits_soft_cap", "logit_softcap"),
    **_use("sinks", "s_aux", "sink", "attention_sinks"),
    **_use("return_lse=True", "return_softmax_lse", "return_aux"),
    **_use("return_lse=True for the log-sum-exp, attention_weights for the weights", "return_attn_probs"),
    **_use("attention_weights, a function that returns them", "need_weights", "average_attn_weights"),
    "is_causal": "use causal=True, which aligns lower-right; scaled_dot_product_attention takes is_causal, "
    'which aligns upper-left, as causal_align="upper_left" does',
    "enable_gqa": "leave it out: key and value may always have fewer heads than query",
}
_ATTENTION = {
    **{wrong: hint for wrong, hint in _SHARED.items() if wrong != "bias"},
    **_use("bias", "attn_bias", "position_bias"),
    **_use("key_lengths", "lengths", "seq_lens", "kv_lengths", "seqused_k", "seqlen_k"),
    **_use("attention_varlen, for packed sequences", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens"),
    **_use("attention_decode, which takes it", "page_table", "cache_lengths"),
    "key_padding_mask": f"use key_lengths, the number of keys of each sequence, or {_PADDING}",
}
_PACKED = {
    **_SHARED,
    "key_padding_mask": "leave the padding out: cu_seqlens_k tells where each sequence lies",
    "key_lengths": "leave it out: cu_seqlens_k tells where each sequence ends",
    "block_table": "use attention_decode with page_table",
    "page_table": "use attention_decode, which takes it",
}
_DECODE = {
    **_SHARED,
    **dict.fromkeys(("causal", "is_causal"), "leave it out: attention_decode is causal, aligned lower-right"),
    **dict.fromkeys((*_MASK, "attn_mask", "key_padding_mask"), "use attention: attention_decode takes no mask"),
    **dict.fromkeys((*_DROPOUT, "dropout_p"), "leave it out: attention_decode has no dropout"),
    **_use("cache_lengths", "key_lengths", "cache_seqlens", "seq_lens", "context_lens"),
    **_use("key_cache", "k_cache") | _use("value_cache", "v_cache"),
    **_use("page_table", "block_table", "block_tables"),
}
_WEIGHTS = _ATTENTION | {
    **_MASK,
    **_use("attn_mask", "position_bias"),
    **dict.fromkeys(("dropout_p", *_DROPOUT), "leave it out: attention_weights has no dropout"),
    **dict.fromkeys(("value", "v"), "leave it out: the weights do not depend on it"),
    **_use("attention, which returns it", "return_lse", "return_softmax_lse", "return_aux"),
    **dict.fromkeys(("return_attn_probs", "need_weights"), "leave it out: the weights are what it returns"),
}
_SDPA = {
    **_QKV,
    **_SCALE,
    **_MASK,
    **_DROPOUT,
    **_DETERMINISTIC,
    **_use("attention, which takes it", "causal_align", "key_lengths", "window", "alibi_slopes", "softcap", "sinks"),
    **_use("attention, which takes it as window=(left, right)", "window_size", "sliding_window"),
    **_use("attention, which takes it as softcap", "logits_soft_cap", "logit_softcap"),
    **_use("attention, which takes it as sinks", "s_aux", "sink", "attention_sinks"),
    **_use("attention with return_lse=True", "return_lse", "return_softmax_lse", "return_aux", "return_attn_probs"),
    **_use("attention_weights, a function that returns them", "need_weights", "average_attn_weights"),
    "causal": "use is_causal=True, which aligns upper-left; attention takes causal, which aligns lower-right",
    "key_padding_mask": f"use {_PADDING}, or attention with key_lengths",
}

_NORM = {
    **_use("eps", "epsilon", "variance_epsilon", "layer_norm_eps", "layer_norm_epsilon"),
    **_use("weight", "gamma", "scale", "g"),
    **_use("bias", "beta", "shift", "b"),
    **_use("normalized_shape, the sizes of the last dimensions", "dim", "axis", "shape", "normalized_dim"),
    **_use("input", "x", "hidden_states"),
}
_RMS = dict.fromkeys(("bias", "beta", "shift", "b"), "an RMS norm has no bias: add it to the result")
_NO_ADD = dict.fromkeys(("dropout_p", *_DROPOUT), "use torch.nn.functional.dropout, or the norm that adds a residual")
_ADD = {**_DROPOUT, "prenorm": "leave it out: the sum is always returned beside its norm"}

_GLU = {
    **_use("gate", "x", "input", "w1") | _use("up", "y", "linear", "value"),
    **_use("gate and up, the halves: x.chunk(2, -1)", "gate_up", "xy"),
}
_FFN = {
    **_use("x", "input", "hidden_states") | _use("activation", "act", "approximate") | _use("recompute", "checkpoint"),
    **_use("w1, the gate's rows first", "w_gate", "w3", "gate_up") | _use("w1", "weight", "weight1"),
    **_use("w2", "weight2", "w_down"),
    "dropout": "leave it out: drop the result with torch.nn.functional.dropout",
}
_WORDS = {
    **_use("vector_size", "size", "dim", "embedding_dim") | _use("epochs", "iter", "epoch") | _use("sg", "model"),
    **_use("threads", "workers", "thread") | _use("window", "ws") | _use("negative", "neg", "negatives"),
    **_use("sample", "t", "subsample") | _use("min_count", "minCount") | _use("alpha", "lr", "learning_rate"),
    **_use("parity", "cbow_mean"),
    **dict.fromkeys(("sentences", "corpus_file"), "leave it out: call its train with the sentences"),
    **dict.fromkeys(("callbacks", "trim_rule", "max_vocab_size", "max_final_vocab", "sorted_vocab"), "leave it out"),
    "compute_loss": "leave it out: it is an option of train",
    "hs": "leave it out: there is no hierarchical softmax, only negative samples",
}
_STATE = _use("hx", "h0", "h_0", "h", "hidden", "initial_state", "h_prev")
_LENGTHS = _use(
    "lengths", "sequence_lengths", "sequence_length", "seq_lengths", "seq_lens", "input_lengths", "batch_sizes"
)
_NETWORK = {
    **_STATE,
    **_use("hx=(h, c)", "c0", "c_0", "c"),
    **_LENGTHS,
    **_use("dropout", "p", "dropout_p", "dropout_prob"),
    **_use("training", "train", "is_training"),
    **_use("weights", "params", "flat_weights", "parameters"),
    "time_major": "use batch_first: the steps come first without it",
    **_use("norms", "layer_norm", "layer_norms"),
    **_use("zoneout", "zoneout_p") | _use("recurrent_dropout", "recurrent_dropout_p", "dropout_h"),
    **dict.fromkeys(("bias", "has_biases"), "leave it out: weights holds b_ih and b_hh, or does not"),
    **dict.fromkeys(("input_size", "hidden_size"), "leave it out: the shapes of weights tell"),
    "proj_size": "leave it out: the w_hr in weights tells",
    "nonlinearity": "call rnn_tanh or rnn_relu",
}
_NOT_LSTM = dict.fromkeys(("peephole", "peepholes", "return_all_c"), "lstm alone has it")
_TABLES = {
    **_use("theta", "base", "rope_theta"),
    **_use("rotary_dim", "dim", "head_dim", "rotary_emb_dim"),
    **_use("positions", "position_ids", "input_pos", "offset", "offsets", "seqlen_offsets"),
}
_ROPE = {
    **_TABLES,
    **_use("interleaved", "interleave", "neox", "is_neox_style"),
    **_use("tables=(cos, sin)", "cos", "sin", "cos_sin", "cos_cached"),
    **_use("sequence_dim", "seq_dim", "unsqueeze_dim"),
}
_CELL = {
    **_STATE,
    **_use("hx=(h, c)", "c0", "c_0", "c", "cx"),
    **_use("w_ih", "weight_ih") | _use("w_hh", "weight_hh") | _use("b_ih", "bias_ih") | _use("b_hh", "bias_hh"),
    "batch_first": "leave it out: a cell takes one step, (B, I)",
    **dict.fromkeys(("lengths", "sequence_lengths"), "leave it out: a cell takes one step"),
    "nonlinearity": "call rnn_tanh_cell or rnn_relu_cell",
}

_FILTERS = {
    **_use("logits", "input", "x", "scores"),
    **_use("temperature", "temp", "t"),
    **_use("top_k", "k") | _use("top_p", "p", "nucleus"),
    **_use("typical_p", "typical", "typ_p", "mass"),
    **_use("repetition_penalty and history", "penalty", "repeat_penalty"),
    **_use("history", "input_ids", "ids", "tokens", "prev_tokens"),
}
_SAMPLE = {
    **_FILTERS,
    **_use("seed and position: a token depends on nothing else", "generator", "rng"),
    **_use("return_logprob", "logprobs", "return_logprobs", "return_log_prob"),
}
_LOSS = {
    **_use("target", "labels", "targets", "label"),
    **_use("ignore_index", "ignore_id", "ignore_idx"),
    **_use("z_loss", "lse_square_scale", "z_loss_scale", "logit_zloss"),
    **_use("softcap", "logit_softcap", "logits_soft_cap", "final_logit_softcapping"),
    **_use("return_lse=True", "return_z_loss"),
    **_use("reduction", "reduce", "size_average"),
}
_CROSS_ENTROPY = _LOSS | _use("logits", "input", "x") | _use("class_weight", "weight", "ce_weight")
_LINEAR_CROSS_ENTROPY = {
    **_LOSS,
    **_use("input", "hidden", "hidden_states", "x", "e"),
    **_use("weight", "linear_weight", "lin_weight", "classifier", "c"),
    **_use("bias", "linear_bias"),
    **_use("class_weight", "ce_weight"),
}
_LOSS_MODULE = {
    **{wrong: hint for wrong, hint in _LOSS.items() if wrong not in ("labels", "targets", "label", "return_z_loss")},
    **_use("in_features", "input_size", "hidden_size"),
    **_use("num_classes", "vocab_size", "n_classes"),
    **_use("weight", "class_weight", "ce_weight"),
    "options": "leave it out: the op chooses its chunks",
}

_MODULE_NORM = {
    **_use("eps", "epsilon", "variance_epsilon", "layer_norm_eps"),
    **_use("elementwise_affine", "affine"),
    **_use("normalized_shape", "hidden_size", "dim", "d_model", "num_features"),
}
_MODULE_ADD = _MODULE_NORM | _use("dropout", "p", "dropout_p", "dropout_prob")
_MODULE_RMS = {"bias": "an RMS norm has no bias"}
_NETWORK_MODULE = {
    **_use("input_size", "input_dim", "in_features"),
    **_use("hidden_size", "hidden_dim", "out_features", "units"),
    **_use("dropout", "p", "dropout_p", "dropout_prob"),
    "time_major": "use batch_first: the steps come first without it",
    **_use("layer_norm", "norms", "layer_norms"),
    "lengths": "give it to the call, module(input, hx, lengths=...)",
}
_FORWARD = {
    **_STATE,
    **_use("hx=(h, c)", "c0", "c_0", "c"),
    **_LENGTHS,
    "batch_first": "give it to the constructor",
}

HINTS: dict[str, dict[str, str]] = {
    "scaled_dot_product_attention": _SDPA,
    "attention": _ATTENTION,
    "attention_varlen": _PACKED,
    "attention_decode": _DECODE,
    "attention_weights": _WEIGHTS,
    "additive_attention": {
        **_QKV,
        **_use("weight", "v", "energy", "scale", "w") | _use("key_lengths", "lengths", "memory_lengths", "seq_lens"),
        **_use("mask", "attn_mask", "attention_mask") | _use("return_weights=True", "need_weights"),
        "key_padding_mask": "use mask=~key_padding_mask[:, None], where True is visible",
        "dropout_p": "leave it out: drop the output with torch.nn.functional.dropout",
    },
    "attention_rnn": {
        **_use("key_lengths", "lengths", "memory_lengths", "seq_lens", "encoder_lengths")
        | _use("mask", "attn_mask", "attention_mask")
        | _use("return_weights=True", "need_weights"),
        **_use("state", "hx", "h0", "hidden", "initial_state") | _use("input", "x", "inputs"),
        **_use('order="bahdanau" or "luong"', "attention_type", "kind") | _use("input_feeding", "input_feed"),
        **_use("w_score", "v", "energy", "weight"),
        "key_padding_mask": "use mask=~key_padding_mask[:, None], where True is visible",
        "batch_first": "leave it out: the batch comes first",
        "dropout": "leave it out: drop the output with torch.nn.functional.dropout",
    },
    "AttentionDecoder.__init__": {
        **_use("input_dim", "input_size", "embed_dim", "emb_size") | _use("hidden_dim", "hidden_size", "units"),
        **_use("key_dim", "kdim", "encoder_dim", "encoder_size") | _use("cell", "rnn_type", "mode", "kind"),
        **_use("score", "attention", "attn_type", "attention_type") | _use("input_feeding", "input_feed"),
        **_use("attention_dim", "attn_dim") | _use("output_dim", "output_size"),
        "num_layers": "leave it out: put seqkern.nn.LSTM or GRU layers before or after it",
        "batch_first": "leave it out: the batch comes first",
        "dropout": "leave it out: drop the output with torch.nn.Dropout",
    },
    "AdditiveAttention.__init__": {
        **_use("query_dim", "embed_dim", "query_size", "decoder_dim")
        | _use("key_dim", "kdim", "key_size", "encoder_dim"),
        **_use("hidden_dim", "attn_dim", "hidden_size", "units"),
        "batch_first": "leave it out: the batch comes first",
        "dropout": "leave it out: drop the output with torch.nn.Dropout",
    },
    "highway": {
        **_use("x", "input", "inputs") | _use("activation", "act", "nonlinearity") | _use("weight", "w"),
        "gate_bias": "leave it out: it is the second half of bias",
    },
    "Highway.__init__": {
        **_use("dim", "input_dim", "input_size", "features") | _use("layers", "num_layers"),
        **_use("activation", "act", "nonlinearity"),
    },
    "tree_lstm": {
        **_use("x", "input", "inputs") | _use("schedule", "parents", "trees", "tree", "graph"),
        **_use('kind="child_sum" or "nary"', "mode", "cell", "cell_type"),
        "batch_first": "leave it out: nodes of all trees come one after another",
    },
    "ChildSumTreeLSTM.__init__": {
        **_use("input_size", "in_features", "x_size", "in_dim") | _use("hidden_size", "mem_dim", "h_size"),
        "batch_first": "leave it out: nodes of all trees come one after another",
    },
    "NaryTreeLSTM.__init__": {
        **_use("input_size", "in_features", "x_size", "in_dim") | _use("hidden_size", "mem_dim", "h_size"),
        **_use("slots", "n_ary", "n", "N", "arity", "num_children"),
    },
    "sequence_pool": {
        **_use("kind", "mode", "reduce", "reduction", "pooling") | _use("x", "input", "hidden_states"),
        **_use("lengths", "sequence_lengths", "seq_lens") | _use("cu_seqlens", "offsets", "starts"),
        "mask": "use lengths=mask.sum(1), of rows that come first",
        "batch_first": "give it x.transpose(0, 1) of a time-major x, which is read in place",
    },
    "conv1d": {
        **_use("weight", "kernel", "filters", "w") | _use("x", "input") | _use("dilation", "rate", "dilation_rate"),
        **_use("lengths", "sequence_lengths", "seq_lens") | _use('padding="causal"', "causal"),
        "groups": "leave it out: call it for each group of features, or use torch.nn.functional.conv1d",
        "activation": "leave it out: apply it to the result",
    },
    "conv1d_max": {
        **_use("weight", "kernel", "filters", "w") | _use("x", "input") | _use("activation", "act", "nonlinearity"),
        **_use("lengths", "sequence_lengths", "seq_lens") | _use("cu_seqlens", "offsets", "starts"),
        **dict.fromkeys(("stride", "dilation", "groups"), "leave it out: every window of rows side by side is taken"),
        "padding": "pad x with zeros before the call: torch.nn.functional.pad(x, (0, 0, 1, 1))",
    },
    "layer_norm": _NORM | _NO_ADD | {"residual": "use add_layer_norm"},
    "rms_norm": _NORM | _NO_ADD | _RMS | {"residual": "use add_rms_norm"},
    "add_layer_norm": _NORM | _ADD,
    "add_rms_norm": _NORM | _ADD | _RMS,
    "swiglu": _GLU,
    "geglu": _GLU,
    "embedding": {
        **_use("ids", "input", "input_ids", "indices", "tokens") | _use("weight", "table", "num_embeddings"),
        **_use("positions", "position_embeddings", "pos_weight", "pos_emb"),
        **_use("offset", "position_ids", "past_length") | _use("norm", "norm_weight", "layer_norm"),
        **_use("dropout_p", "p", "dropout", "dropout_prob"),
        **dict.fromkeys(("max_norm", "norm_type"), "leave it out: renormalise weight before the call"),
        "scale_grad_by_freq": "leave it out: divide the gradient's rows by their counts",
    },
    "sgns_loss": {
        **_use("center", "input", "inputs", "target", "words") | _use("context", "positive", "positives", "output"),
        **_use("negatives", "negative", "neg", "noise") | _use("w_in", "weight", "embeddings", "syn0"),
        **_use("w_out", "contexts", "syn1neg") | _use("reduction", "size_average", "reduce"),
    },
    "Word2Vec.__init__": _WORDS,
    "FastText.__init__": _WORDS | _use("bucket", "buckets") | {"word_ngrams": "leave it out"},
    "ffn": _FFN,
    "FeedForward.__init__": {
        **_use("d_model", "dim", "embed_dim", "hidden_size") | _use("recompute", "checkpoint"),
        **_use("dim_feedforward", "hidden_dim", "intermediate_size", "width") | _use("activation", "act", "hidden_act"),
        "dropout": "leave it out: drop x, or the result, with torch.nn.Dropout",
    },
    "rope": _ROPE,
    "rope_tables": _TABLES,
    "cross_entropy": _CROSS_ENTROPY,
    "linear_cross_entropy": _LINEAR_CROSS_ENTROPY,
    "sample": _SAMPLE,
    "filter_logits": _FILTERS,
    "generate": {
        **_use("prompt", "input_ids", "tokens", "prompts", "inputs"),
        **_use("prompt_lengths", "lengths", "attention_mask"),
        **_use("max_new_tokens", "max_length", "max_tokens", "length"),
        **_use("min_new_tokens", "min_length"),
        **_use("stop_tokens", "eos_token_id", "eos", "stop", "stop_token_ids"),
        **_use("pad_token", "pad_token_id", "pad"),
        **_use("beams", "num_beams", "beam_size", "beam_width") | _use("sequences", "num_return_sequences", "n"),
        **_use("seed", "generator") | _use("callback", "streamer") | _use("step", "model"),
        "do_sample": "leave it out: temperature, or any other option of sampling, samples; none of them is greedy",
    },
    "beam_step": {
        **_use("scores", "beam_scores", "log_probs", "running_scores") | _use("logits", "input", "lprobs"),
        **_use("candidates", "k", "num_candidates", "topk"),
        **dict.fromkeys(("beam_size", "num_beams", "beams"), "leave it out: it is the size of scores's last dimension"),
    },
    "lstm": _NETWORK | _use("peepholes", "peephole"),
    **dict.fromkeys(("gru", "rnn_tanh", "rnn_relu", "additive_rnn", "interpolated_rnn"), _NETWORK | _NOT_LSTM),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), _CELL),
    "LayerNorm.__init__": _MODULE_NORM | {"dropout": "use AddLayerNorm"},
    "RMSNorm.__init__": _MODULE_NORM | _MODULE_RMS | {"dropout": "use AddRMSNorm"},
    "AddLayerNorm.__init__": _MODULE_ADD,
    "AddRMSNorm.__init__": _MODULE_ADD | _MODULE_RMS,
    "LinearCrossEntropy.__init__": _LOSS_MODULE,
    "LSTM.__init__": _NETWORK_MODULE | _use("peephole", "peepholes"),
    "GRU.__init__": _NETWORK_MODULE | _NOT_LSTM,
    "RNN.__init__": _NETWORK_MODULE | _NOT_LSTM,
    "AdditiveRNN.__init__": _NETWORK_MODULE | _NOT_LSTM,
    "InterpolatedRNN.__init__": _NETWORK_MODULE | _NOT_LSTM,
    "forward": _FORWARD,  # of the three networks and their subclasses
}
