"""The rules of docs/architecture.md that the files themselves show: imports, sizes, no torch where none belongs."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ENGINE = ROOT / "quant_bench"

# a module may import from rows above its own; modules of one row do not know each other
ROWS = (
    {"errors", "score", "identity", "_roots", "cache", "corpora", "progress"},
    {
        *("spec", "rebuild", "numerics", "statistics", "stream", "mirror", "hub_access", "record_json", "probe"),
        "samples",
    },
    {"model", "attention", "cell", "coercion", "schemes", "data"},
    {"arm", "quantizer", "task", "record", "registry", "packing", "scoring", "observe", "mechanisms"},
    {"models", "depth", "scaffold"},
    {"calibrate", "lowbit", "report", "decoding", "texts", "tiny", "training"},
    {"quantization", "harness", "windows", "outliers", "environment", "plan", "testing", "site"},
    {"perplexity", "lm_eval_task", "doctor", "demo", "assemble", "weights", "submission", "export"},
    {"parity", "runner", "diagnostics", "validation"},
    {"api", "commands"},
    {"cli"},
    {"__main__"},
)
# these say what the plugins of their kind are, and every row may ask for the package's version
OUTSIDE = {"arms", "quantizers", "tasks", "__init__"}
NO_TORCH = (
    *("errors", "score", "identity", "spec", "coercion", "schemes", "cell", "record", "record_json", "statistics"),
    *("registry", "report", "site", "data", "commands", "commands.compare", "commands.site", "commands.train", "cli"),
    "submission.merge",
)
NOT_FOR_PLUGINS = {
    "registry",
    "record",
    "report",
    "site",
    "statistics",
    "plan",
    "samples",
    "environment",
    "assemble",
    "weights",
    "export",
    "runner",
    "api",
    "commands",
    "cli",
}
NOT_FOR_PLUGINS |= {"testing", "demo", "doctor", "arms", "quantizers", "tasks", "__main__"}


def modules() -> list[Path]:
    return sorted(file for file in ENGINE.rglob("*.py") if file.parent != ENGINE / "arms")


def plugins() -> list[Path]:
    folders = (ROOT / "quantizers", ROOT / "tasks", ENGINE / "arms")
    return sorted(file for folder in folders for file in folder.glob("*.py") if not file.name.startswith("_"))


def python_files() -> list[Path]:
    """Every Python file of the checkout that is ours."""
    folders = ("quant_bench", "quantizers", "tasks", "tests", "benchmarks", "examples")
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imports(tree: ast.Module) -> Iterator[str]:
    """Dotted names of what a file imports at any depth, but for types only."""
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def ours(tree: ast.Module) -> set[str]:
    """Modules of the engine that a file imports."""
    names = (name.split(".") for name in imports(tree))
    return {parts[1] for parts in names if parts[0] == "quant_bench" and len(parts) > 1 and parts[1] != "__version__"}


def row_of(module: str) -> int:
    found = [index for index, row in enumerate(ROWS) if module in row]
    assert len(found) == 1, f"{module} must stand in exactly one row of ROWS; it stands in {found}"
    return found[0]


@pytest.mark.parametrize("file", modules(), ids=lambda file: file.relative_to(ENGINE).as_posix())
def test_imports_point_down(file: Path) -> None:
    module = file.relative_to(ENGINE).with_suffix("").parts[0]
    if module in OUTSIDE:
        return
    for name in ours(parsed(file)) - {module}:
        assert name not in OUTSIDE, f"{module} imports {name}: plugins are asked for through the registry"
        assert row_of(name) < row_of(module), f"{module} imports {name}, which does not lie below it"


@pytest.mark.parametrize("file", plugins(), ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_plugins_import_contracts_and_engine_parts_only(file: Path) -> None:
    assert not ours(parsed(file)) & NOT_FOR_PLUGINS


@pytest.mark.parametrize("file", plugins(), ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_plugins_have_at_most_forty_lines_of_code(file: Path) -> None:
    assert code_lines(file) <= 40


def code_lines(file: Path) -> int:
    """Lines that are neither blank nor comment nor docstring."""
    text, tree = file.read_text(encoding="utf-8"), parsed(file)
    inside: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            inside.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(1 for index, line in lines if index not in inside and line.strip() and not line.strip().startswith("#"))


def test_lines_of_code_are_counted_without_blanks_comments_and_docstrings(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(
        '"""One.\n\nTwo.\n"""\n\nimport os\n\n\ndef f():\n    """Doc."""\n    # why\n    return os\n', encoding="utf-8"
    )
    assert code_lines(file) == 3


@pytest.mark.parametrize("file", [*modules(), *plugins()], ids=lambda file: file.relative_to(ROOT).as_posix())
def test_files_and_functions_fit_a_readers_head(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 300
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno + 1 <= 80, f"{node.name} is too long"


@pytest.mark.parametrize("file", python_files(), ids=lambda file: file.relative_to(ROOT).as_posix())
def test_no_plugin_is_imported_by_path(file: Path) -> None:
    for name in imports(parsed(file)):
        parts = name.split(".")
        assert parts[0] not in ("quantizers", "tasks"), f"{name} would find a foreign package of that name"
        by_path = parts[0] == "quant_bench" and len(parts) > 2 and parts[1] in ("arms", "quantizers", "tasks")
        assert not by_path, f"{name}: ask the registry"


def test_what_reads_records_needs_no_torch() -> None:
    script = (
        "import importlib, json, sys\n"
        "found = {}\n"
        f"for name in {NO_TORCH!r}:\n"
        "    importlib.import_module(f'quant_bench.{name}')\n"
        "    found[name] = 'torch' in sys.modules\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert [name for name, loaded in json.loads(done.stdout).items() if loaded] == []
