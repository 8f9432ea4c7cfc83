"""The design's rules, read off the source: levels, sizes, one home of padding, one mask site, no globals."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "ostinato"

LEVELS = {
    "errors": 0,
    "config": 0,
    "options": 0,
    "padding": 0,
    "graphs": 1,
    "ops": 1,
    "loadgen": 1,
    "parallel": 1,
    "text": 1,
    "moe": 2,
    "attention": 2,
    "kv": 2,
    "models": 3,
    "engine": 4,
    "server": 5,
    "testing": 5,
    "verify": 5,
    "deploy": 6,
    "cli": 6,
    "__main__": 7,
    "__init__": 7,
}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def _files() -> list[Path]:
    return sorted(SRC.rglob("*.py"))


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _area(path: Path) -> str:
    """First part of the module's name inside the package: `graphs`, `padding`, ..."""
    part = path.relative_to(SRC).parts[0]
    return part.removesuffix(".py")


def _name(path: Path) -> str:
    return str(path.relative_to(SRC))


def _at(path: Path, node: ast.AST) -> str:
    return f"{_name(path)}:{getattr(node, 'lineno', 0)}"


def _imported_areas(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import at line {node.lineno}"
            module = node.module or ""
            names = [f"ostinato.{a.name}" for a in node.names] if module == "ostinato" else [module]
        for name in names:
            parts = name.split(".")
            if parts[0] == "ostinato" and len(parts) > 1:
                yield node, parts[1]


def test_every_area_has_a_level() -> None:
    assert {_area(path) for path in _files()} <= set(LEVELS)


@pytest.mark.parametrize("path", _files(), ids=_name)
def test_imports_go_down(path: Path) -> None:
    area = _area(path)
    wrong = [
        f"{_at(path, node)} imports {target}"
        for node, target in _imported_areas(_tree(path))
        if LEVELS.get(target, -1) > LEVELS[area]
    ]
    assert not wrong


def test_graphs_and_padding_stand_alone() -> None:
    """`graphs` and `padding` are libraries of their own: they import nothing else of the package but errors."""
    for path in [SRC / "padding.py", *sorted((SRC / "graphs").glob("*.py"))]:
        used = {target for _, target in _imported_areas(_tree(path))}
        assert used <= {"errors", "padding", "graphs"}, _name(path)


@pytest.mark.parametrize("path", _files(), ids=_name)
def test_sizes(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= MAX_FILE_LINES
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{_at(path, node)} {node.name} has {length} lines"


@pytest.mark.parametrize("path", [p for p in _files() if p.read_text().strip()], ids=_name)
def test_module_docstrings(path: Path) -> None:
    assert ast.get_docstring(_tree(path)), f"{_name(path)} does not say what it is"


def _mentions(node: ast.AST, words: tuple[str, ...]) -> bool:
    for sub in ast.walk(node):
        name = sub.id if isinstance(sub, ast.Name) else sub.attr if isinstance(sub, ast.Attribute) else ""
        if any(word in name for word in words):
            return True
    return False


COUNT_WORDS = ("non_padded", "num_tokens", "num_real", "real_rows", "n_valid", "raw_", "count")


def _arange_comparisons(tree: ast.Module) -> Iterator[ast.Compare]:
    """Comparisons of an arange (direct, or through a local name) with something named like a count of rows."""
    for scope in ast.walk(tree):
        if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        ranges = {
            target.id
            for node in ast.walk(scope)
            if isinstance(node, ast.Assign) and _mentions(node.value, ("arange",))
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(scope):
            if not isinstance(node, ast.Compare):
                continue
            sides = [node.left, *node.comparators]
            from_range = [
                _mentions(s, ("arange",))
                or any(isinstance(n, ast.Name) and n.id in ranges for n in ast.walk(s))
                for s in sides
            ]
            if any(from_range) and any(
                _mentions(s, COUNT_WORDS) for s, ranged in zip(sides, from_range, strict=True) if not ranged
            ):
                yield node


@pytest.mark.parametrize("path", _files(), ids=_name)
def test_padding_has_one_home(path: Path) -> None:
    found = [_at(path, node) for node in _arange_comparisons(_tree(path))]
    if _name(path) == "padding.py":
        assert found, "the rule would not notice padding.py's own masks"
    else:
        assert not found, "derive masks from padding.py"


def _sentinel_writes(tree: ast.Module) -> Iterator[ast.AST]:
    """Places that write -1 into something called ids: `ids[...] = -1`, `masked_fill(.., -1)`, `where(.., -1)`."""

    def is_minus_one(node: ast.AST) -> bool:
        return (
            isinstance(node, ast.UnaryOp)
            and isinstance(node.op, ast.USub)
            and isinstance(node.operand, ast.Constant)
            and node.operand.value == 1
        ) or (isinstance(node, ast.Name) and node.id in ("SENTINEL", "NOBODY"))

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and is_minus_one(node.value):
            for target in node.targets:
                if isinstance(target, ast.Subscript) and _mentions(target.value, ("ids",)):
                    yield node
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            args = [*node.args, *(k.value for k in node.keywords)]
            if (
                name in ("masked_fill", "masked_fill_", "where", "fill_", "index_fill_")
                and any(is_minus_one(a) for a in args)
                and _mentions(node, ("ids",))
            ):
                yield node


@pytest.mark.parametrize("path", _files(), ids=_name)
def test_expert_ids_are_masked_in_moe_only(path: Path) -> None:
    if _area(path) != "moe":
        assert not [_at(path, node) for node in _sentinel_writes(_tree(path))]


def test_expert_ids_have_one_mask_site() -> None:
    sites = {_name(p) for p in _files() if any(True for _ in _sentinel_writes(_tree(p)))}
    assert len(sites) <= 1, sites


def _buffer_reads(tree: ast.Module) -> Iterator[ast.AST]:
    """Uses of a registry's raw buffers: `registry.buffer(name)`, and what hangs on it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "buffer":
            yield node


@pytest.mark.parametrize("path", _files(), ids=_name)
def test_static_inputs_have_one_writer(path: Path) -> None:
    """Only the registry and the audit that poisons it on purpose hold static buffers; everyone else gets views."""
    if _name(path) not in ("graphs/registry.py", "graphs/audit.py"):
        assert not [_at(path, node) for node in _buffer_reads(_tree(path))]


@pytest.mark.parametrize("path", _files(), ids=_name)
def test_environment_is_read_in_config_only(path: Path) -> None:
    if _name(path) == "config.py":
        return
    forbidden = {"environ", "getenv", "putenv"}
    reads = [
        _at(path, node)
        for node in ast.walk(_tree(path))
        if (isinstance(node, ast.Attribute) and node.attr in forbidden)
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and {a.name for a in node.names} & forbidden
        )
    ]
    assert not reads


def _is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp):
        return True
    if isinstance(value, ast.Call):
        name = value.func.id if isinstance(value.func, ast.Name) else getattr(value.func, "attr", "")
        return name in ("list", "dict", "set", "defaultdict", "deque", "Counter", "OrderedDict")
    return False


@pytest.mark.parametrize("path", _files(), ids=_name)
def test_no_global_state(path: Path) -> None:
    """No `global`; module-level containers are tuples, frozensets, or typed read-only (Mapping, Sequence, Final)."""
    tree = _tree(path)
    bad = [_at(path, node) for node in ast.walk(tree) if isinstance(node, ast.Global)]
    for node in tree.body:
        if isinstance(node, ast.Assign) and _is_mutable(node.value):
            names = [t.id for t in node.targets if isinstance(t, ast.Name)]
            if names != ["__all__"]:
                bad.append(_at(path, node))
        elif (
            isinstance(node, ast.AnnAssign)
            and _is_mutable(node.value)
            and not _mentions(node.annotation, ("Mapping", "Sequence", "Final"))
        ):
            bad.append(_at(path, node))
    assert not bad


FORBIDDEN_CALLS = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}


@pytest.mark.parametrize("path", _files(), ids=_name)
def test_never_pickle(path: Path) -> None:
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            assert not {a.name.split(".")[0] for a in node.names} & FORBIDDEN_CALLS, _at(path, node)
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in FORBIDDEN_CALLS, _at(path, node)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) != ("torch", "load"), _at(path, node)


PUBLIC_NAMES = {
    "ostinato": {
        "LLM",
        "SamplingParams",
        "StructuredOutputs",
        "RequestOutput",
        "CompletionOutput",
        "EngineConfig",
        "OstinatoError",
        "ConfigError",
        "RequestError",
        "ModelError",
        "PadContractError",
        "CaptureError",
        "__version__",
    },
}


@pytest.mark.parametrize("module", PUBLIC_NAMES)
def test_public_names_are_exact(module: str) -> None:
    found = importlib.import_module(module)
    assert set(found.__all__) == PUBLIC_NAMES[module]
    for name in found.__all__:
        assert getattr(found, name) is not None


def test_import_is_light() -> None:
    """`import ostinato` must not pull torch, numba or the engine in: it is on the path of every CLI call."""
    code = (
        "import sys, ostinato, ostinato.config, ostinato.errors, ostinato.padding;"
        "print([m for m in ('torch', 'numba', 'numpy', 'tokenizers', 'jinja2') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_rules_would_notice() -> None:
    """The rules above find what they look for, on small examples of each fault."""
    compare = ast.parse("def f(num_tokens):\n    rows = torch.arange(8)\n    return rows < num_tokens\n")
    assert len(list(_arange_comparisons(compare))) == 1
    mask = ast.parse("topk_ids[n:] = -1\ntopk_ids.masked_fill_(m, -1)\n")
    assert len(list(_sentinel_writes(mask))) == 2
    assert _is_mutable(ast.parse("{}", mode="eval").body)
    assert not _is_mutable(ast.parse("()", mode="eval").body)
