"""Arguments of `attention_case` on which the error rule is tested, on the CPU and on a GPU."""

from __future__ import annotations

from typing import Any

ATTENTION_SHAPES: dict[str, dict[str, Any]] = {
    "one of all": {"queries": 1, "heads": 1, "head_dim": 1, "causal": False},
    "lengths 3, 1": {"queries": 3, "keys": 1, "batch": 8, "head_dim": 3, "value_dim": 5, "causal": False},
    "63 x 65": {"queries": 63, "keys": 65, "batch": 2, "head_dim": 17, "value_dim": 33},
    "65 x 63, upper left": {"queries": 65, "keys": 63, "head_dim": 40, "causal_align": "upper_left"},
    "127 x 257": {"queries": 127, "keys": 257, "head_dim": 64, "value_dim": 32},
    "127 x 257, upper left": {"queries": 127, "keys": 257, "head_dim": 16, "causal_align": "upper_left"},
    "257 x 127, unseen rows": {"queries": 257, "keys": 127, "head_dim": 24, "value_dim": 7},
    "257 x 530, upper left": {"queries": 257, "keys": 530, "heads": 1, "causal_align": "upper_left"},
    "257, all": {"queries": 257, "causal": False, "head_dim": 48},
    "one query, lower right": {"queries": 1, "keys": 200, "batch": 8, "heads": 4, "kv_heads": 1},
    "grouped heads": {"queries": 131, "keys": 150, "batch": 2, "heads": 6, "kv_heads": 2, "head_dim": 20},
    "head dimension 128": {"queries": 70, "keys": 90, "head_dim": 128},
    "head dimension 256, values 65": {"queries": 65, "heads": 1, "head_dim": 256, "value_dim": 65},
    "head dimension 96, values 100": {"queries": 150, "keys": 173, "head_dim": 96, "value_dim": 100},
    "few rows of odd dimensions": {
        "queries": 2,
        "keys": 150,
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 45,
        "value_dim": 33,
    },
    # Decoding takes them 8, 4, 3, 2 or 1 at a time.
    "7 rows a key head": {"queries": 1, "keys": 530, "heads": 14, "kv_heads": 2, "value_dim": 70},
    "16 rows a key head": {"queries": 1, "keys": 150, "batch": 2, "heads": 16, "kv_heads": 1, "head_dim": 80},
    # From 13 queries on they go by blocks.
    "12 queries": {"queries": 12, "keys": 90, "head_dim": 40},
    "13 queries": {"queries": 13, "keys": 90, "head_dim": 40},
    "16 queries, one head": {"queries": 16, "keys": 600, "heads": 1},
}

EVERYTHING: dict[str, Any] = {
    "mask": "added", "window": (70, None), "slopes": "own", "softcap": 4.0, "sinks": True, "dropout_p": 0.1,
}  # fmt: skip
ATTENTION_OPTIONS: dict[str, dict[str, Any]] = {
    "bool mask": {"mask": "bool", "keys": 100},
    "bool mask of keys, for all": {"mask": "bool", "mask_shape": (130,), "batch": 2, "causal": False},
    "added mask": {"mask": "added", "keys": 65},
    "added mask of keys": {"mask": "added", "mask_shape": (2, 1, 1, 130), "batch": 2, "causal": False},
    "added mask of queries": {"mask": "added", "mask_shape": (1, 2, 130, 1), "batch": 2, "causal": False},
    "added mask for all heads, many keys": {"mask": "added", "mask_shape": (130, 600), "keys": 600},
    "lengths": {"lengths": [5, 0, 130], "batch": 3, "keys": 130, "causal": False},
    "lengths, causal": {"lengths": [63, 100], "batch": 2, "queries": 70, "keys": 100},
    "window": {"window": (20, None), "keys": 200},
    "window of one": {"window": (0, 0), "causal": False},
    "window, both sides, upper left": {"window": (30, 7), "causal": False, "keys": 300, "causal_align": "upper_left"},
    "window over many blocks": {"window": (40, None), "queries": 600, "heads": 1},
    "wide window over many blocks": {"window": (200, 9), "causal": False, "queries": 530, "keys": 610, "heads": 1},
    "slopes, shared": {"slopes": "shared", "batch": 2, "heads": 4, "kv_heads": 2, "queries": 70},
    "slopes, own": {"slopes": "own", "batch": 2, "causal": False, "queries": 70, "keys": 40},
    "softcap": {"softcap": 3.0, "std": 3.0},
    "sinks": {"sinks": True, "heads": 4, "kv_heads": 2, "keys": 64},
    "dropout": {"dropout_p": 0.3, "batch": 2, "keys": 65},
    "everything": {
        "batch": 2, "heads": 4, "kv_heads": 2, "queries": 100, "keys": 130, "lengths": [100, 130], "head_dim": 33,
        "value_dim": 20, **EVERYTHING,
    },
    "one query, everything": {
        "batch": 3, "heads": 8, "kv_heads": 1, "queries": 1, "keys": 300, "lengths": [1, 150, 300], "head_dim": 40,
        **EVERYTHING, "causal": False,
    },
    # A key head's few rows go over the keys in chunks of 512: 12 rows, and 4.
    "few queries, chunks of keys": {
        "batch": 3, "heads": 8, "kv_heads": 2, "queries": 3, "keys": 1300, "lengths": [1300, 1024, 600], "sinks": True,
        "slopes": "own", "dropout_p": 0.1,
    },
    "few queries, window over chunks of keys": {
        "heads": 4, "kv_heads": 2, "queries": 2, "keys": 1300, "window": (600, 0),
    },
}  # fmt: skip

PACKED_LENGTHS = [(3, 5), (0, 4), (70, 70), (4, 0), (66, 140), (1, 1), (20, 150)]
PACKED_OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "all, upper left": {"causal": False, "causal_align": "upper_left", "value_dim": 40},
    "upper left": {"causal_align": "upper_left", "heads": 4, "kv_heads": 2},
    "window": {"window": (20, 9), "causal": False},
    "added mask": {"mask": "added", "mask_shape": (7, 1, 70, 150)},
    "added mask for all": {"mask": "added", "heads": 4},
    "bool mask": {"mask": "bool", "mask_shape": (2, 70, 1)},
    "everything": {
        "heads": 4, "kv_heads": 2, "mask": "added", "mask_shape": (7, 1, 70, 150), "window": (90, None),
        "slopes": "own", "softcap": 2.0, "sinks": True, "dropout_p": 0.1,
    },
}  # fmt: skip
