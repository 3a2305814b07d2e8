"""The bans of this house, kept by reading the source instead of by remembering them."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raymq.store.base.status import PutStatus

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("store", "replication", "actors", "client", "cluster", "spark", "doors")
PYTHON_PLACES = (
    *PARTS,
    "raymq/__init__.py",
    "raymq/__main__.py",
    "raymq/_lazy.py",
    "raymq/data.py",
    "raymq/errors.py",
    "raymq/serve.py",
    "raymq/trace.py",
    "pyspark_raymq.py",
    "examples",
    "benchmarks",
)
TEXT_PLACES = (*PYTHON_PLACES, "tests", "docs", ".ci")
TEXT_ENDINGS = {".py", ".md", ".toml", ".txt", ""}

#: the two modules of store/ that may touch files and the clock
SEAM = {"store/base/files.py", "store/base/file_maps.py", "store/base/clock.py"}
#: calls of `os` that touch a file; os.kill and os.environ (failpoints) are none of them
FILE_CALL = re.compile(
    "open|close|read|write|pread|pwrite|preadv|pwritev|fsync|fdatasync|sync_file_range|truncate"
    "|ftruncate|posix_fallocate|rename|replace|link|symlink|unlink|remove|rmdir|mkdir|makedirs"
    "|listdir|scandir|stat|fstat|lstat|statvfs|lseek"
)
#: methods that read or write a file, whatever path object they are called on
FILE_METHODS = {"read_bytes", "read_text", "write_bytes", "write_text", "iterdir", "rglob"}
#: modules that a decision may not import: time, disk, network, threads
IMPURE = {"io", "mmap", "multiprocessing", "os", "pathlib", "shutil", "socket", "threading", "time"}

#: the modules that a flush satellite imports: small, quick to start
SATELLITE_MODULES = (
    "raymq",
    "raymq.errors",
    "raymq.store",
    "raymq.actors.satellites.commit_service",
    "raymq.actors.shared.control_block",
    "raymq.actors.shared.wakeup",
    "raymq.actors.satellites.flush_service",
    "raymq.actors.shared.latency",
    "raymq.actors.shared.processes",
    "raymq.actors.shared.ring",
    "raymq.actors.shared.time_slice",
    "raymq.actors.satellites.satellite",
    "raymq.actors.satellites.service",
    "raymq.store.base.clock",
    "raymq.store.log.commit_real_time",
    "raymq.store.config.option",
    "raymq.store.config.running_config",
    "raymq.store.config.store_config",
    "raymq.store.base.errors",
    "raymq.store.base.failpoints",
    "raymq.store.base.files",
    "raymq.store.log.flush",
    "raymq.store.log.transient_pool",
)
#: modules that nothing imports because something outside starts them by name
ENTRIES = {
    "cluster/cli/main.py",
    # It is being built: its tests start it.
    "doors/rocketmq/rocketmq_server.py",
}


def files_in(places: tuple[str, ...], endings: set[str]) -> Iterator[Path]:
    for place in places:
        start = ROOT / place
        found = sorted(start.rglob("*")) if start.is_dir() else [start]
        for path in found:
            if path.is_file() and path.suffix in endings and "__pycache__" not in path.parts:
                yield path


def sources(*places: str) -> Iterator[tuple[str, ast.Module]]:
    """(path from the root, syntax tree) of every Python file in the places."""
    for path in files_in(places or PYTHON_PLACES, {".py"}):
        yield path.relative_to(ROOT).as_posix(), syntax_tree(path)


@functools.cache
def syntax_tree(path: Path) -> ast.Module:
    """Several bans look at the same files."""
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module", autouse=True)
def forget_trees() -> Iterator[None]:
    """The trees of all files take more memory than all that the other tests hold."""
    yield
    syntax_tree.cache_clear()


def imported(node: ast.AST) -> list[str]:
    """The absolute names that one statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return [node.module]
    return []


