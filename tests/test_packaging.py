"""One name per module, every package listed, imports that point one way."""

import ast
import pathlib
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = {
    "jaxcache": "jaxcache",
    "layouts": "jaxcache.layouts",
    "transfer": "jaxcache.transfer",
}
# A package may import itself and packages of lower rank; `jaxcache` itself is the
# public list, which nothing inside imports.
RANK = {
    "jaxcache.layouts": 0,
    "jaxcache.inputs": 1,
    "jaxcache.device": 2,
    "jaxcache.prefixes": 2,
    "jaxcache.policies": 3,
    "jaxcache.events": 3,
    "jaxcache.host": 4,
    "jaxcache": 5,
    "jaxcache.models": 6,
    "jaxcache.engine": 7,
    "jaxcache.demo": 8,
    "jaxcache.cli": 9,
    "jaxcache.transfer": 10,
}

HOST_SIDE = [
    "layouts",
    "jaxcache/inputs",
    "jaxcache/prefixes",
    "jaxcache/policies",
    "jaxcache/events",
    "jaxcache/host",
]


def owner(module: str) -> str | None:
    owners = (p for p in RANK if f"{module}.".startswith(f"{p}."))
    return max(owners, key=len, default=None)


def modules() -> list[tuple[str, pathlib.Path]]:
    found = []
    for folder, name in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            if any(parent.is_symlink() for parent in path.parents):
                continue
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            module = ".".join([name, *parts]).removesuffix(".__init__")
            found.append((module, path))
    return found


def imported_names(path: pathlib.Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write absolute imports"
            names += [node.module or ""]
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def test_every_package_is_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name for name, path in modules() if path.name == "__init__.py"}
    assert packages == set(project["tool"]["setuptools"]["packages"])


@pytest.mark.parametrize("name", ["layouts", "transfer"])
def test_folders_are_not_import_names(name: str) -> None:
    assert (ROOT / "jaxcache" / name).resolve() == ROOT / name
    run = subprocess.run(
        [sys.executable, "-c", f"import {name}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"import `jaxcache.{name}`" in run.stderr


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda x: str(x))
def test_imports_point_down(module: str, path: pathlib.Path) -> None:
    own = owner(module)
    assert own is not None
    for name in imported_names(path):
        target = owner(name)
        if target is not None and target != own:
            assert RANK[target] < RANK[own], f"{path} imports {name}"


@pytest.mark.parametrize("folder", HOST_SIDE)
def test_the_host_side_imports_no_jax(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        names = imported_names(path)
        assert not [n for n in names if n.split(".")[0] in ("jax", "flax")], path


# Who else but `transfer` may import it; nothing in the core imports those modules.
TRANSPORTS = {"nixl": set[str](), "zmq": {"jaxcache.events.publisher"}}


@pytest.mark.parametrize("module", TRANSPORTS)
def test_transports_stay_out_of_the_core(module: str) -> None:
    users = TRANSPORTS[module]
    for name, path in modules():
        if not name.startswith("jaxcache.transfer") and name not in users:
            found = imported_names(path)
            assert module not in [n.split(".")[0] for n in found], path
            assert not users.intersection(found), path


def test_no_module_is_longer_than_500_lines() -> None:
    for _, path in modules():
        assert len(path.read_text().splitlines()) <= 500, path
