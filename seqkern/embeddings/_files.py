"""Tensors and settings in one file, in the format of safetensors: a JSON header and raw bytes. Nothing is unpickled."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_TYPES = {"F32": torch.float32, "I64": torch.int64, "U8": torch.uint8}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_MOST_HEADER = 100 << 20


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
    header: dict[str, Any] = {"__metadata__": {"seqkern": json.dumps(dict(settings))}}
    offset = 0
    for name, t in tensors.items():
        size = t.numel() * t.element_size()
        header[name] = {"dtype": _NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for t in tensors.values():
            file.write(_bytes(t))


def _bytes(t: Tensor) -> bytearray:
    data = bytearray(t.numel() * t.element_size())
    if data:
        torch.frombuffer(data, dtype=torch.uint8).copy_(t.contiguous().flatten().view(torch.uint8))
    return data


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the settings of a file that `write` made; ValueError for another one."""
    data = Path(path).read_bytes()
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(len(data) - 8, _MOST_HEADER):
        raise ValueError(f"{os.fspath(path)} is no file of word vectors: it has not the format that save writes")
    try:
        header = json.loads(data[8 : 8 + length])
        settings = dict(json.loads(header.pop("__metadata__")["seqkern"]).items())
        tensors = {name: _tensor(data, 8 + length, **entry) for name, entry in header.items()}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:  # of JSON and UTF-8 too
        raise ValueError(f"{os.fspath(path)} is no file of word vectors: {error}") from None
    return tensors, settings


def _tensor(data: bytes, base: int, *, dtype: str, shape: list[int], data_offsets: list[int]) -> Tensor:
    begin, end = data_offsets
    size = math.prod(shape) * torch.empty(0, dtype=_TYPES[dtype]).element_size()
    if min(shape, default=0) < 0 or not 0 <= begin <= end <= len(data) - base or end - begin != size:
        raise KeyError(f"tensor of shape {shape} at bytes {begin} to {end}")
    if size == 0:
        return torch.empty(shape, dtype=_TYPES[dtype])
    return torch.frombuffer(bytearray(data[base + begin : base + end]), dtype=_TYPES[dtype]).view(shape)
