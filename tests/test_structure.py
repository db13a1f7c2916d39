"""Rules of the code base that no linter knows: sizes, names, doors, abstract-or-final classes, imports without torch.

Each test prints every place that breaks its rule. An exception stands in a table here with its reason, and one that is
no longer needed fails too.
"""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("agent", "algorithms", "controller", "data", "models", "protocol", "workers")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "core"}
# Folders of tests that mirror no package.
OTHER_TEST_FOLDERS = {"golden", "gpu", "learning"}
# These, with everything in them, are imported by processes that must start fast and small, such as reward pools.
TORCH_FREE = (
    "vrl.agent",
    "vrl.data",
    "vrl.protocol.config",
    "vrl.protocol.errors",
    "vrl.protocol.ports",
    "vrl.protocol.trajectory",
)
HEAVY = {"torch", "ray", "vllm", "transformers"}

# path or path::function -> reason; at most three.
TOO_LONG: dict[str, str] = {}
# path -> reason
LOCAL_IMPORTS: dict[str, str] = {
    "vrl/controller/prepare.py": "each recipe needs a library of its own that takes seconds to import",
    "vrl/workers/engines.py": "engines are optional: the Hugging Face one runs where vLLM is not installed",
    "vrl/workers/building.py": "DeepSpeed is optional, and takes a second to import",
}
# path -> reason; vrl/models may look into what transformers hands out.
DYNAMIC_ATTRIBUTES: dict[str, str] = {}

INTERFACES = {"Protocol", "ABC"}
# Bases that say what kind of value a class is. They are no parents whose methods could be overridden.
VALUE_BASES = {"Enum", "StrEnum", "IntEnum", "Flag", "NamedTuple", "TypedDict", "Generic"}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def nodes(kind: type[ast.AST] | tuple[type[ast.AST], ...], *folders: str) -> Iterator[tuple[Path, ast.AST]]:
    for path in python_files(*folders):
        yield from ((path, node) for node in ast.walk(tree(path)) if isinstance(node, kind))


def calls(*folders: str) -> Iterator[tuple[Path, ast.Call]]:
    yield from nodes(ast.Call, *folders)  # pyright: ignore[reportReturnType]


def dotted(node: ast.expr) -> str:
    """Last name of `a.b.C`, `C[T]`, `C(...)`: enough to know a base class or a decorator."""
    if isinstance(node, ast.Subscript):
        return dotted(node.value)
    if isinstance(node, ast.Call):
        return dotted(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def none_of(offenders: Iterable[str], rule: str) -> None:
    found = sorted(offenders)
    assert not found, f"{rule}:\n  " + "\n  ".join(found)


def check_with_exceptions(offenders: dict[str, str], exceptions: dict[str, str], rule: str) -> None:
    none_of((f"{key} ({what})" for key, what in offenders.items() if key not in exceptions), rule)
    none_of((key for key in exceptions if key not in offenders), f"exceptions to '{rule}' that are no longer needed")


def test_files_and_functions_are_short():
    long: dict[str, str] = {}
    for path in python_files("vrl", "tests", "benchmarks"):
        lines = len(path.read_text().splitlines())
        if lines > MAX_FILE_LINES:
            long[name_of(path)] = f"{lines} lines, {MAX_FILE_LINES} allowed"
    for path, node in nodes((ast.FunctionDef, ast.AsyncFunctionDef), "vrl", "tests", "benchmarks"):
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            long[f"{name_of(path)}::{node.name}"] = f"{lines} lines, {MAX_FUNCTION_LINES} allowed"
    check_with_exceptions(long, TOO_LONG, "files and functions are short")
    assert len(TOO_LONG) <= 3


def test_names_say_what_a_file_is_about():
    files = python_files("vrl", "tests", "benchmarks")
    parts = {part for path in files for part in path.relative_to(ROOT).with_suffix("").parts}
    none_of(BANNED_NAMES & {part.removeprefix("test_") for part in parts}, "names that say nothing")


def test_the_packages_are_those_of_the_design():
    assert tuple(sorted(path.parent.name for path in (ROOT / "vrl").glob("*/__init__.py"))) == PACKAGES
    none_of((name_of(p) for p in (ROOT / "vrl").glob("*.py") if p.name != "__init__.py"), "modules outside a package")
    folders = {path.parent for path in python_files("vrl")}
    none_of((name_of(f) for f in folders if not (f / "__init__.py").exists()), "folders without __init__.py")


@pytest.mark.parametrize("package", ["", *PACKAGES])
def test_package_files_hold_a_docstring_only(package: str):
    body = tree(ROOT / "vrl" / package / "__init__.py").body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)


def test_tests_mirror_the_packages():
    wrong = []
    for path in python_files("tests"):
        folder = path.parent.relative_to(ROOT / "tests")
        known = not folder.parts or folder.parts[0] in OTHER_TEST_FOLDERS or (ROOT / "vrl" / folder).is_dir()
        if not known:
            wrong.append(f"{name_of(path)} (there is no vrl/{folder.as_posix()})")
    none_of(wrong, "folders of tests mirror the packages")


