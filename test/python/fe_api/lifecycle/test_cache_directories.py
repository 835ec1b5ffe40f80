"""What is compiled and when: keys, threads, processes, damaged and unusable cache directories.

The run time is that of all families; the compressor stands for them.
"""

import shutil

import pytest

from helpers import process

# Every script below runs in a fresh process. A process costs some seconds, so each goes through several situations.
# `run` is one checked forward and backward from an empty memory cache; it returns how many kernels were compiled.
PRELUDE = """
import os, pathlib, sys, threading, time
import torch
from helpers import csa
from cuteforge.runtime import compile_cache

device = torch.device("cuda")

def check(config):
    x = csa.small(config, device)
    csa.check_forward(csa.run_forward(x), x)
    csa.check_backward(csa.run_backward(x), x)

def run(directory=None):
    compile_cache.clear()
    if directory is not None:
        os.environ["CUTEFORGE_CACHE_DIR"] = str(directory)
    check(csa.CSA)
    return compile_cache.stats().compiles
"""


@pytest.fixture(scope="module")
def filled_cache(tmp_path_factory):
    """A cache directory that another process has filled with forward and backward; copy it before changing it."""
    cache = tmp_path_factory.mktemp("filled") / "cache"
    assert process.run(PRELUDE + "print(run())", CUTEFORGE_CACHE_DIR=cache).split() == ["2"]
    return cache


RANDOM_SHAPES = (
    PRELUDE
    + """
import random
from helpers.packs import Pack
from cuteforge import csa_compressor_backward_wrapper as backward, csa_compressor_forward_wrapper as forward

rng, counts = random.Random(0), []
for call in range(200):
    cuts = sorted(rng.randrange(500, 5001) for _ in range(rng.randrange(1, 10)))
    lengths = tuple(b - a for a, b in zip([0, *cuts], cuts))
    x = csa.inputs(csa.CSA, Pack(lengths, 4, extra_rows=rng.randrange(3)), device, seed=call)
    out = forward(*x.tensors, **x.config, total_comp=x.total_comp)["out"]
    counts.append(compile_cache.stats().compiles)
    grads = backward(*x.tensors, x.grad_out, **x.config)
    counts.append(compile_cache.stats().compiles)
    if call % 40 == 0:
        csa.check_forward(out, x)
size = compile_cache.stats().size
print(counts[0], counts[1], counts[-1], size)
"""
)


def test_200_random_shapes_compile_once_for_each_direction(device, tmp_path):
    """T in 500..5000 and 1..9 segments are run-time values."""
    out = process.run(RANDOM_SHAPES, CUTEFORGE_CACHE_DIR=tmp_path / "cache")
    first_forward, first_backward, last, size = map(int, out.split())
    assert (first_forward, first_backward, last, size) == (1, 2, 2, 2)


THREADS = (
    PRELUDE
    + """
def together(configs):
    barrier, errors = threading.Barrier(len(configs)), []

    def work(config):
        try:
            barrier.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                check(config)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(config,)) for config in configs]
    [t.start() for t in threads], [t.join() for t in threads]
    if errors:
        raise errors[0]
    return compile_cache.stats().compiles

print(together([csa.CSA] * 8), together([csa.CSA, csa.ONE_WINDOW, csa.ODD, csa.CSA_FP16] * 2))
"""
)


def test_eight_threads_compile_each_configuration_once(device, tmp_path):
    same, four = map(int, process.run(THREADS, CUTEFORGE_CACHE_DIR=tmp_path / "cache").split())
    assert (same, four) == (2, 8)


ROUNDS = 4
COLD_TOGETHER = (
    PRELUDE
    + """
def meet(place):
    place.mkdir(exist_ok=True)
    (place / str(os.getpid())).touch()
    deadline = time.monotonic() + 120
    while len(list(place.iterdir())) < 8 and time.monotonic() < deadline:
        time.sleep(0.002)

base = pathlib.Path(os.environ["BASE"])
check(csa.ONE_WINDOW)  # the CUDA context and cutlass, so that all reach the cold directories together
for round in range(int(os.environ["ROUNDS"])):
    meet(base / f"meeting{round}")
    run(base / f"cache{round}")
"""
)


def test_eight_processes_meet_cold_directories(device, tmp_path):
    """All are right in every round; afterwards each directory holds whole entries that a ninth process only loads."""
    environment = {"BASE": tmp_path, "ROUNDS": ROUNDS, "CUTEFORGE_CACHE_DIR": tmp_path / "warm_up"}
    for each in [process.start(COLD_TOGETHER, **environment) for _ in range(8)]:
        process.finish(each)
    caches = [str(tmp_path / f"cache{i}") for i in range(ROUNDS)]
    assert process.run(PRELUDE + f"print(*map(run, {caches}))").split() == ["0"] * ROUNDS


