"""The rules that keep pools in place live in one module, which alone indexes them."""

import ast
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).parents[2] / "jaxcache"
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if "layouts" not in path.parts]
# These hand pools on whole: they allocate, compile, or look at shapes.
WHOLE_POOLS = {"state.py", "donation.py", "proof.py"}


def pools_of_a_state(tree: ast.AST) -> list[ast.Attribute]:
    """Every `x.pools` in a module where x is not a layout or a group of one."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "pools":
            owner = ast.unparse(node.value)
            if not owner.split("[")[0].endswith(("layout", "group", "groups")):
                found.append(node)
    return found


def indexed(tree: ast.AST, pools: list[ast.Attribute]) -> list[str]:
    """What takes a part of an element of `x.pools`: `x.pools[i][..]`, `.at`."""
    elements = {
        id(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and node.value in pools
    }
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if (isinstance(node, ast.Subscript) and id(node.value) in elements)
        or (
            isinstance(node, ast.Attribute)
            and id(node.value) in elements
            and node.attr not in ("dtype", "shape", "sharding")
        )
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_one_module_indexes_pools(path: pathlib.Path) -> None:
    tree = ast.parse(path.read_text())
    pools = pools_of_a_state(tree)
    if path.name in WHOLE_POOLS:
        assert not indexed(tree, pools)
    elif path != PACKAGE / "device" / "pools.py":
        names = [ast.unparse(node) for node in pools if not is_module(node)]
        assert not names, "use the functions of jaxcache.device.pools"


def is_module(node: ast.Attribute) -> bool:
    """`jaxcache.device.pools` is the module, `self.pools` of an error are names."""
    return ast.unparse(node) in ("jaxcache.device.pools", "self.pools")


def test_the_rule_finds_what_it_forbids() -> None:
    for code in (
        "state.pools[0][rows]",
        "state.pools[0].at[rows].set(0)",
        "new.pools[pool].reshape(4)",
    ):
        tree = ast.parse(code)
        assert indexed(tree, pools_of_a_state(tree)), code
    for code in ("layout.pools[0].units", "state.pools[0].sharding", "len(x.pools)"):
        tree = ast.parse(code)
        assert not indexed(tree, pools_of_a_state(tree)), code


def test_the_one_module_never_reshapes_or_bitcasts_a_pool() -> None:
    text = (PACKAGE / "device" / "pools.py").read_text()
    tree = ast.parse(text)
    calls = {
        node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    forbidden = {"reshape", "bitcast_convert_type", "view", "ravel", "transpose"}
    assert not calls & (forbidden | {"moveaxis", "swapaxes"})


def test_donation_happens_in_one_place() -> None:
    donating = [
        str(path.relative_to(PACKAGE))
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.keyword)
        and node.arg in ("donate_argnums", "donate_argnames", "donate")
    ]
    assert donating == ["device/donation.py"]