def test_gpu_tests_are_in_their_folder():
    outside = {
        name_of(path)
        for path, node in nodes(ast.Attribute, "tests")
        if isinstance(node, ast.Attribute) and node.attr == "gpu" and dotted(node.value) == "mark"
        if (ROOT / "tests" / "gpu") not in path.parents
    }
    none_of(outside, "tests with the mark gpu belong in tests/gpu")


def test_modules_have_docstrings():
    none_of((name_of(p) for p in python_files("vrl", "tests") if not ast.get_docstring(tree(p))), "module docstrings")


def test_imports_stand_at_the_top():
    local: dict[str, str] = {}
    for path, function in nodes((ast.FunctionDef, ast.AsyncFunctionDef), "vrl", "tests", "benchmarks"):
        for node in ast.walk(function):
            if isinstance(node, ast.Import | ast.ImportFrom):
                local[name_of(path)] = f"line {node.lineno}"
    check_with_exceptions(local, LOCAL_IMPORTS, "imports stand at the top")


def test_attributes_are_declared():
    dynamic: dict[str, str] = {}
    for path, call in calls("vrl"):
        literal = len(call.args) > 1 and isinstance(call.args[1], ast.Constant)
        if isinstance(call.func, ast.Name) and (
            call.func.id == "hasattr" or (call.func.id in {"getattr", "setattr"} and literal)
        ):
            dynamic[name_of(path)] = f"{call.func.id} in line {call.lineno}"
    dynamic = {key: what for key, what in dynamic.items() if not key.startswith("vrl/models/")}
    check_with_exceptions(dynamic, DYNAMIC_ATTRIBUTES, "no hasattr and no getattr with a literal")


def test_nothing_prints():
    prints = (
        f"{name_of(path)}:{call.lineno}"
        for path, call in calls("vrl")
        if isinstance(call.func, ast.Name) and call.func.id == "print"
    )
    none_of(prints, "no print")


def test_losses_are_divided_in_one_place_only():
    """A mean inside a loss is a mean over one rank's micro-batch; the global count divides, in aggregation.py."""
    means = (
        f"{name_of(path)}:{call.lineno}"
        for path, call in calls("vrl/algorithms/losses")
        if isinstance(call.func, ast.Attribute) and call.func.attr in {"mean", "nanmean"}
    )
    none_of(means, "no mean in a loss")


@cache
def classes() -> list[tuple[str, ast.ClassDef]]:
    return [(name_of(path), node) for path, node in nodes(ast.ClassDef, "vrl") if isinstance(node, ast.ClassDef)]


@cache
def classes_by_name() -> dict[str, ast.ClassDef]:
    return {node.name: node for _, node in classes()}


def own_bases(node: ast.ClassDef) -> list[ast.ClassDef]:
    """Base classes that vrl itself defines, found by name."""
    by_name = classes_by_name()
    return [by_name[name] for name in map(dotted, node.bases) if name in by_name and name != node.name]


def is_interface(node: ast.ClassDef) -> bool:
    return any(dotted(base) in INTERFACES for base in node.bases)


def is_error(node: ast.ClassDef) -> bool:
    named = any(dotted(base).endswith(("Error", "Exception", "Warning")) for base in node.bases)
    return named or any(map(is_error, own_bases(node)))


def test_classes_are_interfaces_or_final():
    wrong = []
    for where, node in classes():
        bases = {dotted(base) for base in node.bases} - VALUE_BASES
        if not bases or is_interface(node) or is_error(node):
            continue
        if "final" not in {dotted(decorator) for decorator in node.decorator_list}:
            wrong.append(f"{where}: {node.name} has a base and is neither an interface nor @final")
        for base in own_bases(node):
            if not is_interface(base):
                wrong.append(f"{where}: {node.name} inherits from {base.name}, which is no interface")
    none_of(wrong, "a class is an interface or a final leaf")


def is_abstract(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Marked so, or with a body that does nothing (docstring, `...`)."""
    marked = any(dotted(decorator) == "abstractmethod" for decorator in method.decorator_list)
    return marked or all(isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) for line in method.body)


def methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    return {line.name: line for line in node.body if isinstance(line, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_implemented_methods_are_not_overridden():
    wrong = [
        f"{where}: {node.name}.{name} overrides what {base.name} implements"
        for where, node in classes()
        for base in own_bases(node)
        for name in methods(node).keys() & methods(base).keys()
        if not is_abstract(methods(base)[name])
    ]
    none_of(wrong, "implemented methods are not overridden")


def torch_free_modules() -> list[str]:
    modules = []
    for path in python_files("vrl"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if any(name == root or name.startswith(f"{root}.") for root in TORCH_FREE):
            modules.append(name)
    return modules


def test_agent_data_and_config_import_without_torch():
    """In a fresh interpreter, module by module, so that the message names the first one that brings torch in."""
    program = (
        "import importlib, sys\n"
        f"for name in {torch_free_modules()!r}:\n"
        "    importlib.import_module(name)\n"
        f"    found = sorted({HEAVY!r} & sys.modules.keys())\n"
        "    if found:\n"
        "        sys.exit(f'{name} imports {found}')\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr


def test_the_command_line_starts_without_torch():
    """`vrl --help` answers at once, and `train_ppo.sh` reaches the program in under two seconds."""
    program = f"import sys, vrl.controller.cli\nsys.exit(str(sorted({HEAVY!r} & sys.modules.keys())).strip('[]') or 0)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
