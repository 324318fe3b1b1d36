"""States of models, whatever they are made of: the rows of a batch chosen anew, in all parts or in none."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor


def chosen_rows(state: Any, rows: Tensor, count: int, dim: int) -> Any:
    """The same tree with rows `rows` of each of its tensors, which have `count` in dimension `dim`.

    Tuples, lists, dicts and dataclasses are walked; an object with a method `reorder(rows)`, or transformers'
    `reorder_cache(rows)`, is asked to do it itself, once wherever it stands, and replaced by what that returns, if
    anything. Numbers, strings, None and tensors without dimensions stay. What else there is raises: a state of which a
    part stayed in its old order would give wrong tokens without an error.
    """
    return _Walk(rows, count, dim).walk(state, "state")


class _Walk:
    def __init__(self, rows: Tensor, count: int, dim: int):
        self.rows, self.count, self.dim = rows, count, dim
        self.done: dict[int, tuple[Any, Any]] = {}  # by identity: what was there, and what it became

    def walk(self, part: Any, path: str) -> Any:
        if part is None or isinstance(part, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
            return part
        if id(part) not in self.done:
            self.done[id(part)] = (part, self._chosen(part, path))
        return self.done[id(part)][1]

    def _chosen(self, part: Any, path: str) -> Any:
        if isinstance(part, Tensor):
            return self._of_tensor(part, path)
        for name in ("reorder", "reorder_cache"):
            method = getattr(part, name, None)
            if callable(method):
                made = method(self.rows)
                return part if made is None else made
        if isinstance(part, dict):
            return type(part)((key, self.walk(value, f"{path}[{key!r}]")) for key, value in part.items())
        if isinstance(part, (tuple, list)):
            items = [self.walk(value, f"{path}[{i}]") for i, value in enumerate(part)]
            return type(part)(*items) if hasattr(part, "_fields") else type(part)(items)
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            fields = [f.name for f in dataclasses.fields(part)]
            return dataclasses.replace(part, **{f: self.walk(getattr(part, f), f"{path}.{f}") for f in fields})
        raise TypeError(
            f"generate: beams cannot reorder {path}, of type {type(part).__name__}: give it a method reorder(rows), or "
            "give generate reorder=, a function of (state, rows)"
        )

    def _of_tensor(self, t: Tensor, path: str) -> Tensor:
        if t.dim() == 0:
            return t
        if not -t.dim() <= self.dim < t.dim() or t.shape[self.dim] != self.count:
            raise ValueError(
                f"generate: {path} must have the {self.count} rows of the batch in dimension {self.dim}, got shape "
                f"{tuple(t.shape)}: give state_dim=, or reorder=, a function of (state, rows)"
            )
        return t.index_select(self.dim, self.rows)
