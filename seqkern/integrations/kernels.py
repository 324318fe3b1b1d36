"""seqkern's layers for models that are made for the `kernels` package, without its hub and without a network.

    from seqkern.integrations import kernels
    kernels.kernelize(model)

Such models (transformers' with kernels installed) mark RMS norms and rotary embeddings by name, "RMSNorm" and
"rotary_pos_emb"; `kernelize` replaces the `forward` of what is marked. Names say little about what is computed (where
a norm rounds, which features are a pair), so each kind is run on numbers once; one that is none of the known ones keeps
its own `forward`.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch import Tensor, nn

from seqkern import _rms_flavours
from seqkern.ops.layer_norm import rms_norm
from seqkern.ops.rope import rope

try:
    from kernels.layer.kernelize import kernelize_layer as _  # noqa: F401

    import kernels as _package
    from kernels import Mode
    from kernels import kernelize as _kernelize
    from kernels import use_kernel_mapping as _use
except ImportError as error:
    raise ImportError(
        f"seqkern.integrations.kernels needs kernels >= 0.17: pip install 'kernels>=0.17' (what failed: {error})"
    ) from error

NAMES = ("RMSNorm", "rotary_pos_emb")
DEVICES = ("cpu", "cuda")

# Of a class that is kernelized: the options of seqkern's op, or None if its own forward stays.
_norms: dict[type, _rms_flavours.Flavour | None] = {}
_rotations: dict[type, bool | None] = {}  # whether neighbours are a pair


# ---- layers: `forward` alone, bound to the model's module ---------------------------------------------------------


class RMSNorm(nn.Module):
    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        flavour = _norm(self)
        weight: Any = self.weight
        if flavour is None or hidden_states.dtype != weight.dtype:
            own: Tensor = type(self).forward(self, hidden_states)
            return own
        return rms_norm(hidden_states, weight.shape, weight, _rms_flavours.eps_of(self), **flavour._asdict())


class RotaryEmbedding(nn.Module):
    can_torch_compile = True
    has_backward = True

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        interleaved = _rotation(self)
        known = q.dim() == 4 and cos.dim() == 3 and cos.shape[-1] == q.shape[-1] and unsqueeze_dim in (1, 2)
        if interleaved is None or not known or not q.dtype == k.dtype == cos.dtype == sin.dtype:
            own: tuple[Tensor, Tensor] = type(self).forward(self, q, k, cos, sin, unsqueeze_dim)
            return own
        sequence_dim = -2 if unsqueeze_dim == 1 else -3
        return rope(q, k, interleaved=interleaved, tables=(cos, sin), sequence_dim=sequence_dim)


def _norm(module: Any) -> _rms_flavours.Flavour | None:
    found = type(module)
    if found not in _norms:
        if torch.compiler.is_compiling() or module.weight.device.type == "meta":
            return None
        own = copy.copy(module)
        own.__dict__.pop("forward", None)  # what kernelize put there
        _norms[found] = _rms_flavours.flavour_of(own) if _rms_flavours.looks_like_one(own) else None
    return _norms[found]


def _rotation(module: Any) -> bool | None:
    found = type(module)
    if found not in _rotations:
        if torch.compiler.is_compiling():
            return None
        _rotations[found] = _pairing(module)
    return _rotations[found]


@torch.no_grad()
def _pairing(module: Any) -> bool | None:
    """Which features are a pair, found with a table whose numbers all differ."""
    generator = torch.Generator().manual_seed(0)
    q, k, cos, sin = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((2, 3, 5, 8), (2, 1, 5, 8), (2, 5, 8), (2, 5, 8))
    )
    for interleaved in (False, True):
        same = True
        for dim in (1, 2):
            given = [t.transpose(1, dim).contiguous() for t in (q, k)]
            try:
                theirs = type(module).forward(module, *given, cos, sin, dim)
            except (TypeError, ValueError, RuntimeError, IndexError):  # it takes something else
                return None
            ours = rope(*given, interleaved=interleaved, tables=(cos, sin), sequence_dim=-1 - dim if dim == 2 else -2)
            same &= all(a.shape == b.shape and torch.allclose(a, b.double()) for a, b in zip(ours, theirs, strict=True))
        if same:
            return interleaved
    return None


# ---- the mapping --------------------------------------------------------------------------------------------------


class _Layer:
    """A repository, as the package calls it: something that loads a layer."""

    def __init__(self, layer: type[nn.Module]) -> None:
        self.layer = layer

    def load(self) -> type[nn.Module]:
        return self.layer

    def __str__(self) -> str:
        return f"seqkern's {self.layer.__name__}"


_REPOSITORIES = {"RMSNorm": _Layer(RMSNorm), "rotary_pos_emb": _Layer(RotaryEmbedding)}


def mapping(*names: str) -> dict[str, dict[str, Any]]:
    """seqkern's layers, for `kernels.use_kernel_mapping` and `kernels.register_kernel_mapping`.

    Args:
        names: "RMSNorm", "rotary_pos_emb"; both if none is given.

    Returns:
        {name: {device: layer}} for "cpu" and "cuda".

    Raises:
        ValueError: another name.

    Example:
        >>> import kernels
        >>> from seqkern.integrations.kernels import mapping
        >>> with kernels.use_kernel_mapping(mapping(), inherit_mapping=False):  # doctest: +SKIP
        ...     kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cpu")
    """
    for name in names:
        if name not in NAMES:
            raise ValueError(f'mapping: names must be of "RMSNorm" and "rotary_pos_emb", got {name!r}')
    return {name: dict.fromkeys(DEVICES, _REPOSITORIES[name]) for name in names or NAMES}


def kernelize(model: nn.Module, *names: str, mode: Any = None, device: str | torch.device | None = None) -> nn.Module:
    """`kernels.kernelize` with seqkern's layers alone: forward, backward and torch.compile.

    Args:
        model: a model whose classes are marked by `kernels.use_kernel_forward_from_hub`.
        names: what to replace, "RMSNorm", "rotary_pos_emb"; both if none is given.
        mode: of `kernels.Mode`; Mode.TRAINING | Mode.TORCH_COMPILE if None.
        device: "cpu" or "cuda"; the first parameter's if None.

    Returns:
        The model. A rotary embedding is a function that all models of a family share: it is replaced for all of them.

    Raises:
        TypeError: not a module.
        ValueError: another name or device; nothing in the model is marked.

    Example:
        >>> from transformers import LlamaForCausalLM
        >>> from seqkern.integrations.kernels import kernelize
        >>> model = kernelize(LlamaForCausalLM.from_pretrained("..."))  # doctest: +SKIP
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"kernelize: model must be a torch.nn.Module, got {type(model).__name__}")
    wanted = mapping(*names)
    if device is None:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
    kind = torch.device(device).type
    if kind not in DEVICES:
        raise ValueError(f'kernelize: device must be "cpu" or "cuda", got {str(device)!r}')
    marked = [m for m in _marked(model) if type(m).kernel_layer_name in wanted]  # type: ignore[attr-defined]
    if not marked:
        raise ValueError(
            f"kernelize: nothing in {type(model).__name__} is marked as {' or '.join(wanted)}: classes are, by"
            f" kernels.use_kernel_forward_from_hub{_transformers()}"
        )
    with _use(wanted, inherit_mapping=False), _quiet():
        _kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE if mode is None else mode, device=kind)
    for module in marked:  # before torch.compile looks
        (_norm if type(module).kernel_layer_name == "RMSNorm" else _rotation)(module)  # type: ignore[attr-defined]
    return model


def _marked(model: nn.Module) -> list[nn.Module]:
    modules = [m for m in model.modules() if hasattr(type(m), "kernel_layer_name")]
    return modules + [f for m in model.modules() for f in getattr(m, "_kernel_funcs", {}).values()]


def _transformers() -> str:
    """Why transformers' classes may not be marked: it ignores versions of kernels that it does not know."""
    with contextlib.suppress(ImportError):
        from transformers.utils.import_utils import is_kernels_available

        if not is_kernels_available():
            return f"; the installed transformers does not mark any with kernels {_package.__version__}"
    return ""


@contextlib.contextmanager
def _quiet() -> Any:
    """Without the package's warning for each name of the model that the mapping leaves alone."""
    import logging

    logger = logging.getLogger("kernels.layer.layer")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
