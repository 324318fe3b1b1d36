"""Verification: the error rule, and every op run against the float64 oracle and against torch.

The oracle is the reference in float64 on the same, already rounded, inputs. A result passes when

    max|x - oracle| <= 2 * max|torch - oracle| + 2 * unit,    unit = max|(oracle + 0.3 - 0.3) - oracle| in the dtype,

so the bound scales with the problem and the dtype, and no tolerance is picked by hand.

- By luck a few numbers may survive that addition without error. So the unit is at least half of the last place of the
  largest number.
- In float64 the oracle is rounded as much as the result, and both errors count: the bound is twice as wide.
- Gradients through attention's scores are differences, p (dp - delta), which can cancel, with one visible key to
  exactly 0. So their unit includes one rounding of the terms (`Case.terms`).
- With few numbers torch's largest error is small by luck now and then. A small case that breaks a bound is drawn up to
  32 times. The rule is then asked of the root mean squares over the draws, and no error may be above 4 times that bound
  (`check_case`).

No op, option or tensor has another factor.

Example:
    >>> import torch
    >>> from seqkern.testing import verify
    >>> all(report.passed for report in verify("layer_norm", torch.float32))
    True
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch

import seqkern
from seqkern import _library
from seqkern.testing._checks import Case, ErrorReport, assert_passed, check_case, compare, poison, run
from seqkern.testing.additive_attention import additive_attention_case
from seqkern.testing.attention import attention_case, attention_decode_case
from seqkern.testing.attention_rnn import attention_rnn_case
from seqkern.testing.beam_step import beam_step_case
from seqkern.testing.conv1d import conv1d_case, conv1d_max_case
from seqkern.testing.cross_entropy import cross_entropy_case
from seqkern.testing.embedding import embedding_case
from seqkern.testing.ffn import ffn_case
from seqkern.testing.glu import glu_case
from seqkern.testing.highway import highway_case
from seqkern.testing.layer_norm import add_layer_norm_case, layer_norm_case
from seqkern.testing.linear_cross_entropy import linear_cross_entropy_case
from seqkern.testing.rnn import ALL_OPTIONS, rnn_case
from seqkern.testing.rnn_cell import rnn_cell_case
from seqkern.testing.rope import rope_case
from seqkern.testing.sample import filter_logits_case
from seqkern.testing.sequence_pool import sequence_pool_case
from seqkern.testing.sgns_loss import sgns_loss_case
from seqkern.testing.tree_lstm import tree_lstm_case

__all__ = [
    "CASES", "Case", "ErrorReport", "add_layer_norm_case", "additive_attention_case", "assert_passed",
    "attention_case", "attention_decode_case", "attention_rnn_case", "beam_step_case", "check_case", "compare",
    "conv1d_case", "conv1d_max_case", "cross_entropy_case", "embedding_case", "ffn_case", "filter_logits_case",
    "glu_case", "highway_case", "layer_norm_case", "linear_cross_entropy_case", "poison", "rnn_case",
    "rnn_cell_case", "rope_case", "run", "sequence_pool_case", "sgns_loss_case", "tree_lstm_case",
    "verify",
]  # fmt: skip

CASES: dict[str, Case] = {
    "attention": attention_case(),
    "attention_varlen": attention_case(packed=[(3, 5), (1, 150), (70, 70), (129, 200)], heads=4, kv_heads=2),
    "attention_decode": attention_decode_case(),
    "additive_attention": additive_attention_case(),
    "additive_attention_options": additive_attention_case(mask="added", return_weights=True, return_lse=True),
    "attention_rnn": attention_rnn_case(),
    "attention_rnn_options": attention_rnn_case(cell="gru", order="luong", score="dot", mask=True),
    "sequence_pool": sequence_pool_case(),
    "sequence_pool_options": sequence_pool_case("logsumexp", packed=True),
    "conv1d": conv1d_case(),
    "conv1d_options": conv1d_case(stride=2, padding=(4, 1), dilation=3),
    "conv1d_max": conv1d_max_case(),
    "conv1d_max_options": conv1d_max_case(packed=True, activation="tanh", bias=False),
    "layer_norm": layer_norm_case(),
    "rms_norm": layer_norm_case(centred=False),
    "add_layer_norm": add_layer_norm_case(),
    "add_rms_norm": add_layer_norm_case(centred=False),
    "swiglu": glu_case("swiglu"),
    "geglu": glu_case("geglu"),
    "ffn": ffn_case(),
    "ffn_options": ffn_case("swiglu", bias=False, recompute=True),
    "highway": highway_case(),
    "highway_options": highway_case(activation="tanh"),
    "embedding": embedding_case(),
    "rope": rope_case(),
    "cross_entropy": cross_entropy_case(),
    "cross_entropy_options": cross_entropy_case(
        class_weight=True, label_smoothing=0.1, z_loss=1e-3, softcap=5.0, reduction="none", return_lse=True
    ),
    "linear_cross_entropy": linear_cross_entropy_case(),
    "linear_cross_entropy_options": linear_cross_entropy_case(
        bias=True, class_weight=True, label_smoothing=0.1, z_loss=1e-3, softcap=5.0, reduction="none", return_lse=True
    ),
    "sgns_loss": sgns_loss_case(),
    "filter_logits": filter_logits_case(temperature=0.7, top_k=100, top_p=0.95, min_p=0.001, typical_p=0.9),
    "beam_step": beam_step_case(),
    "lstm": rnn_case("lstm"),
    "gru": rnn_case("gru"),
    "rnn_tanh": rnn_case("rnn_tanh"),
    "rnn_relu": rnn_case("rnn_relu"),
    "additive_rnn": rnn_case("additive_rnn"),
    "interpolated_rnn": rnn_case("interpolated_rnn"),
    "lstm_options": rnn_case("lstm", 17, 7, 12, 33, projection=20, peepholes=True, **ALL_OPTIONS),
    "gru_options": rnn_case("gru", 17, 7, 12, 33, **ALL_OPTIONS),
    "lstm_cell": rnn_cell_case("lstm"),
    "gru_cell": rnn_cell_case("gru"),
    "rnn_tanh_cell": rnn_cell_case("rnn_tanh"),
    "rnn_relu_cell": rnn_cell_case("rnn_relu"),
    "tree_lstm": tree_lstm_case(),
    "tree_lstm_options": tree_lstm_case("nary"),
}


def verify(
    op: str, dtype: torch.dtype, *, backend: str = "auto", isa: str | None = None, device: str = "cpu"
) -> list[ErrorReport]:
    """Runs the standard case of `op` against the oracle and torch: one report for every output and gradient.

    Args:
        op: "attention", "attention_varlen", "attention_decode" (no gradients), "additive_attention",
            "additive_attention_options", "attention_rnn", "attention_rnn_options", "sequence_pool",
            "sequence_pool_options", "conv1d", "conv1d_options",
            "conv1d_max", "conv1d_max_options", "layer_norm", "rms_norm",
            "add_layer_norm", "add_rms_norm", "swiglu", "geglu", "ffn", "ffn_options",
            "highway", "highway_options", "embedding", "rope";
            "cross_entropy" or "linear_cross_entropy", also with "_options" appended; "sgns_loss"; "filter_logits",
            "beam_step" (no gradients); "lstm", "gru", "rnn_tanh", "rnn_relu", each of these four also with "_cell"
            appended, "additive_rnn", "interpolated_rnn", "lstm_options", "gru_options", "tree_lstm" or
            "tree_lstm_options".
        dtype: float64, float32, bfloat16 or float16.
        backend, isa: as in `seqkern.use_backend`, and the CPU tier to force.
        device: where to run seqkern and torch; the oracle runs on the CPU.

    Raises:
        TypeError: a dtype that is none.
        ValueError: unknown op, backend or tier.
    """
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"verify: dtype must be a torch.dtype, got {dtype!r}")
    if op not in CASES:
        raise ValueError(f"verify: op must be one of {', '.join(CASES)}, got {op!r}")
    tier = _library.use_cpu_isa(isa) if isa else contextlib.nullcontext()
    with seqkern.use_backend(backend), tier:
        return [replace(report, name=f"{op} {report.name}") for report in check_case(CASES[op], dtype, device=device)]
