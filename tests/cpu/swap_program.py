"""What tests/cpu/test_swap.py runs in a process of its own: everything of ours in the place of torch's, then models.

First the results of torch, in float64; then everything that has the same name is assigned; then the same models again,
built and run in the same words, and the numbers compared.
"""

from __future__ import annotations

import copy
import pickle
import sys
import warnings

import torch

import seqkern

# Every module of ours that has the name of one of torch's, and what builds a small one.
MODULES = {
    **dict.fromkeys(["LayerNorm", "RMSNorm"], (4,)),
    **dict.fromkeys(["LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell"], (4, 4)),
    "MultiheadAttention": (4, 2),
    "TransformerEncoderLayer": (4, 2, 8),
    "TransformerDecoderLayer": (4, 2, 8),
    "TransformerEncoder": (seqkern.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2),
    "TransformerDecoder": (seqkern.nn.TransformerDecoderLayer(4, 2, 8), 2),
    "Transformer": (4, 2, 1, 1, 8),
}
FUNCTIONS = ["scaled_dot_product_attention", "layer_norm", "rms_norm"]
# Of the same name, but with arguments of their own: docs/guide.md says so.
OTHERS = {"conv1d", "cross_entropy", "embedding", "linear_cross_entropy"}


def models():
    """Named models, and an input for each: built anew, from whatever torch.nn holds now."""

    class Tagger(torch.nn.LSTM):
        def __init__(self):
            super().__init__(16, 8, num_layers=2, bidirectional=True, batch_first=True)
            self.out = torch.nn.Linear(16, 3)

        def forward(self, x):
            return self.out(super().forward(x)[0])

    class Steps(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.cells = torch.nn.ModuleList(
                [torch.nn.GRUCell(16, 16), torch.nn.RNNCell(16, 16), torch.nn.LSTMCell(16, 16)]
            )
            self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(16), torch.nn.RMSNorm(16)])

        def forward(self, x):
            for x_t in x.unbind(1):
                state = self.cells[1](self.norms[0](x_t), self.cells[0](x_t))
                h, c = self.cells[2](x_t, (state, state))
            return self.norms[1](h + c)

    class Heads(torch.nn.Module):
        def forward(self, x):
            F = torch.nn.functional
            q = x.unflatten(-1, (2, 8)).transpose(1, 2)
            y = F.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.3).transpose(1, 2).flatten(2)
            return F.rms_norm(F.layer_norm(y, (16,), torch.full((16,), 2.0, dtype=x.dtype)), (16,), eps=1e-6)

    class Recurrent(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = torch.nn.LSTM(16, 16, proj_size=5)
            self.gru = torch.nn.GRU(5, 16, bidirectional=True)
            self.tanh = torch.nn.RNN(32, 16)
            self.relu = torch.nn.RNN(16, 16, nonlinearity="relu", bias=False)

        def forward(self, x):
            for network in (self.lstm, self.gru, self.tanh, self.relu):
                x, _ = network(x)
            return x

    layer = {"d_model": 16, "nhead": 2, "dim_feedforward": 32, "dropout": 0.0, "batch_first": True}
    return {
        "tagger": Tagger(),
        "steps": Steps(),
        "heads": Heads(),
        "recurrent": Recurrent(),
        "encoder layer": torch.nn.TransformerEncoderLayer(**layer, norm_first=True),
        "encoder": torch.nn.TransformerEncoder(
            torch.nn.TransformerEncoderLayer(**layer), 2, torch.nn.LayerNorm(16), enable_nested_tensor=False
        ),
        "decoder": _WithMemory(torch.nn.TransformerDecoderLayer(**layer)),
    }


class _WithMemory(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, x.flip(1))


def results():
    """Outputs and gradients of every model, with the same parameters and inputs whenever it is called."""
    found = {}
    for name, model in models().items():
        torch.manual_seed(0)
        x = torch.randn(3, 7, 16, dtype=torch.float64)
        model.double()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        x.requires_grad_()
        y = model(x)
        y.backward(torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y))
        found[name] = [y.detach(), x.grad, *(p.grad for p in model.parameters())]
        with torch.no_grad():
            found[f"{name}, evaluation"] = [model.eval()(x)]
    return found


before, old = results(), torch.nn.LSTM(4, 4)
kept = {name: getattr(torch.nn, name) for name in MODULES}
for name in MODULES:
    setattr(torch.nn, name, getattr(seqkern.nn, name))
for name in FUNCTIONS:
    setattr(torch.nn.functional, name, getattr(seqkern, name))
public = {name for name in seqkern.nn.__all__ if hasattr(torch.nn, name)}
assert public == set(MODULES), public
public = {name for name in seqkern.__all__ if hasattr(torch.nn.functional, name)}
assert public == set(FUNCTIONS) | OTHERS, public

sys.setrecursionlimit(400)
with seqkern.use_backend("cpu"):
    after = results()
for name, expected in before.items():
    torch.testing.assert_close(after[name], expected, msg=lambda text, name=name: f"{name}: {text}")

# The models hold ours, with torch's parameters.
for name, theirs in kept.items():
    ours = getattr(torch.nn, name)(*MODULES[name])
    assert type(ours).__module__.startswith("seqkern"), name
    assert isinstance(ours, theirs), name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says why it will not use nested tensors
        theirs(*MODULES[name]).load_state_dict(ours.state_dict())
    copied = pickle.loads(pickle.dumps(copy.deepcopy(ours)))
    assert type(copied) is type(ours), name

# Models from before the swap still are what they were; ours with options of their own can be built and reset.
assert isinstance(old(torch.randn(2, 3, 4))[0], torch.Tensor)
options = seqkern.nn.LSTM(4, 4, layer_norm=True, peephole=True)
options.reset_parameters()
assert type(options.layer_norm_ih_l0).__name__ == "LayerNorm"
with seqkern.use_backend("reference"):
    options(torch.randn(2, 3, 4))

# A second derivative, which goes by way of the reference.
x = torch.randn(3, 1, 4, dtype=torch.float64, requires_grad=True)
assert torch.autograd.gradgradcheck(lambda x: options.double()(x)[0], (x,))
