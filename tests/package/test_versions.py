"""What the ops use of torch is traced by torch.compile of every version that is claimed, not by the newest only.

`make versions` runs the tests on these versions; that takes gigabytes and is by hand. This is what of it CI can hold:
the functions of torch that are called where the compiler sees them are known to it, no name after a star is used as a
list, which Dynamo before 2.12 makes a tuple, and neither `locals()` nor a property of a NamedTuple is used, which that
of 2.10 does not know.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
FILES = sorted(
    [
        ROOT / "seqkern/_recording.py",
        ROOT / "seqkern/_arguments.py",
        *ROOT.glob("seqkern/ops/*.py"),
        *ROOT.glob("seqkern/nn/*.py"),
    ]
)
# Names that torch.compile of 2.10 and later traces, or folds to a constant. Add one after `make versions`, or after
# compiling with it on the oldest version. Functions of tensors (torch.where), dtypes and ops need not be named.
KNOWN = {
    "torch.Size",
    "torch.SymInt",
    "torch.nn.Dropout",
    "torch.nn.LayerNorm",
    "torch.nn.Linear",
    "torch.nn.ModuleList",
    "torch.nn.MultiheadAttention",
    "torch.nn.Parameter",
    "torch.nested.as_nested_tensor",
    "torch.nn.init.constant_",
    "torch.nn.init.uniform_",
    "torch.strided",
    "torch.no_grad",
    "torch.randint",
    "torch.tensor",
    "torch.autocast",
    "torch.broadcast_shapes",
    "torch.compiler.disable",
    "torch.compiler.is_compiling",
    "torch.compiler.is_dynamo_compiling",
    "torch.finfo",
    "torch.func.vjp",
    "torch.get_autocast_dtype",
    "torch.is_autocast_enabled",
    "torch.is_grad_enabled",
    "torch.promote_types",
    "torch._C._are_functorch_transforms_active",
    "torch._VF._pack_padded_sequence",
    "torch._VF._pad_packed_sequence",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map",
}
# Seen by no compiler: called when the library is connected, or only where torch.compiler.is_compiling() said no, or
# inside of what autograd and torch.func run.
UNSEEN = {
    "torch._C._FunctionBase.__dict__",
    "torch._C._dispatch_keys",
    "torch._C._functorch.TransformType.Jvp",
    "torch._C._functorch.get_interpreter_stack",
    "torch._C._functorch.is_legacy_batchedtensor",
    "torch._C._get_tracing_state",
    "torch._C._is_alias_of",
    "torch._C._vmapmode_decrement_nesting",
    "torch._C._vmapmode_increment_nesting",
    "torch._add_batch_dim",
    "torch.nested",
    "torch._functorch.utils.unwrap_dead_wrappers",
    "torch._remove_batch_dim",
    "torch.autograd.Function",
    "torch.cuda.is_current_stream_capturing",
    "torch.jagged",
    "torch.jit.is_tracing",
    "torch.nested.nested_tensor_from_jagged",
    "torch.onnx.is_in_onnx_export",
}


def plain(name: str) -> bool:
    """Whether it is a function of tensors, a dtype or an op: these every version traces."""
    last = name.removeprefix("torch.")
    of_tensors = getattr(torch._C._VariableFunctions, last, None)
    return name.startswith("torch.ops.") or isinstance(getattr(torch, last, None), torch.dtype) or callable(of_tensors)


def dotted(node: ast.expr) -> str:
    """torch.a.b of such an expression, else nothing."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join(["torch", *reversed(names)]) if isinstance(node, ast.Name) and node.id == "torch" else ""


def functions(tree: ast.Module) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def used(source: str) -> set[str]:
    """The names of torch in the bodies of functions, but for annotations."""
    found = set()
    for function in functions(ast.parse(source)):
        inner = {id(n.annotation) for n in ast.walk(function) if isinstance(n, ast.AnnAssign)}
        todo: list[ast.AST] = list(function.body)
        while todo:
            node = todo.pop()
            if id(node) in inner or isinstance(node, (ast.FunctionDef, ast.arguments)):
                continue
            if isinstance(node, ast.Attribute) and (name := dotted(node)):
                found.add(name)
            else:
                todo += ast.iter_child_nodes(node)
    return found