def file_use(node: ast.AST) -> str | None:
    """The use of the clock or a file by a node of store/; None without one."""
    names = [name for name in imported(node) if name in ("time", "mmap", "shutil", "fcntl", "io")]
    if names:
        return f"import {names[0]}"
    if not isinstance(node, ast.Call):
        return None
    called = node.func
    if isinstance(called, ast.Name) and called.id == "open":
        return "open()"
    if isinstance(called, ast.Attribute):
        on_os = isinstance(called.value, ast.Name) and called.value.id == "os"
        if on_os and FILE_CALL.fullmatch(called.attr):
            return f"os.{called.attr}()"
        if called.attr in FILE_METHODS:
            return f".{called.attr}()"
    return None


def test_only_tests_use_assert():
    found = [
        f"{path}:{node.lineno}"
        for path, tree in [*sources(), *sources("run.py", "noxfile.py")]
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
    ]
    assert not found, f"use raymq.store.base.errors.require, which -O does not remove: {found}"


def public_names(tree: ast.Module) -> Iterator[str]:
    """Public classes and type aliases of a module."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
            name = ast.unparse(node.target)
        elif isinstance(node, ast.Assign) and re.fullmatch(
            r"[A-Z][a-z]\w*", ast.unparse(node.targets[0])
        ):
            name = ast.unparse(node.targets[0])
        else:
            continue
        if not name.startswith("_"):
            yield name


def test_no_public_class_or_type_is_defined_twice():
    places: dict[str, list[str]] = {}
    for path, tree in sources(*PARTS):
        for name in public_names(tree):
            places.setdefault(name, []).append(path)
    twice = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert not twice, f"one name, one thing: {twice}"


def test_a_deadline_has_its_unit():
    found = [
        f"{path}:{node.lineno}"
        for path, tree in sources(*PARTS)
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id in ("deadline", "until")
    ]
    assert not found, f"deadline_s or deadline_ms: {found}"


def test_in_store_only_the_seam_touches_files_and_the_clock():
    found = [
        f"{path}:{getattr(node, 'lineno', 0)}: {use}"
        for path, tree in sources("store")
        if path not in SEAM
        for node in ast.walk(tree)
        if (use := file_use(node))
    ]
    assert not found, f"go through store/base/files.py or store/base/clock.py: {found}"


@pytest.mark.parametrize(
    ("source", "use"),
    [
        ("import time", "import time"),
        ("open('x')", "open()"),
        ("os.fsync(3)", "os.fsync()"),
        ("path.write_bytes(b'')", ".write_bytes()"),
        ("os.kill(1, 9)", None),
        ("files.open_file('x')", None),
    ],
)
def test_the_ban_on_file_use_sees_what_it_is_for(source, use):
    assert [found for node in ast.walk(ast.parse(source)) if (found := file_use(node))] == (
        [use] if use else []
    )


#: a function body of this many lines has a blank line between its steps
AIR_LINES = 20


def airless(source: str) -> list[int]:
    """The lines of functions with AIR_LINES lines or more and no blank line. One plain statement needs none."""
    lines = source.split("\n")
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        steps = node.body[1:] if ast.get_docstring(node) is not None else node.body
        if not steps or (len(steps) == 1 and not hasattr(steps[0], "body")):
            continue

        body = lines[steps[0].lineno - 1 : node.end_lineno]
        if len(body) >= AIR_LINES and all(line.strip() for line in body):
            found.append(node.lineno)
    return found


def test_a_long_function_has_a_blank_line_between_its_steps():
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files_in(PARTS, {".py"})
        for line in airless(path.read_text(encoding="utf-8"))
    ]
    assert not found, f"set the steps apart (CONTRIBUTING, Habits): {found}"


@pytest.mark.parametrize(
    ("body", "is_found"),
    [
        (["step = 1"] * AIR_LINES, True),
        (["step = 1"] * (AIR_LINES - 1), False),
        ([*["step = 1"] * 9, "", *["step = 1"] * 10], False),
        (["return ("] + ["    1,"] * AIR_LINES + [")"], False),
    ],
)
def test_the_search_for_functions_without_air_sees_what_it_is_for(body, is_found):
    source = "def function():\n" + "\n".join(f"    {line}" if line else "" for line in body)
    assert airless(source) == ([1] if is_found else [])


def test_a_section_begins_with_a_line_that_ends_where_code_is_wrapped():
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files_in(PYTHON_PLACES, {".py"})
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1)
        if re.match(" *# ?--", line)
        and not (len(line) == 100 and re.fullmatch(" *# --- .* -{3,}", line))
    ]
    assert not found, f"write `# --- name ---...` of 100 columns: {found}"


#: where the fields of a record begin that other modules read or write: store/base/format.py names them
RECORD_OFFSETS = {20, 28, 36, 40, 48, 56, 64, 72, 76, 84, 88}
#: a struct that skips bytes in front of a field
SKIPPING_STRUCT = re.compile(r">\w*\d+x\w+")


def record_offset(node: ast.AST) -> int | str | None:
    """The number by which a node finds a field of a record; None when it does not."""
    numbers: list[ast.expr | None] = []
    if isinstance(node, ast.Slice):
        numbers = [node.lower, node.upper]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        numbers = [node.left, node.right]
    elif isinstance(node, ast.Assign):
        named = [
            name.id
            for target in node.targets
            for name in ast.walk(target)
            if isinstance(name, ast.Name)
        ]
        if any(re.search(r"_(AT|OFFSET)$", name) for name in named):
            numbers = list(node.value.elts) if isinstance(node.value, ast.Tuple) else [node.value]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value if SKIPPING_STRUCT.fullmatch(node.value) else None
    found = [n.value for n in numbers if isinstance(n, ast.Constant) and n.value in RECORD_OFFSETS]
    return found[0] if found else None


def test_record_offsets_are_written_in_format_alone():
    found = [
        f"{path}:{getattr(node, 'lineno', 0)}: {offset}"
        for path, tree in sources("store", "client/messages")
        if path != "store/base/format.py"
        for node in ast.walk(tree)
        if (offset := record_offset(node))
    ]
    assert not found, f"use the names of store/base/format.py: {found}"


@pytest.mark.parametrize(
    ("source", "offset"),
    [
        ("_QUEUE_OFFSET_AT = 20", 20),
        ("_FLAG_AT, _TIME_AT = 36, 56", 36),
        ("head[36:40]", 36),
        ("starts + 20", 20),
        ("Struct('>36xi')", ">36xi"),
        ("LIMIT = 20", None),
        ("starts + fmt.QUEUE_OFFSET_AT", None),
    ],
)
def test_the_ban_on_record_offsets_sees_what_it_is_for(source, offset):
    found = [found for node in ast.walk(ast.parse(source)) if (found := record_offset(node))]
    assert found[:1] == ([offset] if offset else [])


def is_null_scalar(node: ast.expr) -> bool:
    """Whether it is None, or `pa.scalar(None...)`."""
    is_none = isinstance(node, ast.Constant) and node.value is None
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("scalar") and node.args:
        return is_null_scalar(node.args[0])
    return is_none


def gives_null(node: ast.AST) -> bool:
    """Whether it is an `if_else` with a null scalar, which gives wrong bytes for slices before Arrow 24."""
    if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("if_else"):
        return False
    return any(map(is_null_scalar, node.args))


def test_rows_become_null_by_null_where_alone():
    found = [
        f"{path}:{getattr(node, 'lineno', 0)}"
        for path, tree in sources()
        for node in ast.walk(tree)
        if gives_null(node)
    ]
    assert not found, f"use null_where of store/records/binary_columns.py: {found}"


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("pc.if_else(mask, pa.scalar(None, pa.binary()), values)", True),
        ("pc.if_else(mask, values, None)", True),
        ("pc.if_else(mask, pa.nulls(3, pa.binary()), values)", False),
        ("pc.if_else(mask, mark, values)", False),
    ],
)
def test_the_ban_on_null_scalars_sees_what_it_is_for(source, is_found):
    assert any(map(gives_null, ast.walk(ast.parse(source)))) == is_found


def test_put_statuses_are_spelt_in_status_alone():
    statuses = {status.value for status in PutStatus}
    found = [
        f"{path}:{node.lineno}: {node.value}"
        for path, tree in sources()
        if path != "store/base/status.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in statuses
    ]
    assert not found, f"write PutStatus.X.value: {found}"


#: the facts of an error that are for people: their words may change
WORDS = {"field", "limit", "found"}


def read_words(node: ast.AST) -> str | None:
    """The fact for people that a node reads from an error, or compares; None: none."""
    match node:
        case ast.Subscript(value=ast.Attribute(attr="fields"), slice=ast.Constant(value=word)):
            return word if word in WORDS and isinstance(node.ctx, ast.Load) else None
        case ast.Call(
            func=ast.Attribute(value=ast.Attribute(attr="fields"), attr="get"),
            args=[ast.Constant(value=word), *_],
        ):
            return word if word in WORDS else None
        case ast.Compare():
            for side in (node.left, *node.comparators):
                for each in ast.walk(side):
                    match each:
                        case ast.Attribute(value=ast.Name(id=name), attr=word) if word in WORDS:
                            if word == "field" or name == "error":
                                return word
    return None


def test_no_decision_reads_the_words_of_an_error():
    for path, tree in sources():
        for node in ast.walk(tree):
            word = read_words(node)
            assert word is None, f"{path}:{getattr(node, 'lineno', 0)}: make a class of this error"


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ('error.fields["field"] == "leader"', "field"),
        ('error.fields.get("field") in NAMES', "field"),
        ('named = error.fields.get("limit", None)', "limit"),
        ('error.field != "queues"', "field"),
        ("type(error.limit) is not list", "limit"),
        ("error.fields['offset'] > 3", None),
        ("left.limit < right", None),
        ("Rejected(text, field=name, limit=error.limit)", None),
        ("error.fields['field'] = name", None),
    ],
)
def test_the_ban_on_reading_words_sees_what_it_is_for(source, word):
    found = {read_words(node) for node in ast.walk(ast.parse(source))} - {None}
    assert found == ({word} if word else set())


def test_replication_knows_no_clock_disk_network_or_thread():
    found = [
        f"{path}:{node.lineno}: {name}"
        for path, tree in sources("replication")
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in imported(node)
        if name.partition(".")[0] in IMPURE
    ]
    assert not found, f"decisions take events and return effects: {found}"


def test_engine_and_decisions_know_no_flight():
    found = [
        f"{path}:{node.lineno}"
        for path, tree in sources("store", "replication")
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        and any(name.startswith("pyarrow.flight") for name in imported(node))
    ]
    assert not found, f"bytes travel in actors/ and client/: {found}"


def test_a_package_imports_nothing_but_its_lazy_loader():
    found = [
        f"{path}: {name}"
        for path, tree in sources(*PARTS)
        if path.endswith("__init__.py")
        # Imports under `if TYPE_CHECKING` are not in the body of the module.
        for node in tree.body
        for name in imported(node) or ["."] * isinstance(node, ast.ImportFrom)
        if name not in ("__future__", "typing", "raymq._lazy")
    ]
    assert not found, f"a satellite would import everything that these import: {found}"


def test_no_unfinished_work_is_marked_in_the_text():
    word = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|X" + r"XX)\b")
    found = [
        path.relative_to(ROOT).as_posix()
        for path in files_in((*TEXT_PLACES, "README.md", "run.py", "noxfile.py"), TEXT_ENDINGS)
        if "golden" not in path.parts and word.search(path.read_text(encoding="utf-8"))
    ]
    assert not found, f"do it, or open an issue: {found}"


def test_a_package_has_one_line_for_each_of_its_modules():
    found = []
    for path in (path for path, _ in sources(*PARTS) if path.endswith("__init__.py")):
        # The lines are in the docstring, or in a comment where the docstring is a page of the API.
        text = (ROOT / path).read_text(encoding="utf-8")
        named = re.findall(r"^(?:# )?(\w+)  +\S", text, re.MULTILINE)

        folder = (ROOT / path).parent
        modules = {each.stem for each in folder.glob("*.py")} - {"__init__"}
        folders = {each.name for each in folder.iterdir() if each.is_dir()}
        if sorted(set(named) - folders) != sorted(modules) or len(named) > len(set(named)):
            found.append(f"{path}: {sorted(modules ^ (set(named) - folders)) or sorted(named)}")
    assert not found, f"a module has no line, several, or a line without a module: {found}"


def test_a_package_names_its_folders_and_so_does_the_design():
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    for title, folders in (
        ("The packages", set(PARTS)),
        (
            "The layers inside store/",
            {p.parent.name for p in (ROOT / "store").glob("*/__init__.py")},
        ),
    ):
        block = re.search(rf"^## {title}\n\n(?:[^`].*\n+)*```text\n(.*?)```", design, re.M | re.S)
        assert block is not None
        assert set(re.findall(r"^(\w+)/ ", block[1], re.MULTILINE)) == folders

    for part in ("actors", "client", "cluster"):
        rows = re.search(rf"^Inside `{part}/`.*?:\n(.*?)\n\n\w", design, re.MULTILINE | re.DOTALL)
        assert rows is not None
        folders = {path.parent.name for path in (ROOT / part).glob("*/__init__.py")}
        assert set(re.findall(r"`(\w+)/`", rows[1])) == folders
        own = (ROOT / part / "__init__.py").read_text(encoding="utf-8")
        assert set(re.findall(r"^(\w+)/ ", own, re.MULTILINE)) == folders

    found = []
    for path in (path for path, _ in sources(*PARTS) if path.endswith("__init__.py")):
        named = re.findall(r"\w+", (ROOT / path).read_text(encoding="utf-8"))
        inside = {each.parent.name for each in (ROOT / path).parent.glob("*/__init__.py")}
        if not inside <= set(named):
            found.append(f"{path}: {sorted(inside - set(named))}")
    assert not found, f"a folder has no line: {found}"


def test_a_function_begins_its_docstring_with_its_verb_or_its_result():
    section = re.compile(
        "(?:Args|Callers?|Durable|Invariant|Raises|Returns|Source|Threads):|Needs "
    )
    found = [
        f"{path}:{node.lineno} {node.name}"
        for path, tree in sources(*PARTS)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not re.match("_?check_|__init__|__post_init__", node.name)
        and section.match(ast.get_docstring(node) or "")
    ]
    assert not found, f"say what it does before what it needs: {found}"


def test_every_module_says_what_it_is():
    found = [path for path, tree in sources() if tree.body and not ast.get_docstring(tree)]
    assert not found, f"no docstring: {found}"


def used_modules(path: str, tree: ast.Module) -> Iterator[str]:
    """The dotted names that a file takes from this project, as imports or as texts that something starts by name."""
    folders = path.split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            start = ["raymq", *folders[: len(folders) - node.level + 1]] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"raymq(?:\.\w+)+", node.value)


def test_no_module_is_dead():
    used = {name for path, tree in sources() for name in used_modules(path, tree)}
    dead = [
        path
        for path, _ in sources(*PARTS)
        if not path.endswith("__init__.py")
        and path not in ENTRIES
        and "raymq." + path.removesuffix(".py").replace("/", ".") not in used
    ]
    assert not dead, f"nothing but a test imports these: {dead}"


@pytest.mark.parametrize("module", SATELLITE_MODULES)
def test_a_flush_satellite_imports_neither_pyarrow_nor_numpy(module):
    code = (
        f"import sys, {module}\n"
        "print([name for name in ('pyarrow', 'numpy', 'pandas', 'ray') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_what_plans_a_query_imports_neither_pandas_nor_ray():
    # `pa.array` and `pa.scalar` import pandas, where that is installed: 0.2 s in each process of a plan.
    modules = "batch_plan, stream_progress, range_columns, direct_write, sink_columns"
    code = (
        f"import sys; from raymq.spark import {modules}; from raymq.client.staged import committer\n"
        "print([name for name in ('pandas', 'ray', 'raymq.store.log') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("part", PARTS)
def test_a_bare_import_is_refused(part):
    with pytest.raises(ImportError, match=f"import raymq.{part}, not {part}"):
        __import__(part)


@pytest.mark.parametrize("part", PARTS)
def test_each_part_is_a_link_inside_the_package(part):
    link = ROOT / "raymq" / part
    assert link.is_symlink()
    assert link.resolve() == ROOT / part
