"""Importing any public name leaves torch._dynamo alone: it takes about a second, which only who compiles has to pay."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys, torch
before = "torch._dynamo" in sys.modules
import cuteforge
for name in cuteforge.__all__:
    getattr(cuteforge, name)
    if not before and "torch._dynamo" in sys.modules:
        sys.exit(f"{name} imports torch._dynamo")
"""


def test_no_public_name_imports_torch_dynamo():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
