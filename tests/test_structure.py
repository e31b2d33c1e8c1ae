"""The shape of the source: what may import what, who may know a format, and what importing costs."""

import ast
import functools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import duotone

ROOT = Path(duotone.__file__).parents[1]
ORDER = (
    "errors text files numbered allocate capture graph_ops custom_gradient formats kernels comm dispatch tensor "
    "sharding recipes state pipeline linear modules ops attention optim conversion observe distributed compat serving "
    "integrations __init__ lab.memory lab.training lab.report lab.cli lab.__init__ __main__"
).split()
FILES = sorted(ROOT.glob("duotone*/**/*.py"))
EXTRAS = {"click", "jinja2", "markupsafe", "mpmath", "numpy", "rich", "safetensors", "scipy", "transformers"}
MOST_MODULES = 300
"""Imported by `import duotone` after torch, its own files included: what decides how long that takes."""
MOST_IN_CIRCLES = (3, 2, 2)
"""The files of each group that import each other: recipes, tensor and, in `duotone_lab`, cli."""
CONCRETE_FORMATS = {"ScaledFormat", "Identity", "Fp32Scale", "E8M0Scale", "TwoLevelScale", "FourOverSixScale"}


def room(path: Path) -> str:
    """Name the folder, or the module, that a file belongs to. Those of `duotone_lab` begin with "lab."."""
    return room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))


def room_of(module: str) -> str:
    """Name the room of a module of the two packages; "" for `duotone` itself and for other packages."""
    package, *inner = module.split(".")
    if package == "duotone_lab":
        return f"lab.{inner[0] if inner else '__init__'}"
    return inner[0] if package == "duotone" and inner else ""


NEIGHBOURS = {"compat", "serving", "integrations"}
LIBRARY = [path for path in FILES if room(path) not in ("integrations", "__main__") and "lab." not in room(path)]


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def attributes(path: Path) -> set[str]:
    return {node.attr for node in nodes(path) if isinstance(node, ast.Attribute)}


def imports(path: Path) -> set[str]:
    rooms = set()
    for node in nodes(path):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "duotone" else [f"duotone.{alias.name}" for alias in node.names]
        rooms |= {room_of(name) for name in names} - {""}
    return rooms


def imported_modules(path: Path, modules: set[str]) -> set[str]:
    """The modules that a file imports anywhere: also inside of functions, and only for types."""
    names = set[str]()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= full & modules | ({node.module} if full - modules else set())
    return names & modules


def circles() -> list[list[str]]:
    """The modules that import each other, directly or over others, the largest circle first."""
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
    graph = {module: imported_modules(path, set(paths)) - {module} for module, path in paths.items()}
    reached: dict[str, set[str]] = {}
    for module in graph:
        seen, waiting = set[str](), [module]
        while waiting:
            new = graph[waiting.pop()] - seen
            seen |= new
            waiting += new
        reached[module] = seen
    found = {tuple(sorted(each for each in seen if module in reached[each])) for module, seen in reached.items()}
    return sorted(map(list, found - {()}), key=len, reverse=True)


def test_no_new_circle_of_imports() -> None:
    """A commit may lower the numbers. Where two files need each other's types, a third one above both has a noun."""
    found = circles()
    assert len(found) <= len(MOST_IN_CIRCLES), found
    assert all(len(circle) <= most for circle, most in zip(found, MOST_IN_CIRCLES, strict=False)), found


def test_imports_go_only_upward() -> None:
    for path in FILES:
        below = [one for one in imports(path) & set(ORDER) if ORDER.index(one) > ORDER.index(room(path))]
        assert not below, f"{path.relative_to(ROOT)} imports {below}, which are above it"


def test_the_library_needs_neither_the_tools_nor_their_packages() -> None:
    for path in LIBRARY:
        packages = {alias.name for node in nodes(path) if isinstance(node, ast.Import) for alias in node.names}
        packages |= {node.module for node in nodes(path) if isinstance(node, ast.ImportFrom) and node.module}
        assert "integrations" not in imports(path), path
        extras = EXTRAS - {"safetensors"} if path.name == "tensor_file.py" else EXTRAS
        assert not {name.split(".")[0] for name in packages} & extras, path