def test_warm_process_neither_compiles_nor_imports_cutlass(device, filled_cache):
    code = PRELUDE + "print(run(), 'cutlass' in sys.modules)"
    compiles, imported = process.run(code, CUTEFORGE_CACHE_DIR=filled_cache).split()
    assert compiles == "0"
    if not any(shutil.which(linker) for linker in ("cc", "gcc", "clang")):
        pytest.skip("no linker: stored objects are loaded through cutlass")
    assert imported == "False"


DAMAGE = (
    PRELUDE
    + """
HOW = {
    "emptied": lambda data: b"",
    "truncated": lambda data: data[: len(data) // 2],
    "flipped": lambda data: data[:-64] + bytes(64),
}
cache = pathlib.Path(os.environ["CUTEFORGE_CACHE_DIR"])
for how, change in HOW.items():
    for suffix in (".json", ".so", ".o"):
        files = [path for path in cache.rglob("*" + suffix) if path.is_file()]
        for path in files:
            aside = path.with_name("aside")  # the old file may still be mapped
            aside.write_bytes(change(path.read_bytes()))
            aside.replace(path)
        # The object is only the spare of the library; a damaged spare may count as damage or not.
        wanted = {2} if files and suffix != ".o" else {0, 2}
        compiles = run()
        assert compiles in wanted, (how, suffix, compiles)
        assert run() == 0, (how, suffix)
"""
)


def test_damaged_entries_are_rebuilt(device, filled_cache, tmp_path):
    """Every kind of file of an entry, damaged in three ways: rebuilt, right, and loaded the next time."""
    cache = tmp_path / "cache"
    shutil.copytree(filled_cache, cache)
    cache.chmod(0o700)
    process.run(DAMAGE, CUTEFORGE_CACHE_DIR=cache)


UNUSABLE = (
    PRELUDE
    + """
import logging

class Count(logging.Handler):
    warnings = 0
    def emit(self, record):
        self.warnings += record.levelno >= logging.WARNING

count, base = Count(), pathlib.Path(os.environ["BASE"])
logging.getLogger("cuteforge").addHandler(count)

# A file in the directory's place: no user can write there, root included. Once a process is enough of a warning.
(base / "file").touch()
assert run(base / "file") == 2
assert run(base / "file") == 2
assert count.warnings == 1, count.warnings
before = count.warnings
assert run(base / "file" / "below") == 2
assert count.warnings <= before + 1

(base / "open").mkdir()
(base / "open").chmod(0o777)
assert run(base / "open") == 2
assert not list((base / "open").iterdir())

os.environ["CUTEFORGE_DISK_CACHE"] = "0"
before = count.warnings
assert run(base / "off") == 2
assert count.warnings == before
assert not (base / "off").exists() or not list((base / "off").iterdir())
"""
)


def test_without_a_usable_directory_kernels_stay_in_memory(device, tmp_path):
    """Unwritable, writable by others, turned off: right answers, one warning, none for what was asked for."""
    process.run(UNUSABLE, BASE=tmp_path)


def test_directory_is_created_private(device, filled_cache):
    assert filled_cache.stat().st_mode & 0o777 == 0o700


EVICTION = (
    PRELUDE
    + """
import gc

configs = [c for c in csa.CONFIGS if c.ratio <= 8][:10]
levels = []

def grows():
    (threads_before, free_before), (threads_after, free_after) = levels[-2:]
    return threads_after > threads_before or free_before - free_after >= 16 * 2**20

# Free memory is of the whole GPU: other processes take some in one round or another, and what is leaked here goes in
# each.
while len(levels) < 3 or (grows() and len(levels) < 12):
    for config in configs:
        check(config)
        assert compile_cache.stats().size <= 3, compile_cache.stats()
    gc.collect(); torch.cuda.empty_cache(); torch.cuda.synchronize()
    levels.append((threading.active_count(), torch.cuda.mem_get_info()[0]))
assert not grows(), levels
"""
)


def test_evicted_kernels_are_right_again_and_memory_levels_off(device):
    """Few configurations and a bound of 3, in place of 300 and 256: more than the bound, three times round and more."""
    process.run(EVICTION, CUTEFORGE_CACHE_SIZE=3)
