"""Who may import whom, and how large a file may be: the arrows of the layout."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("arguments", "config", "contradictions", "errors", "schema", "secrets", "storage", "cluster", "cpus", "room", "places", "signals")
ALLOWED = {
    "raytune70b.blocks": {"raytune70b.blocks"},
    "raytune70b.planning": {"raytune70b.planning"},
    "raytune70b.model": {"raytune70b.model"},
    "raytune70b.tracking": {"raytune70b.tracking", "raytune70b.planning", "raytune70b.blocks"},
    "raytune70b.training": {"raytune70b.training", "raytune70b.blocks", "raytune70b.model", "raytune70b.tracking", "raytune70b.planning"},
    "data_pipelines": {"data_pipelines", "raytune70b.blocks"},
}
PURE = [
    "raytune70b/contradictions.py", "raytune70b/room.py", "raytune70b/blocks/order.py", "raytune70b/planning/memory.py", "raytune70b/planning/throughput.py",
    "raytune70b/planning/offload.py", "raytune70b/planning/host.py", "raytune70b/planning/cost.py", "raytune70b/training/schedule.py", "raytune70b/training/guards.py",
    "data_pipelines/packing.py",
]  # fmt: skip
SOURCES = sorted(p for folder in ("raytune70b", "data_pipelines", "jobs", "tests") for p in (ROOT / folder).rglob("*.py"))


def imports(path):
    """Every module that a file imports, wherever in the file; those only for type checkers left out."""
    tree = ast.parse(path.read_text())
    hidden = {id(n) for t in ast.walk(tree) if isinstance(t, ast.If) and "TYPE_CHECKING" in ast.unparse(t.test) for n in ast.walk(t)}
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(module, packages):
    return any(module == p or module.startswith(p + ".") for p in packages)


@pytest.mark.parametrize("package", ALLOWED)
def test_arrows(package):
    ours = ("raytune70b", "data_pipelines", "jobs", "tests")
    allowed = {*ALLOWED[package], *(f"raytune70b.{name}" for name in LAYERS)}
    for path in (ROOT / package.replace(".", "/")).rglob("*.py"):
        for module in imports(path):
            if within(module, ours):
                assert within(module, allowed) or module in {f"raytune70b.{name}" for name in LAYERS}, f"{path.relative_to(ROOT)} imports {module}"


def test_nothing_imports_the_jobs():
    for path in SOURCES:
        assert not any(within(m, ("jobs",)) for m in imports(path)), path


@pytest.mark.parametrize("name", PURE)
def test_the_core_is_plain_numbers(name):
    modules = set(imports(ROOT / name))
    assert not any(within(m, ("torch", "ray", "transformers", "mlflow")) for m in modules), modules


def test_files_stay_readable():
    long = {str(p.relative_to(ROOT)): n for p in SOURCES if (n := len(p.read_text().splitlines())) > 500}
    entries = {p.name: n for p in (ROOT / "jobs").glob("*.py") if (n := len(p.read_text().splitlines())) >= 80}
    assert not long and not entries


def test_nothing_that_acts_when_it_is_read():
    """No pickle of another process, no code out of YAML or a model folder, no shell. Checkpoints' metadata: see test_saver's trap."""
    ours = [p for p in SOURCES if p.relative_to(ROOT).parts[0] != "tests"]
    assert {str(p.relative_to(ROOT)) for p in ours if "pickle" in imports(p)} <= {"raytune70b/evaluation/pipeline.py"}  # to its own tasks
    for path in ours:
        for call in (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)):
            name, keywords = ast.unparse(call.func), {k.arg: ast.unparse(k.value) for k in call.keywords}
            assert name not in ("eval", "exec", "os.system", "yaml.load", "yaml.unsafe_load"), f"{path}: {name}"
            assert name != "torch.load" or keywords.get("weights_only") == "True", f"{path}: {ast.unparse(call)}"
            for keyword in ("allow_pickle", "trust_remote_code", "shell"):
                assert keywords.get(keyword, "False") == "False", f"{path}: {ast.unparse(call)}"
