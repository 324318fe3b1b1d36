"""Every op on a GPU against float64, as the tests of the CPU have it.

In a file of its own: those import modules that a machine lent for its GPU may lack.
"""

from __future__ import annotations

import pytest

import seqkern
from seqkern.ops.rnn import CELLS
from seqkern.testing import (
    add_layer_norm_case,
    attention_case,
    check_case,
    layer_norm_case,
    rnn_case,
    rnn_cell_case,
)
from seqkern.testing.option_sets import ATTENTION_OPTIONS, ATTENTION_SHAPES, PACKED_LENGTHS, PACKED_OPTIONS

pytestmark = pytest.mark.gpu


@pytest.fixture(params=CELLS)
def cell(request):
    return request.param


@pytest.mark.parametrize("shape", ATTENTION_SHAPES.values(), ids=ATTENTION_SHAPES)
def test_attention(shape, dtype, passes):
    passes(check_case(attention_case(**shape), dtype, device="cuda"))


@pytest.mark.parametrize("case", ATTENTION_OPTIONS.values(), ids=ATTENTION_OPTIONS)
def test_attention_options(case, dtype, passes):
    passes(check_case(attention_case(**({"queries": 130, "head_dim": 32} | case)), dtype, device="cuda"))


@pytest.mark.parametrize("case", PACKED_OPTIONS.values(), ids=PACKED_OPTIONS)
def test_packed_sequences(case, dtype, passes):
    passes(check_case(attention_case(packed=PACKED_LENGTHS, **({"head_dim": 32} | case)), dtype, device="cuda"))


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("columns", [1, 63, 768, 1024, 5120, 16384])
def test_norms(columns, backend, dtype, passes):
    for centred in (True, False):
        cases = [layer_norm_case(130, columns, centred=centred)]
        cases += [add_layer_norm_case(130, columns, centred=centred, dropout_p=p) for p in (0.0, 0.3)]
        for case in cases:
            with seqkern.use_backend(backend):
                passes(check_case(case, dtype, device="cuda"))


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 64), (65, 33, 7, 129), (65, 8, 64, 256)], ids=str)
def test_layers(cell, shape, backend, dtype, passes):
    with seqkern.use_backend(backend):
        passes(check_case(rnn_case(cell, *shape), dtype, device="cuda"))


@pytest.mark.parametrize("shape", [(1, 1, 64), (33, 7, 129), (8, 64, 256)], ids=str)
def test_cells(cell, shape, dtype, passes):
    passes(check_case(rnn_cell_case(cell, *shape), dtype, device="cuda"))
