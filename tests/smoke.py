"""Runs from an installed wheel, outside the source tree: imports and file places."""

import pathlib

import jaxcache
import jaxcache.layouts
import jaxcache.transfer

HERE = pathlib.Path(__file__).parent
PACKAGE = pathlib.Path(jaxcache.__file__).parent

assert "site-packages" in PACKAGE.parts, PACKAGE
for module in (jaxcache.layouts, jaxcache.transfer):
    assert module.__file__ is not None
    assert pathlib.Path(module.__file__).is_relative_to(PACKAGE), module.__file__
assert (PACKAGE / "py.typed").exists()
missing = [name for name in jaxcache.__all__ if not hasattr(jaxcache, name)]
assert not missing, missing
print("the installed wheel imports", len(jaxcache.__all__), "public names")
