"""The digest of a kernel's sources covers the modules that a process imports to trace and compile it, and no others."""

import pickle

import pytest

from cuteforge.runtime.sources import kernel_modules
from helpers import process
from helpers.kernel_keys import kernel_keys

KEYS = kernel_keys()

# The packages' own `__init__`s would import the whole family. Empty ones take their part: a kernel that used a name of
# one would fail here.
COMPILE = """
import importlib, os, pickle, sys, types
import cuteforge
ROOT = os.path.dirname(cuteforge.__file__)
for folder, _, files in os.walk(ROOT):
    name = ".".join(["cuteforge", *os.path.relpath(folder, ROOT).split(os.sep)]).rstrip(".")
    if "__init__.py" in files and name != "cuteforge":
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = [folder]
builder, traits, arch = pickle.loads({key!r})
module, function = builder.split(":")
from cuteforge.runtime import cutlass_compat
build = getattr(importlib.import_module(module), function)(traits)
cutlass_compat.compile_host(build.host, build.args, arch=arch, options=build.options)
for name, module in list(sys.modules.items()):
    if name.startswith("cuteforge.") and not hasattr(module, "__path__"):
        print(name)
"""


@pytest.mark.parametrize("name", KEYS)
def test_the_digest_covers_what_a_compile_imports_and_nothing_else(name):
    key = KEYS[name]
    given = pickle.dumps((key.builder, key.traits, key.arch))
    imported = set(process.run(COMPILE.replace("{key!r}", repr(given))).split())
    covered = set(kernel_modules(key.builder))
    assert {key.builder.partition(":")[0], "cuteforge.runtime.build"} <= imported
    assert imported == covered
