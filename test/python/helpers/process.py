"""Fresh Python processes for what one process can show only once: cold caches, imports, captures, forks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
_PACKAGE = _TESTS.parents[1] / "python"
# Nothing takes this long, on however busy a machine; a little less than the limit of a test, so that what was printed
# is seen.
HANGS_AFTER_S = 540
# Put it before code that needs no torch and does not look at what is imported. Where torch is installed TVM-FFI imports
# it, which takes 3 s: longer than everything else that a process imports to compile.
WITHOUT_TORCH = "import sys\nsys.modules['torch'] = None\n"


def start(code: str, **environment: object) -> subprocess.Popen:
    """Run ``code`` with the package and ``helpers`` importable; a None in ``environment`` unsets the variable."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join([str(_PACKAGE), str(_TESTS), env.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    for name, value in environment.items():
        env.pop(name, None)
        if value is not None:
            env[name] = str(value)
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], env=env, stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen, timeout: float = HANGS_AFTER_S) -> str:
    """Its standard output; fails with its standard error unless it ended with status 0."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"no end after {timeout} s\n{out}\n{err}") from None
    assert process.returncode == 0, f"exit status {process.returncode}\n{out}\n{err}"
    return out


def run(code: str, **environment: object) -> str:
    return finish(start(code, **environment))
