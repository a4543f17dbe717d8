"""The public face: names, docstrings, signatures; which module may import which; what an import costs."""

import ast
import importlib
import inspect
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import deltaformat as df

PACKAGE = Path(df.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 450

# From the bottom up: a module imports from its own group and from those above it in this list, and nothing
# in a circle.
LAYERS = {
    "errors": ["errors", "redaction"],
    "values": [
        "arrow_guard",
        "blocks",
        "columns",
        "digests",
        "dtypes",
        "external",
        "ijson",
        "keys",
        "metrics",
        "paths",
        "workers",
    ],
    "codec": [
        "encodings",
        "encodings.estimates",
        "encodings.native",
        "encodings.planes",
        "encodings.sparse",
        "encodings.strata",
        "encodings.streams",
        "encodings.thresholds",
    ],
    "objects": [
        "arrow",
        "catchup",
        "descriptor",
        "fetched",
        "fields",
        "manifest",
        "mapcheck",
        "packs",
        "plan",
        "records",
        "selection",
        "versionmap",
    ],
    "log": ["history", "judge", "liveness"],
    "frameworks": ["destinations", "patches", "tensors", "torchtensors"],
    "devices": [
        "gpu",
        "gpu.applying",
        "gpu.blake3_torch",
        "gpu.blake3_triton",
        "gpu.diff_triton",
        "gpu.diffing",
        "gpu.engines",
        "gpu.hashing",
        "gpu.survey",
        "gpu.table",
        "gpu.transfer",
        "gpu.words",
        "gpu.xxh3_short",
        "gpu.xxh3_torch",
        "gpu.xxh3_triton",
    ],
    "files": ["checkpoint", "durable", "export"],
    "storage": [
        "awsprofiles",
        "buckets",
        "hubclient",
        "hubmodel",
        "hubstorage",
        "localstorage",
        "objectstorage",
        "readonly",
        "retrying",
        "singlewriter",
        "storage",
    ],
    "log I/O": ["log", "recordcreate", "recordreader"],
    "blocks I/O": ["blockcache", "context", "rebuild", "sources"],
    "reading": ["batches", "inplace", "live", "reader", "statedigests"],
    "following": [
        "changefile",
        "deviceapply",
        "follower",
        "lineage",
        "locks",
        "mirror",
        "polling",
        "sharedmirror",
        "slots",
        "staged",
        "staging",
        "sync",
    ],
    "writing": [
        "adopt",
        "baseline",
        "commitinfo",
        "inputs",
        "looks",
        "part",
        "pieces",
        "policy",
        "rebase",
        "sidecars",
        "sink",
        "stage",
        "stager",
        "twins",
        "writer",
    ],
    "upkeep": ["collect", "verify"],
    "store": ["examine", "opening", "store"],
    "torch": ["torch"],
    "package": ["deltaformat"],
    "benchmarks": [
        "bench",
        "bench.bounds",
        "bench.codecs",
        "bench.coding",
        "bench.inputs",
        "bench.memory",
        "bench.parts",
        "bench.rebase",
        "bench.run",
        "bench.shapes",
        "bench.stores",
        "bench.synthetic",
    ],
    "for tests of others": ["testing"],
}
PURE = ("errors", "values", "codec", "objects", "log", "frameworks")  # no input or output
SEEING = (
    "codec",
    "frameworks",
    "devices",
    "files",
    "blocks I/O",
    "reading",
    "following",
    "writing",
    "upkeep",
)  # these see weights
IO_MODULES = {"obstore", "os", "pathlib", "shutil", "socket", "subprocess", "tempfile", "time", "urllib"}
COSTLY = (
    "torch",
    "triton",
    "pyarrow",
    "obstore",
    "blake3",
    "tqdm",
    "safetensors",
    "pandas",
    "deltaformat.cli",
    "deltaformat.bench",
)
FLOATS = {
    "allclose", "array_equiv", "assert_allclose", "bfloat16_compare", "double", "fabs", "half", "isclose",
    "isfinite", "isinf", "isnan", "nan_to_num", "nanmax", "nanmin",
}  # fmt: skip


def name_of(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__") or "deltaformat"


def statements(body):
    """What runs when a module is imported: not under TYPE_CHECKING, not inside functions."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and not (
            isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        ):
            yield from statements(node.body + node.orelse)
        elif isinstance(node, ast.Try):
            yield from statements(node.body)


def imports_of(path):
    """The package's modules, and the names of others, that a module imports."""
    own, others = set(), set()
    for node in statements(ast.parse(path.read_text()).body):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                (own if top == "deltaformat" else others).add(top)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            top, _, module = node.module.partition(".")
            if top != "deltaformat":
                others.add(top)
                continue
            for alias in node.names:
                inner = f"{module}.{alias.name}" if module else alias.name
                file = PACKAGE.joinpath(*inner.split("."))
                is_module = file.with_suffix(".py").exists() or (file / "__init__.py").exists()
                own.add(inner if is_module else module or "deltaformat")
    return own, others


IMPORTS = {name_of(path): imports_of(path) for path in MODULES}
LAYER_OF = {module: layer for layer, modules in enumerate(LAYERS.values()) for module in modules}
# The command line is on top of all.
LAYER_OF |= {module: len(LAYERS) for module in IMPORTS if module.split(".")[0] in ("cli", "__main__")}


# -- the structure of the package ---------------------------------------------------------------------------


def test_every_module_has_its_layer():
    assert set(LAYER_OF) == set(IMPORTS)


@pytest.mark.parametrize("module", sorted(IMPORTS))
def test_imports_go_downwards(module):
    own, _ = IMPORTS[module]
    upwards = {other for other in own if LAYER_OF[other] > LAYER_OF[module]}
    assert not upwards, f"{module} imports {sorted(upwards)}, which is above it"


def test_no_circles():
    done, path = set(), []

    def visit(module):
        assert module not in path, " -> ".join([*path, module])
        if module in done:
            return
        path.append(module)
        for other in sorted(IMPORTS[module][0] - {module}):
            visit(other)
        done.add(path.pop())

    for module in IMPORTS:
        visit(module)


def test_pure_modules_do_no_io():
    """They can be tested on bytes alone, and reused by whoever brings their own input and output."""
    for layer in PURE:
        for module in LAYERS[layer]:
            assert not IMPORTS[module][1] & IO_MODULES, module
            path = PACKAGE.joinpath(*module.split("."))
            tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
            called = {
                node.func.id
                for node in ast.walk(tree)
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            }
            assert not called & {"open", "print", "input", "exec", "eval"}, module


def test_files_stay_readable():
    long = {name_of(path): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: lines for name, lines in long.items() if lines > MAX_LINES} == {}


SEE_WEIGHTS = [path for path in MODULES if name_of(path) in {
    "cli.difference", *(module for layer in SEEING for module in LAYERS[layer])
}]  # fmt: skip


@pytest.mark.parametrize("path", SEE_WEIGHTS, ids=name_of)
def test_nothing_compares_floats(path):
    """DF-DTY-03: changes are found by bits; no value is compared with a tolerance, tested for NaN, or cast
    to a float.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            assert node.attr not in FLOATS, f"line {node.lineno}: {node.attr}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "astype":
            kind = ast.unparse(node.args[0])
            assert "float" not in kind, f"line {node.lineno}: astype({kind})"
        if isinstance(node, ast.Compare):
            for side in (node.left, *node.comparators):
                assert not (isinstance(side, ast.Constant) and isinstance(side.value, float)), (
                    f"line {node.lineno}"
                )


# -- names --------------------------------------------------------------------------------------------------


def test_all_is_complete():
    tree = ast.parse(Path(df.__file__).read_text())
    bound = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(df.__all__) == bound - {"annotations"}
    assert df.__all__ == sorted(set(df.__all__))
    public = {
        name for name, value in vars(df).items() if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public <= set(df.__all__)


@pytest.mark.parametrize("module", sorted(set(IMPORTS) - {"__main__"}))
def test_modules_say_what_is_theirs_to_give(module):
    """`__all__` of every module names things that exist, and a docstring says what the module is for."""
    if module.endswith("_triton"):
        pytest.importorskip("triton")
    loaded = importlib.import_module("deltaformat" if module == "deltaformat" else f"deltaformat.{module}")
    assert loaded.__doc__
    assert len(set(loaded.__all__)) == len(loaded.__all__)
    for name in loaded.__all__:
        assert hasattr(loaded, name), name


def public_members():
    for name in df.__all__:
        value = getattr(df, name)
        yield name, value
        if inspect.isclass(value):
            for member, inner in vars(value).items():
                if not member.startswith("_") and (
                    inspect.isfunction(inner) or isinstance(inner, property | classmethod)
                ):
                    yield f"{name}.{member}", inner
    for name in df.errors.__all__:
        yield f"errors.{name}", getattr(df.errors, name)


@pytest.mark.parametrize(
    ("name", "value"), list(public_members()), ids=[name for name, _ in public_members()]
)
def test_public_names_have_docstrings(name, value):
    text = inspect.getdoc(value)
    assert text, name
    assert text.splitlines()[0].strip(), name


def test_documented_attributes_exist():
    """What a dataclass's docstring lists under Attributes is what it has."""
    for name in df.__all__:
        value = getattr(df, name)
        fields = getattr(value, "__dataclass_fields__", {})
        text = inspect.getdoc(value) or ""
        if "Attributes:" in text:
            for field in fields:
                assert field in text.partition("Attributes:")[2], f"{name}.{field}"


def test_the_version_is_the_projects():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    assert df.__version__ == project["version"]


# -- signatures that are relied upon ------------------------------------------------------------------------

REQUIRED = inspect.Parameter.empty
SIGNATURES = [
    (df.create, {"url": REQUIRED}, {"block_bytes": 1 << 20, "digest": "xxh3-128", "exist_ok": False}),
    (df.open, {"url": REQUIRED}, {}),
    (df.Store.writer, {"branch": "main"}, {"resume_from": None, "single_writer": False}),
    (
        df.Writer.commit,
        {},
        {
            "step": REQUIRED,
            "tensors": None,
            "parts": None,
            "files": None,
            "metadata": None,
            "allow_set_change": False,
            "block": True,
        },
    ),
    (df.Writer.stage, {}, {"step": REQUIRED, "tensors": REQUIRED}),
    (df.Stager.stage, {}, {"step": REQUIRED, "tensors": REQUIRED}),
    (
        df.Store.version,
        {"step": None},
        {"branch": "main", "tag": None, "seq": None, "framework": "np", "device": "cpu"},
    ),
    (df.Store.log, {"branch": None, "limit": None}, {}),
    (df.Store.branches, {}, {}),
    (df.Store.tags, {}, {}),
    (df.Store.fork, {"new": REQUIRED}, {"branch": "main", "step": REQUIRED}),
    (df.Store.tag, {"name": REQUIRED}, {"branch": "main", "step": REQUIRED}),
    (df.Version.keys, {}, {}),
    (df.Version.get_tensor, {"name": REQUIRED}, {}),
    (df.Version.get_slice, {"name": REQUIRED}, {}),
    (df.Version.state_dict, {}, {}),
    (df.Version.files, {}, {}),
]


@pytest.mark.parametrize(
    ("function", "positional", "named"), SIGNATURES, ids=[f.__qualname__ for f, _, _ in SIGNATURES]
)
def test_signatures(function, positional, named):
    """These names are relied upon; what is added to them is keyword-only and has a default."""
    parameters = dict(inspect.signature(function).parameters)
    parameters.pop("self", None)
    kinds = inspect.Parameter
    found = {
        name: parameter.default
        for name, parameter in parameters.items()
        if parameter.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    }
    assert found == positional
    keywords = {name: p.default for name, p in parameters.items() if p.kind is kinds.KEYWORD_ONLY}
    assert {name: keywords[name] for name in named} == named
    assert all(default is not REQUIRED for name, default in keywords.items() if name not in named)


def test_context_managers_and_properties():
    for kind in (df.Writer, df.Version):
        assert hasattr(kind, "__enter__")
        assert hasattr(kind, "__exit__")
        assert hasattr(kind, "close")
    for name in ("root", "step", "seq", "metadata"):
        assert isinstance(getattr(df.Version, name), property)
    assert hasattr(df.TensorSlice, "__getitem__")
    assert issubclass(df.errors.CommitUnknown, df.errors.StoreError)


# -- what an import costs -----------------------------------------------------------------------------------

MEASURE = """
import json, sys, time
started = time.process_time()
import numpy
between = time.process_time()
import deltaformat
print(json.dumps([between - started, time.process_time() - between, sorted(sys.modules)]))
"""


def import_once():
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], check=True, capture_output=True, text=True, timeout=120
    )
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_an_import_is_cheap():
    """No framework, no Arrow, no store; well under 0.3 s of CPU time beside NumPy's own."""
    measured = [import_once() for _ in range(4)]
    modules = set(measured[0][2])
    assert not {costly for costly in COSTLY if costly in modules}
    assert min(own for _, own, _ in measured) < 0.3