def lists_after_stars(source: str) -> set[str]:
    """Calls of a list's methods on a name that stands behind a star and was not made a list."""
    found = set()
    for function in functions(ast.parse(source)):
        nodes = list(ast.walk(function))
        stars = [n.value for n in nodes if isinstance(n, ast.Starred) and isinstance(n.ctx, ast.Store)]
        starred = {value.id for value in stars if isinstance(value, ast.Name)}
        made = {t.id for n in nodes if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
        for n in nodes:
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and isinstance(n.func.value, ast.Name):
                name, method = n.func.value.id, n.func.attr
                if name in starred - made and not hasattr(tuple, method):
                    found.add(f"{function.name}: {name}.{method}")
    return found


def locals_and_properties(source: str) -> set[str]:
    """Calls of locals(), but for what is recorded (no compiler sees a proxy), and properties of NamedTuples."""
    nodes = list(ast.walk(ast.parse(source)))
    calls = [n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    recorded = {id(a) for n in calls if n.func.id.startswith("record") for a in n.args}
    found = {"locals()" for n in calls if n.func.id == "locals" and id(n) not in recorded}
    for n in nodes:
        if isinstance(n, ast.ClassDef) and any(isinstance(b, ast.Name) and b.id == "NamedTuple" for b in n.bases):
            members = [m for m in n.body if isinstance(m, ast.FunctionDef) and m.decorator_list]
            found |= {f"{n.name}.{m.name}" for m in members if ast.unparse(m.decorator_list[0]) == "property"}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_is_compiled_uses_known_functions(path):
    source = path.read_text()
    unknown = {name for name in used(source) - KNOWN - UNSEEN if not plain(name)}
    assert not unknown, f"{path.name} uses {sorted(unknown)}: does torch.compile of torch 2.10 trace it?"
    assert not lists_after_stars(source)
    assert not locals_and_properties(source)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("def f(t):\n    return torch.amp.is_autocast_available(t.device.type)", "torch.amp.is_autocast_available"),
        ("def f(t):\n    a, *b = g(t)\n    return b.pop(0)", "f: b.pop"),
        ("def f(t):\n    return g(f, locals())", "locals()"),
        ("class A(NamedTuple):\n    @property\n    def b(self): ...", "A.b"),
    ],
)
def test_what_broke_once_is_found(source, named):
    """All stood in the ops, and torch.compile of 2.10 or 2.11 failed with them."""
    unknown = {name for name in used(source) if name not in KNOWN | UNSEEN}
    assert named in unknown | lists_after_stars(source) | locals_and_properties(source)
    assert not locals_and_properties("def f(t):\n    return record(f, locals())")
    fine = "def f(t):\n    a, *b = g(t)\n    b = list(b)\n    return torch.where(b.pop(0), t, torch.float32)"
    assert not lists_after_stars(fine)
    assert all(plain(name) for name in used(fine))


def test_the_table_counts_what_the_report_says(tmp_path):
    """tests/versions.py, without a run."""
    spec = importlib.util.spec_from_file_location("versions", ROOT / "tests" / "versions.py")
    assert spec is not None
    assert spec.loader is not None
    versions = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(versions)
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite tests="1240" failures="2" errors="1" skipped="7"></testsuite></testsuites>'
    )
    found = versions.counts(report)
    assert found == {"passed": "1,230", "failed": "3", "skipped": "7"}
    rows = [{"torch": "2.10.0", **found}, {"torch": "2.11.0", **found}]
    assert versions.table(rows).splitlines()[:3] == [
        "| torch | passed | failed | skipped |",
        "| --- | --- | --- | --- |",
        "| 2.10.0 | 1,230 | 3 | 7 |",
    ]
