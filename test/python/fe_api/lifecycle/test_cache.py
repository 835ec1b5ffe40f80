"""What a process that comes later compiles of any family: nothing. Directories, threads and damage:
test_cache_directories.py."""

from helpers import process
from helpers.lifecycle import each_name

WARM = """
import torch
from helpers import lifecycle
from cuteforge.runtime import compile_cache

call = lifecycle.FAMILIES[{name!r}].call(torch.device("cuda"))
call.execute()
call.check()
print(compile_cache.stats().compiles)
"""


@each_name
def test_second_process_only_loads(name, device, tmp_path):
    code = WARM.format(name=name)
    first, second = (int(process.run(code, CUTEFORGE_CACHE_DIR=tmp_path / "cache")) for _ in range(2))
    assert first > 0 and second == 0
