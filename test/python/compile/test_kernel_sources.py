"""The digest of a kernel's sources covers the modules that a process imports to trace and compile it, and no others."""

import json
import pickle

from cuteforge.runtime.sources import kernel_modules
from helpers import process
from helpers.kernel_keys import kernel_keys

# The packages' own `__init__`s would import the whole family. Empty ones take their part: a kernel that used a name of
# one would fail here. Each kernel gets a child of its own, forked when only the compiler is imported, which is what
# takes longest.
COMPILE = """
import gc, importlib, json, os, pickle, sys, types
import cuteforge
ROOT = os.path.dirname(cuteforge.__file__)
for folder, _, files in os.walk(ROOT):
    name = ".".join(["cuteforge", *os.path.relpath(folder, ROOT).split(os.sep)]).rstrip(".")
    if "__init__.py" in files and name != "cuteforge":
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = [folder]
from cuteforge.runtime import cutlass_compat
cutlass_compat.require_compiler()
import tvm_ffi
gc.freeze()  # or each child would go through it, and copy the pages that hold it
for name, pickled in KEYS.items():
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0, name
        continue
    builder, traits, arch = pickle.loads(pickled)
    module, function = builder.split(":")
    build = getattr(importlib.import_module(module), function)(traits)
    cutlass_compat.compile_host(build.host, build.args, arch=arch, options=build.options)
    modules = [m for m, x in sys.modules.items() if m.startswith("cuteforge.") and not hasattr(x, "__path__")]
    print(json.dumps([name, modules]), flush=True)
    os._exit(0)
"""


def test_the_digest_of_each_kernel_covers_what_its_compile_imports_and_nothing_else():
    keys = kernel_keys()
    given = {name: pickle.dumps((key.builder, key.traits, key.arch)) for name, key in keys.items()}
    printed = process.run(f"{process.WITHOUT_TORCH}KEYS = {given!r}{COMPILE}").splitlines()
    imported = {name: set(modules) for name, modules in map(json.loads, printed)}
    for name, key in keys.items():
        assert {key.builder.partition(":")[0], "cuteforge.runtime.build"} <= imported[name], name
    assert imported == {name: set(kernel_modules(key.builder)) for name, key in keys.items()}
