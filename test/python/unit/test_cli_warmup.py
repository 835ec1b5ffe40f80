"""`warmup`: what it compiles, that the disk cache then holds it, and what it refuses before it compiles anything."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from cuteforge import GQAPrefill, PagedGQADecode, RotaryEmbedding, TensorSpec
from cuteforge.__main__ import main
from cuteforge.cli import processes, warmup
from cuteforge.cli.families import FAMILIES, Configuration, preset_configurations
from cuteforge.cli.families.attention import MANY_REQUESTS, MANY_TOKENS
from cuteforge.errors import ContractError, UnsupportedError
from cuteforge.runtime import arch, compile_cache, disk_cache
from helpers import process

ROTARY = {"family": "rotary", "op": "halves", "head_dim": 64, "dtype": "bfloat16"}
MERGE = {"family": "attention", "op": "merge", "head_dim": 64, "dtype": "float16"}
TOO_WIDE = {"family": "attention", "op": "decode", "head_dim": 512, "dtype": "bfloat16"}
H200 = arch.resolve_arch("sm_90a", None)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("CUTEFORGE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUTEFORGE_ARCH", raising=False)
    yield disk_cache.DiskCache()
    # A test that stands in for the compiler leaves kernels without code.
    compile_cache.clear()


@pytest.fixture
def config(tmp_path):
    """A function that writes its argument into a file."""

    def write(content) -> str:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(content))
        return str(path)

    return write


@pytest.fixture
def compile_nothing(monkeypatch):
    """Every job is compiled at once, in no process."""
    jobs = []

    def compile_all(work, num_processes):
        jobs.extend(work)
        return (warmup.Outcome(job, "compiled") for job in work)

    monkeypatch.setattr(warmup, "compile_all", compile_all)
    return jobs


def compile_here(jobs, num_processes):
    """As `warmup.compile_all`, in this process."""
    return map(warmup.compile_job, jobs)


def rows_of(text: str, what: str) -> list[str]:
    return [line for line in text.splitlines() if what in line and "sm_90a" in line]


def test_two_processes_fill_the_cache_and_a_second_run_finds_it_full(cache, config, capfd, monkeypatch):
    command = ["warmup", "--arch", "sm_90a", "--jobs", "2", "--config", config([ROTARY, MERGE])]
    assert main(command) == 0
    assert capfd.readouterr().out.count("compiled") >= 3
    assert sorted(entry.builder for entry in cache.ls()) == [
        "cuteforge.families.attention.merge.kernel:build",
        "cuteforge.families.rotary.kernel:build",
    ]
    assert {entry.arch for entry in cache.ls()} == {"sm_90a"}
    assert cache.verify() == []
    # in this process, which has compiled nothing: two more would import torch for nothing
    monkeypatch.setattr(warmup, "compile_all", compile_here)
    assert main(command) == 0
    text = capfd.readouterr().out
    assert "0 compiled, 2 already there, 0 failed" in text
    assert all("already there" in row for what in ("halves", "merge") for row in rows_of(text, what))


def test_what_no_kernel_serves_is_a_row_and_the_rest_is_compiled(config, capfd, monkeypatch):
    """In this process: its table needs no compiler."""
    monkeypatch.setattr(warmup, "compile_all", compile_here)
    monkeypatch.setattr(compile_cache, "_compile", lambda *_: ("entry", {"kernel.o": b"code"}))
    monkeypatch.setattr(compile_cache, "_load_contents", lambda *_: None)
    assert main(["warmup", "--arch", "sm_90a", "--config", config([TOO_WIDE, ROTARY])]) == 1
    text = capfd.readouterr().out
    assert "FAILED: q: the kernel serves" in rows_of(text, "512")[0]
    assert "1 compiled, 0 already there, 1 failed" in text


def test_a_compiler_that_fails_is_named_with_its_reason(monkeypatch):
    def fail(*_):
        raise RuntimeError("registers spilled")

    monkeypatch.setattr(compile_cache, "_compile", fail)
    job = warmup.Job(Configuration("rotary", "halves", {"head_dim": 72, "dtype": "float32"}), "sm_90a", "cuda:0")
    outcome = warmup.compile_job(job)
    assert (outcome.status, outcome.reason) == ("failed", "RuntimeError: registers spilled")


def test_what_could_not_be_stored_is_a_row_with_the_reason_and_status_1(config, capfd, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(warmup, "compile_all", compile_here)
    monkeypatch.setattr(compile_cache, "_compile", lambda *_: ("entry", {"kernel.o": b"code"}))
    monkeypatch.setattr(compile_cache, "_load_contents", lambda *_: None)
    monkeypatch.setattr(disk_cache.scratch.tempfile, "mkdtemp", full)
    assert main(["warmup", "--arch", "sm_90a", "--config", config([ROTARY])]) == 1
    text = capfd.readouterr().out
    assert "0 compiled, 0 already there, 0 failed, 1 not stored" in text
    assert "NOT STORED: [Errno 28] No space left on device" in text


def run_warmup(config: str, cache) -> subprocess.Popen:
    options = ["--arch", "sm_90a", "--jobs", "2", "--config", config]
    code = (
        "import signal\nfrom cuteforge.__main__ import main\nif __name__ == '__main__':\n"
        # a shell starts what runs in the background with interrupts ignored
        "    signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"    exit(main(['warmup', *{options!r}]))\n"
    )
    return process.start(
        code, CUTEFORGE_CACHE_DIR=cache, XDG_CACHE_HOME=Path(config).parent / "home"
    )  # a home of its own


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system")
@pytest.mark.parametrize("options", ["size=16k", "ro"])
def test_a_disk_that_is_full_or_read_only_is_status_1(tmp_path, config, options, capfd, monkeypatch):
    """In this process, with a kernel that the disk has no room for: what counts is the disk, not the compiler."""
    disk = tmp_path / "disk"
    disk.mkdir()
    monkeypatch.setenv("CUTEFORGE_CACHE_DIR", str(disk))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "400")  # no line of the table is broken
    monkeypatch.setattr(warmup, "compile_all", compile_here)
    monkeypatch.setattr(compile_cache, "_compile", lambda *_: ("entry", {"kernel.o": bytes(1 << 16)}))
    monkeypatch.setattr(compile_cache, "_load_contents", lambda *_: None)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"{options},mode=755", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no mounts here: {mounted.stderr.decode().strip()}")
    try:
        status = main(["warmup", "--arch", "sm_90a", "--config", config([ROTARY])])
    finally:
        subprocess.run(["umount", disk], check=True)
    out = capfd.readouterr().out
    assert status == 1, out
    assert "0 compiled, 0 already there, 0 failed, 1 not stored" in out
    assert ("No space left on device" if "size" in options else "is read-only for this user") in out


def descendants(pid: int) -> set[int]:
    """Processes below `pid` now."""
    children = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children |= {int(child) for child in path.read_text().split()}
    return children.union(*map(descendants, children))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)]
)
def test_workers_end_with_warmup_however_it_ends(tmp_path, config, sent, status):
    """And leave its output: a pipe that they held would keep its reader waiting."""
    many = [{**ROTARY, "head_dim": 16 * i} for i in range(2, 17)]
    started = run_warmup(config(many), tmp_path / "cache")
    deadline = time.monotonic() + 120
    # Three: two workers, and the tracker of the multiprocessing module.
    while len(workers := descendants(started.pid)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(workers) >= 3
    time.sleep(1)
    started.send_signal(sent)
    out, err = started.communicate(timeout=20)
    assert started.returncode == status, out + err
    assert "Traceback" not in err
    deadline = time.monotonic() + 10
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, workers))


def test_a_process_that_dies_fails_its_jobs_only_by_name(monkeypatch):
    class DeadPool:
        def __init__(self, *_, mp_context, **options):
            assert mp_context.get_start_method() == "spawn"

        def submit(self, function, job):
            future = Future()
            future.set_exception(processes.BrokenProcessPool("a process died"))
            return future

        def shutdown(self, cancel_futures):
            assert cancel_futures

    monkeypatch.setattr(processes, "ProcessPoolExecutor", DeadPool)
    job = warmup.Job(Configuration("rotary", "halves", ROTARY), "sm_90a", "cuda:0")
    (outcome,) = warmup.compile_all([job], 1)
    assert (outcome.status, outcome.reason) == ("failed", "a process died")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_preset_is_served_on_every_architecture(family):
    for name in ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"):
        target = arch.resolve_arch(name, None)
        for configuration in preset_configurations(family):
            op = configuration.build_op()
            assert op.check_support()
            op._check_arch(op.dims, target)


def test_no_two_presets_share_a_kernel():
    keys = {}
    for configuration in (c for family in FAMILIES for c in preset_configurations(family)):
        op = configuration.build_op()
        other = keys.setdefault(op._kernel_key(op.dims, H200).identity, configuration)
        assert other is configuration


def preset_key(family: str, op: str, **options):
    made = Configuration(family, op, {"head_dim": 128, "dtype": "bfloat16", **options}).build_op()
    return made._kernel_key(made.dims, H200)


def test_presets_compile_what_calls_of_real_sizes_run():
    bf16, i32 = (lambda *shape: TensorSpec(shape, "bfloat16")), (lambda *shape: TensorSpec(shape, "int32"))
    q, pool, new = bf16(64, 32, 128), bf16(999, 16, 8, 128), bf16(64, 8, 128)
    for append in (False, True):
        tensors = {"new_k": new, "new_v": new} if append else {}
        op = PagedGQADecode(q, pool, pool, i32(64, 77), q, seqlens_k=i32(64), **tensors)
        assert op._kernel_key(op.dims, H200) == preset_key(
            "attention", "paged decode", append=append, requests=MANY_REQUESTS
        )
        two = bf16(2, 32, 128)
        few = PagedGQADecode(two, pool, pool, i32(2, 77), two, seqlens_k=i32(2))
        assert few._kernel_key(few.dims, H200) == preset_key("attention", "paged decode")
    for batch, tokens in ((1, 512), (4, 4096)):
        q, kv = bf16(batch, tokens, 32, 128), bf16(batch, tokens, 8, 128)
        op = GQAPrefill(q, kv, kv, q, causal=True)
        keys = [preset_key("attention", "prefill", tokens=n) for n in (1, MANY_TOKENS)]
        assert op._kernel_key(op.dims, H200) == keys[tokens > 512]
    q, k, row = bf16(4099, 32, 128), bf16(4099, 8, 128), TensorSpec((8192, 64), "float32")
    op = RotaryEmbedding(q, (row, row), q, TensorSpec((4099,), "int64"), k=k, k_out=k, interleaved=False)
    assert op._kernel_key(op.dims, H200) == preset_key("rotary", "halves")


def test_options_replace_those_of_the_presets(compile_nothing, capsys):
    options = ["--family", "rotary", "--arch", "sm_90a", "sm_80", "--head-dim", "96", "--dtype", "float32"]
    assert main(["warmup", *options]) == 0
    assert {job.arch for job in compile_nothing} == {"sm_90a", "sm_80"}
    assert {job.configuration.family for job in compile_nothing} == {"rotary"}
    assert {(o["head_dim"], o["dtype"]) for o in (job.configuration.options for job in compile_nothing)} == {
        (96, "float32")
    }


def test_every_family_is_compiled_for_the_gpus_here_without_options(compile_nothing, monkeypatch, capsys):
    names = ["sm_90a", "sm_80", "sm_80"]
    named = warmup.resolve_arch
    monkeypatch.setattr(warmup.torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(warmup, "resolve_arch", lambda name, index: named(name or names[index], None))
    assert main(["warmup"]) == 0
    assert {(job.arch, job.device) for job in compile_nothing} == {("sm_90a", "cuda:0"), ("sm_80", "cuda:1")}
    assert {job.configuration.family for job in compile_nothing} == set(FAMILIES)


def test_without_a_gpu_an_architecture_is_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(warmup.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(warmup.torch.cuda, "is_available", lambda: False)
    assert main(["warmup"]) == 1
    assert "cuteforge: --arch: no GPU here to take it from; give --arch sm_90a" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({}, "config: wanted a list of objects, got dict"),
        ([ROTARY, "halves"], r"config\[1\]: wanted an object with a family and an op, got 'halves'"),
        ([{**ROTARY, "family": "conv"}], r"config\[0\]: family: wanted one of csa.*, got 'conv'"),
        ([{**ROTARY, "op": "thirds"}], r"config\[0\]: op: wanted one of halves.* in rotary, got 'thirds'"),
        ([{**ROTARY, "pages": 16}], r"config\[0\]: halves: .*'pages'"),
        ([{**ROTARY, "head_dim": "wide"}], r"config\[0\]: halves: "),
        ([ROTARY, {**ROTARY, "dtype": "bf16"}], r"config\[1\]: x: wanted dtype .*, got bf16"),
    ],
)
def test_a_malformed_file_is_refused_before_anything_is_compiled(compile_nothing, tmp_path, config, content, sentence):
    config(content)
    with pytest.raises(ContractError, match=sentence):
        warmup.run(arch=["sm_90a"], config=tmp_path / "config.json")
    assert compile_nothing == []


def test_a_file_that_is_no_json_or_not_there_is_refused(compile_nothing, tmp_path):
    (tmp_path / "config.json").write_text("[")
    for name in ("config.json", "nothing.json"):
        with pytest.raises(ContractError, match="config: wanted a readable JSON file"):
            warmup.run(arch=["sm_90a"], config=tmp_path / name)


def test_a_file_and_options_of_the_presets_exclude_each_other(compile_nothing, tmp_path, config):
    config([ROTARY])
    with pytest.raises(ContractError, match="--config: wanted no --family, --head-dim or --dtype beside it"):
        warmup.run(arch=["sm_90a"], config=tmp_path / "config.json", head_dim=[64])


def test_a_cache_that_is_off_or_unusable_is_refused(compile_nothing, monkeypatch):
    monkeypatch.setenv("CUTEFORGE_CACHE_DIR", "/proc/nowhere")
    with pytest.raises(UnsupportedError, match="the disk cache cannot be used"):
        warmup.run(arch=["sm_90a"])
    monkeypatch.setenv("CUTEFORGE_DISK_CACHE", "0")
    with pytest.raises(ContractError, match="CUTEFORGE_DISK_CACHE: wanted 1"):
        warmup.run(arch=["sm_90a"])


@pytest.mark.parametrize("option", ["--jobs", "--head-dim"])
@pytest.mark.parametrize("number", ["0", "-1", "many"])
def test_a_number_that_is_not_positive_is_a_usage_error(option, number, capsys):
    with pytest.raises(SystemExit) as end:
        main(["warmup", option, number])
    assert end.value.code == 2
    assert option in capsys.readouterr().err