def test_only_the_command_starts_the_tools() -> None:
    """Neither an import nor the name of a module in a string leads from the library or its neighbours to them."""
    for path in (path for path in FILES if "lab." not in room(path) and room(path) != "__main__"):
        assert not any("lab." in name for name in imports(path)), path
        texts = [node.value for node in nodes(path) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        assert not [text for text in texts if text.startswith("duotone_lab")], path


def test_the_library_imports_none_of_its_neighbours() -> None:
    """`duotone/__init__.py` alone has their names."""
    for path in (path for path in LIBRARY if room(path) not in NEIGHBOURS | {"__init__"}):
        assert not imports(path) & NEIGHBOURS, path


def test_every_room_has_its_place_in_the_order() -> None:
    assert {room(path) for path in FILES} <= set(ORDER)


def test_nobody_outside_formats_asks_a_format_who_it_is() -> None:
    for path in (path for path in FILES if room(path) != "formats"):
        named = {node.id for node in nodes(path) if isinstance(node, ast.Name)} | attributes(path)
        assert not named & CONCRETE_FORMATS, path


def test_no_environment_variable_is_read() -> None:
    """Where compiled casts are cached follows the compiler's own variable, ranks are those of torchrun, and recipes of
    `compat.te` take the defaults that Transformer Engine reads."""
    readers = [path.relative_to(ROOT) for path in FILES if attributes(path) & {"environ", "getenv"}]
    te = Path("compat/transformer_engine/environment.py")
    assert readers == ["duotone" / te, Path("duotone/dispatch/compiler.py"), Path("duotone_lab/training/parallel.py")]


def test_files_and_functions_stay_small() -> None:
    for path in FILES:
        assert len(path.read_text().splitlines()) <= 400, path
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path}:{node.name}"


def test_importing_needs_no_compiler_no_triton_and_nothing_but_torch() -> None:
    code = """
import sys, torch
before = len(sys.modules)
import duotone
loaded = len(sys.modules) - before
heavy = {"triton", "torch._inductor", "click", "rich", "jinja2", "safetensors"}
heavy |= {"duotone_lab", "duotone.integrations"}
print(sorted(heavy & set(sys.modules)))
assert not torch.cuda.is_initialized()
assert loaded < MODULES, loaded
""".replace("MODULES", str(MOST_MODULES))
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"


def test_a_file_name_says_its_room() -> None:
    counts = Counter(path.name for path in FILES if path.name != "__init__.py")
    assert not {name for name, count in counts.items() if count > 2}


def test_code_asks_whether_dynamo_traces_it() -> None:
    """`torch.compiler.is_compiling` is true in every thread while one thread compiles."""
    assert not [path for path in FILES if "is_compiling" in attributes(path)]


FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
CALLED_BY_TORCH = {"forward", "backward", "extra_repr"}
"""Of a class with a docstring, which says what it computes."""


@functools.cache
def classes() -> dict[str, list[ast.ClassDef]]:
    """The classes of the package by name."""
    by_name: dict[str, list[ast.ClassDef]] = {}
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                by_name.setdefault(node.name, []).append(node)
    return by_name


def base_names(node: ast.ClassDef) -> list[str]:
    plain = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    return [base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in plain]


def describes(node: ast.ClassDef, member: str) -> bool:
    """Whether a class or a base of it documents the method, or declares the attribute."""
    for part in node.body:
        if isinstance(part, FUNCTIONS) and part.name == member and ast.get_docstring(part):
            return True
        targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
        if any(getattr(target, "id", "") == member for target in targets):
            return True
    bases = [base for name in base_names(node) if name != node.name for base in classes().get(name, [])]
    return any(describes(base, member) for base in bases)


def undocumented(body: list[ast.stmt], owner: ast.ClassDef | None = None) -> list[str]:
    """Public definitions that nothing describes: no docstring, no base class and no protocol of the package."""
    protocols = [node for each in classes().values() for node in each if "Protocol" in base_names(node)]
    names = []
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            names += undocumented(node.body, owner)
        if not isinstance(node, FUNCTIONS | ast.ClassDef) or node.name.startswith("_"):
            continue
        is_described = bool(ast.get_docstring(node)) or any("setter" in ast.unparse(d) for d in node.decorator_list)
        if owner is not None and not is_described:
            by_torch = node.name in CALLED_BY_TORCH and bool(ast.get_docstring(owner))
            is_described = by_torch or any(describes(each, node.name) for each in (owner, *protocols))
        names += [] if is_described else [node.name]
        names += undocumented(node.body, node) if isinstance(node, ast.ClassDef) else []
    return names


def test_every_public_definition_says_what_it_does() -> None:
    for path in FILES:
        tree = nodes(path)[0]
        assert isinstance(tree, ast.Module)
        assert ast.get_docstring(tree) or not tree.body, path
        assert not undocumented(tree.body), path.relative_to(ROOT)
