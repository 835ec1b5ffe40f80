"""The commands: what they print and return, on this machine and on ones that lack something."""

from __future__ import annotations

import builtins
import logging
import math
import os
import sys
import types
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import pytest
import torch

from cuteforge.__main__ import main
from cuteforge.cli import bench, demo, doctor, processes, timing
from cuteforge.cli.commands import COMMANDS
from cuteforge.cli.console import open_console
from cuteforge.cli.families import FAMILIES, Case, attention, csa, load, rotary
from cuteforge.errors import UnsupportedError
from cuteforge.runtime import arch, compile_cache, cutlass_compat, disk_cache, env
from helpers.process import HANGS_AFTER_S, run, start

EXACT = {"out": torch.tensor([1.0, 2.0], dtype=torch.float64)}
NEAR = {"out": torch.tensor([1.0, 2.0])}
FAR = {"out": torch.tensor([1.0, 2.001])}
SMALL_ATTENTION = {
    name: replace(use, lens_q=(1, 1, 1), lens_k=(70, 0, 17)) if use.is_decode
    else replace(use, lens_q=(5, 5), lens_k=(33, 33))
    for name, use in attention.USES.items()
}  # fmt: skip


def case(results=NEAR, compile_for=lambda arch: None, bind=None) -> Case:
    return Case("toy forward", 4096, lambda: EXACT, lambda: NEAR, lambda: results, bind, compile_for)


def run_demo(monkeypatch, capsys, *cases, gpu=False):
    """(exit status, output) of the demo with these cases."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Toy GPU")
    monkeypatch.setattr(demo, "_cases", lambda device: list(cases))
    monkeypatch.setattr(processes, "default_count", lambda: 1)  # another process would not have these cases
    status = main(["demo"])
    return status, capsys.readouterr().out


def test_no_command_prints_the_help(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)


def test_help_needs_no_dependency():
    code = (
        "import sys\nfrom cuteforge.__main__ import main\nmain([])\n"
        "for command in ('warmup', 'cache', 'bench'):\n"
        "    try:\n        main([command, '--help'])\n    except SystemExit as end:\n        assert end.code == 0\n"
        "print([m for m in ('torch', 'rich', 'cutlass') if m in sys.modules])"
    )
    assert run(code).splitlines()[-1] == "[]"


def test_unknown_command_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as end:
        main(["dmeo"])
    assert end.value.code == 2
    assert "dmeo" in capsys.readouterr().err


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_what_the_commands_ask_for(family):
    module = load(family)
    assert all(op.check_support() for op in module.sample_ops("cuda").values())
    assert callable(module.demo_cases)


def test_budget_is_twice_the_eager_error_and_an_ulp_of_the_largest():
    eager = torch.tensor([1.0, 2.5], dtype=torch.bfloat16)
    assert demo.budget(eager, EXACT["out"]) == 2 * (0.5 + 2 * torch.finfo(torch.bfloat16).eps)


def test_budget_of_zeros_and_of_nothing_is_zero():
    assert demo.budget(torch.zeros(2), torch.zeros(2, dtype=torch.float64)) == 0
    assert demo.budget(torch.zeros(0), torch.zeros(0, dtype=torch.float64)) == 0


def test_nan_in_a_result_fails_the_check():
    (check,) = demo.check_results(case(), {"out": torch.tensor([1.0, math.nan])})
    assert not check.ok


def test_demo_without_a_gpu_says_so_checks_and_compiles(monkeypatch, capsys):
    status, text = run_demo(monkeypatch, capsys, case())
    assert status == 0
    assert "No CUDA GPU" in text.splitlines()[0]
    assert "all ok" in text
    assert all(name in text for name in demo.ARCHITECTURES)


def test_demo_fails_on_a_wrong_result(monkeypatch, capsys):
    status, text = run_demo(monkeypatch, capsys, case(FAR))
    assert status == 1
    assert "FAILED" in text


def test_demo_reports_an_architecture_that_does_not_compile_and_goes_on(monkeypatch, capsys):
    def compile_for(name):
        if name == "sm_89":
            raise RuntimeError("registers [spilled]")

    status, text = run_demo(monkeypatch, capsys, case(compile_for=compile_for))
    assert status == 1
    assert "toy forward for sm_89: RuntimeError: registers [spilled]" in text
    (row,) = (line for line in text.splitlines() if "toy forward" in line and "sm_89" not in line and " s" in line)
    assert row.count("FAILED") == 1


def test_demo_compiles_in_processes_of_their_own():
    """One after another, all its kernels take 133 s on two slow CPUs. A case is found again by its index."""
    index = next(i for i, found in enumerate(demo._cases("cpu")) if found.name == "rotary halves")
    jobs = [(index, "sm_80"), (index, "sm_5")]
    compiled, failed = (found for _, found in sorted(processes.in_processes(demo.compile_case, jobs, 2))[::-1])
    assert compiled.problem == "" and compiled.cell.split()[1] == "s"
    assert failed.cell == "FAILED" and "sm_5" in failed.problem


def test_demo_says_so_when_a_process_dies(monkeypatch, capsys):
    lost = lambda function, jobs, count: ((job, BrokenProcessPool("killed")) for job in jobs)  # noqa: E731
    monkeypatch.setattr(processes, "in_processes", lost)
    monkeypatch.setattr(processes, "default_count", lambda: 2)
    assert not demo._compile_all(open_console(), [case()])
    assert "toy forward for sm_80: BrokenProcessPool: killed" in capsys.readouterr().out


def test_demo_on_a_gpu_shows_time_and_share_of_the_copy_ceiling(monkeypatch, capsys):
    monkeypatch.setattr(timing, "copy_tbps", lambda: 4.0)
    monkeypatch.setattr(timing, "median_us", lambda launch: 2.0)
    buffers = {"out": torch.full((2,), math.nan)}
    launch = lambda: buffers["out"].copy_(NEAR["out"])  # noqa: E731
    status, text = run_demo(monkeypatch, capsys, case(bind=lambda: (launch, buffers)), gpu=True)
    assert status == 0
    assert "Toy GPU" in text
    # 4096 bytes in 2 us are 2.048 GB/s.
    assert "2.0 us" in text
    assert "0%" in text


def test_demo_gives_no_time_for_a_wrong_result(monkeypatch, capsys):
    monkeypatch.setattr(timing, "copy_tbps", lambda: 4.0)
    monkeypatch.setattr(timing, "median_us", lambda launch: pytest.fail("timed although wrong"))
    status, text = run_demo(monkeypatch, capsys, case(bind=lambda: (lambda: None, FAR)), gpu=True)
    assert status == 1
    assert "FAILED" in text


def test_demo_on_a_gpu_that_is_refused_says_why(monkeypatch, capsys):
    def bind():
        raise UnsupportedError("cuda:0: Toy GPU has compute capability 7.0")

    monkeypatch.setattr(timing, "copy_tbps", lambda: 4.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Toy GPU")
    monkeypatch.setattr(demo, "_cases", lambda device: [case(bind=bind)])
    assert main(["demo"]) == 1
    assert capsys.readouterr().err == "cuteforge: cuda:0: Toy GPU has compute capability 7.0\n"


def test_csa_demo_pack_is_ragged_with_short_and_empty_segments():
    lengths = csa.SEGMENT_LENGTHS
    for ratio, _ in csa.CONFIGS.values():
        assert 0 in lengths
        assert any(0 < n < ratio for n in lengths)
        assert any(n > ratio and n % ratio for n in lengths)


def test_demo_checks_every_family_here_and_compiles_what_it_names(monkeypatch, tmp_path, capsys):
    """The whole command, on small inputs and one architecture. The compiler takes rotary and is stood in for otherwise:
    what it makes of these kernels, test/python/compile and the demo itself show, which CI runs."""
    asked, compile_kernel = [], compile_cache._compile

    def compile_one_family(key, disk):
        asked.append(key)
        return compile_kernel(key, disk) if ".rotary." in key.builder else ("entry", {"kernel.o": b"code"})

    load_contents = compile_cache._load_contents
    monkeypatch.setattr(compile_cache, "_compile", compile_one_family)
    monkeypatch.setattr(
        compile_cache, "_load_contents", lambda contents, symbol: symbol != "entry" and load_contents(contents, symbol)
    )
    monkeypatch.setenv("CUTEFORGE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(csa, "SEGMENT_LENGTHS", (300, 0, 3, 130, 0, 256))
    monkeypatch.setattr(csa, "HEAD_DIM", 64)
    monkeypatch.setattr(rotary, "NUM_TOKENS", 65)
    monkeypatch.setattr(rotary, "MAX_POS", 9000)
    monkeypatch.setattr(attention, "USES", SMALL_ATTENTION)
    monkeypatch.setattr(demo, "ARCHITECTURES", ("sm_90a",))
    monkeypatch.setattr(processes, "default_count", lambda: 1)
    compile_cache.clear()
    try:
        status, text = main(["demo"]), capsys.readouterr().out
    finally:
        compile_cache.clear()
    assert status == 0, text
    names = ("CSA forward", "CSA backward", "HCA forward", "HCA backward", *rotary.USES, *attention.USES)
    assert all(name in text for name in names)
    assert {key.arch for key in asked} == {"sm_90a"}
    assert len({key.identity for key in asked}) == len(asked) == len(names), "each row has a kernel of its own"
    for builder in ("csa.compressor.forward:", "csa.compressor.backward:", "rotary.kernel:", "attention.forward"):
        assert any(builder in key.builder for key in asked), builder


def test_csa_demo_compiles_what_its_input_runs():
    """The samples that are compiled without a GPU have other sizes than the input; the compile key must not see
    them."""
    target = arch.resolve_arch("sm_90a", None)
    for name, config in csa.CONFIGS.items():
        problem = csa.Problem.draw(*config, "meta")
        real = csa.CSACompressorForward(*problem.inputs, problem.grad_out, **problem.config)
        sample = csa.sample_ops("cuda")[f"{name} forward"]
        assert real._kernel_key(real.dims, target) == sample._kernel_key(sample.dims, target)


def test_rotary_demo_compiles_what_its_input_runs(monkeypatch):
    monkeypatch.setattr(rotary, "MAX_POS", 100)
    target = arch.resolve_arch("sm_90a", None)
    for name, use in rotary.USES.items():
        problem = rotary.Problem.draw(use, "meta")
        q, k = problem.heads.values()
        options = {"k": k, "k_out": k, "interleaved": use.interleaved}
        real = rotary.RotaryEmbedding(q, problem.table, q, problem.positions, **options)
        sample = rotary.sample_ops("cuda")[name]
        assert real._kernel_key(real.dims, target) == sample._kernel_key(sample.dims, target)


def test_attention_demo_compiles_what_its_input_runs():
    target = arch.resolve_arch("sm_90a", None)
    for name, use in attention.USES.items():
        problem = attention.Problem.draw(use, "meta")
        out, causal = problem.inputs[0], not use.is_decode
        real = use.op(*problem.inputs, out, **problem.tensors, causal=causal)
        sample = attention.sample_ops("cuda")[name]
        assert real._kernel_key(real.dims, target) == sample._kernel_key(sample.dims, target)


def test_attention_demo_covers_empty_requests_and_ends_of_pages():
    decode, paged = attention.USES["paged decode"], attention.USES["paged prefill, causal"]
    assert {0, 1, attention.PAGE_SIZE, attention.PAGE_SIZE + 1} <= set(decode.lens_k)
    assert 0 in paged.lens_q
    assert any(q < k for q, k in zip(paged.lens_q, paged.lens_k, strict=True))


@pytest.mark.parametrize("name", attention.USES)
def test_attention_demo_poisons_what_no_request_reads(monkeypatch, name):
    """The op's operands give the oracle's result, and hold nothing else that is finite."""
    problem = attention.Problem.draw(SMALL_ATTENTION[name], "cpu")
    q, k, v = problem.padded
    if problem.use.is_paged:
        caches, table = problem.inputs[1:3], problem.inputs[3]
        k, v = (attention.reference.gather_pages(x, table, problem.tensors["seqlens_k"]) for x in caches)
    tokens = sum(problem.use.lens_k) * attention.KV_HEADS * attention.HEAD_DIM
    assert all(int(x.isfinite().sum()) == tokens for x in problem.inputs[1:3])
    exact = problem.attend(torch.float64, torch.float64)["out"]
    lens_q, lens_k = (torch.tensor(lens) for lens in (problem.use.lens_q, problem.use.lens_k))
    causal = not problem.use.is_decode
    again, _ = attention.reference.attend(q, k, v, lens_q=lens_q, lens_k=lens_k, causal=causal, out_dtype=torch.float64)
    assert torch.equal(exact.flatten(), again.flatten())
    assert problem.attend()["out"].dtype == torch.bfloat16


def test_each_timed_launch_follows_a_flush(monkeypatch):
    log, now_us = [], [0.0]

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at_us = now_us[0]
            log.append("record")

        def elapsed_time(self, end):
            return (end.at_us - self.at_us) / 1e3

    def spend(what, us):
        log.append(what)
        now_us[0] += us

    flush = types.SimpleNamespace(zero_=lambda: spend("flush", 100.0))
    monkeypatch.setattr(torch, "empty", lambda *args, **options: flush)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: types.SimpleNamespace(L2_cache_size=1 << 20))
    assert timing.median_us(lambda: spend("launch", 7.0)) == pytest.approx(7.0)
    assert log == ["launch"] + ["flush", "record", "launch", "record"] * timing.REPEATS


def doctor_text(capsys) -> str:
    assert main(["doctor"]) == 0
    return capsys.readouterr().out


def test_doctor_names_every_section_and_op(capsys):
    text = doctor_text(capsys)
    assert all(title in text for title in doctor.SECTIONS)
    assert all(label in text for family in FAMILIES for label in load(family).sample_ops("cuda"))
    assert torch.__version__ in text


def test_doctor_without_a_gpu_reports_the_refusal(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUTEFORGE_ARCH", raising=False)
    assert doctor.gpus()["GPUs"] == "torch sees none"
    assert doctor.ops()["CSA forward"].startswith("no: no GPU here; set CUTEFORGE_ARCH=sm_90a")
    monkeypatch.setenv("CUTEFORGE_ARCH", "sm_90a")
    assert doctor.ops()["CSA forward"].startswith("compiles for sm_90a")


@pytest.mark.parametrize(
    ("capability", "variable", "status"),
    [
        ((9, 0), "", "runs, compiled for sm_90a"),
        ((7, 0), "", "no: cuda:0: Toy GPU has compute capability 7.0"),
        ((8, 0), "sm_90a", "no: CUTEFORGE_ARCH=sm_90a, which compute capability 8.0 does not run"),
    ],
)
def test_doctor_says_for_each_gpu_what_runs(monkeypatch, capability, variable, status):
    facts = dict(zip(("major", "minor"), capability), name="Toy GPU", multi_processor_count=8, L2_cache_size=1 << 20)
    facts |= {"shared_memory_per_multiprocessor": 1 << 16, "shared_memory_per_block_optin": 1 << 16}
    properties = types.SimpleNamespace(**facts, total_memory=1 << 30)
    for name, value in (("is_available", True), ("device_count", 1), ("get_device_properties", properties)):
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capability)
    monkeypatch.setattr(arch.clusters, "reach_of", lambda index, num_sms, smem: num_sms)
    monkeypatch.setenv("CUTEFORGE_ARCH", variable)
    arch._device_arch.cache_clear()
    try:
        assert doctor.ops()["CSA forward on cuda:0"].startswith(status)
        assert doctor.gpus()["cuda:0"].startswith("Toy GPU, compute capability")
    finally:
        arch._device_arch.cache_clear()


def test_doctor_says_why_the_cache_directory_is_not_used(monkeypatch, tmp_path, capsys):
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    monkeypatch.setenv("CUTEFORGE_CACHE_DIR", str(open_to_all))
    rows = doctor.cache()
    assert rows["directory"] == str(open_to_all)
    assert rows["usable"].startswith("no: ")
    assert "mode 777" in rows["usable"]
    assert not logging.getLogger("cuteforge.runtime").handlers


def test_doctor_counts_entries_and_damaged_ones(monkeypatch, tmp_path):
    monkeypatch.setenv("CUTEFORGE_CACHE_DIR", str(tmp_path / "cache"))
    cache = disk_cache.DiskCache()
    for builder in (
        "cuteforge.families.rotary.kernel:build",
        "cuteforge.families.csa.compressor.forward:build",
        "mine:build",
    ):
        entry = cache.store({"builder": builder}, "symbol", {"kernel.o": b"code"})
    (entry.path / "kernel.o").write_bytes(b"other")
    rows = doctor.cache()
    assert rows["usable"] == "yes"
    assert rows["entries"].startswith("3, ")
    assert "1 damaged" in rows["entries"]
    assert all(rows[f"  {family}"].startswith("1, ") for family in ("rotary", "csa", "mine"))


def test_doctor_reports_a_cache_that_is_off(monkeypatch):
    monkeypatch.setenv("CUTEFORGE_DISK_CACHE", "0")
    assert doctor.cache() == {"disk cache": "off (CUTEFORGE_DISK_CACHE=0): kernels are kept in memory only"}


def test_doctor_lists_variables_that_are_set_and_bad_ones(monkeypatch):
    monkeypatch.setenv("CUTEFORGE_LOG", "debug")
    monkeypatch.setenv("CUTEFORGE_CHECK", "perhaps")
    monkeypatch.setenv("CUTE_DSL_KEEP", "ptx")
    rows = doctor.environment()
    assert rows["CUTEFORGE_LOG"] == "debug"
    assert rows["CUTEFORGE_CHECK"] == "no: CUTEFORGE_CHECK: wanted 1 or 0, got 'perhaps'"
    assert rows["CUTE_DSL_KEEP"] == "ptx"


def test_a_bad_log_level_is_warned_of_once_and_breaks_nothing():
    code = (
        "import sys\nfrom cuteforge.__main__ import main\nfrom cuteforge.cli import doctor\n"
        # what else doctor asks takes five seconds of imports
        "for name in {*doctor.SECTIONS} - {'environment'}:\n    doctor.SECTIONS[name] = dict\n"
        "print(main(['doctor']), file=sys.stderr)"
    )
    process = start(code, CUTEFORGE_LOG="loud")
    out, err = process.communicate(timeout=HANGS_AFTER_S)
    assert process.returncode == 0
    sentence = "CUTEFORGE_LOG: wanted one of debug, info, warning, error, got 'loud'"
    assert err.splitlines() == [f"{sentence}; it is ignored", "0"]
    assert sentence in out, "doctor lists it among the variables"


NONSENSE = """
import importlib, pkgutil, sys
import cuteforge
from cuteforge.__main__ import main
from cuteforge.cli import doctor, families
for module in pkgutil.walk_packages(cuteforge.__path__, "cuteforge."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except (ImportError, cuteforge.UnsupportedError) as error:  # not installed, or too old
            print("not here:", module.name, error, file=sys.stderr)
for name in cuteforge.__all__:
    getattr(cuteforge, name)
doctor.ops = doctor.SECTIONS["ops"] = dict
sys.exit(main(["doctor"]))
"""


def test_no_value_of_a_variable_breaks_the_import_or_doctor():
    """A call that reads one refuses it by name; the log level, which no call reads, is warned of."""
    process = start(NONSENSE, **{variable.name: "~no-such-user-or-word" for variable in env.VARIABLES})
    out, err = process.communicate(timeout=HANGS_AFTER_S)
    assert process.returncode == 0, err
    assert "ContractError" not in err
    for variable in env.VARIABLES:
        if variable.type != "text":
            assert f"{variable.name}: wanted" in out
    assert err.count("CUTEFORGE_LOG: wanted one of debug, info, warning, error") == 1


def test_doctor_says_that_the_compiler_does_not_import():
    """Installed, yet without its path file: the versions look fine, and every compile would fail."""
    code = (
        "import sys\n"
        "sys.path[:] = [path for path in sys.path if 'dsl_packages' not in path]\n"
        "from cuteforge.cli import doctor\n"
        "print(doctor.toolchain()['compiler'])\n"
    )
    assert "no: cutlass: the compiler does not import: No module named 'cutlass'" in (text := run(code))
    assert "PYTHONPATH" in text


def test_doctor_says_where_new_kernels_go_beside_a_directory_to_read_only(monkeypatch, tmp_path):
    monkeypatch.setenv("CUTEFORGE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    monkeypatch.setattr(disk_cache.os, "access", lambda path, mode: mode != os.W_OK or "own" in str(path))
    own = tmp_path / "own" / "cuteforge"
    assert doctor.cache()["usable"] == f"to read only: new kernels go to {own}"


@pytest.mark.parametrize(
    ("typed", "prog"),
    [("/usr/bin/cuteforge", "cuteforge"), ("/lib/cuteforge/__main__.py", "python -m cuteforge")],
)
def test_the_usage_names_what_was_typed(typed, prog, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [typed])
    assert main() == 0
    assert capsys.readouterr().out.startswith(f"usage: {prog} [")


def test_an_interrupt_is_one_line_and_the_status_of_a_shell(monkeypatch, capsys):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupt)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "cuteforge: interrupted\n"


def test_doctor_survives_a_machine_where_everything_is_missing(monkeypatch, capsys):
    def missing(*args, **options):
        raise UnsupportedError("nvidia-cutlass-dsl: not installed")

    real_import = builtins.__import__

    def no_torch(name, *args, **options):
        if name.partition(".")[0] in ("torch", "rich"):
            raise ImportError(f"No module named {name!r}")
        return real_import(name, *args, **options)

    monkeypatch.setattr(cutlass_compat, "toolchain_fingerprint", missing)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor, "DISTRIBUTIONS", ("no-such-package",))
    monkeypatch.setenv("CUTEFORGE_CACHE_DIR", "/proc/nowhere")
    monkeypatch.setenv("CUTEFORGE_DISK_CACHE", "maybe")
    monkeypatch.setattr(builtins, "__import__", no_torch)
    text = doctor_text(capsys)
    monkeypatch.undo()
    assert "no-such-package: not installed" in text
    assert "ImportError: No module named 'torch'" in text
    assert "nvidia-cutlass-dsl: not installed" in text
    assert "CUTEFORGE_DISK_CACHE: wanted 1 or 0" in text
    assert "none of cc, gcc, clang found" in text


@pytest.fixture
def scripts(monkeypatch, tmp_path):
    """A checkout with two benchmarks; the scripts that `bench` runs of it, and a function that lets one fail."""
    for name in ("harness", "bench_csa", "bench_rotary", "plots"):
        (tmp_path / f"{name}.py").write_text("")
    ran, failing = [], set()

    def run_script(command, env, check):
        name, arguments = command[1].removeprefix(f"{tmp_path}/"), command[2:]
        ran.append((name, *arguments))
        return types.SimpleNamespace(returncode=int(name in failing))

    monkeypatch.setattr(bench, "BENCHMARKS_DIR", tmp_path)
    monkeypatch.setattr(bench.subprocess, "run", run_script)
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: object())
    return types.SimpleNamespace(ran=ran, fail=failing.add)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], [("bench_csa.py",), ("bench_rotary.py",)]),
        (["rotary"], [("bench_rotary.py",)]),
        (["csa", "--quick", "--json", "out"], [("bench_csa.py", "--quick", "--out", "out")]),
        (["--plots", "drawn"], [("plots.py", "drawn")]),
        (["csa", "--plots", "drawn"], [("bench_csa.py",), ("plots.py", "drawn")]),
        (
            ["csa", "--json", "out", "--plots", "drawn"],
            [("bench_csa.py", "--out", "out"), ("plots.py", "drawn", "--results", "out")],
        ),
    ],
)
def test_bench_runs_what_is_asked_for_and_draws_what_it_wrote(scripts, options, expected):
    assert main(["bench", *options]) == 0
    assert scripts.ran == expected


def test_bench_goes_on_after_a_benchmark_that_fails_and_says_which(scripts, capsys):
    scripts.fail("bench_csa.py")
    assert main(["bench"]) == 1
    assert [name for name, *_ in scripts.ran] == ["bench_csa.py", "bench_rotary.py"]
    assert capsys.readouterr().err == "failed: bench_csa.py\n"


def test_bench_refuses_a_family_without_a_benchmark(scripts, capsys):
    assert main(["bench", "csa", "conv"]) == 1
    assert scripts.ran == []
    assert "families: wanted some of csa, rotary, got 'conv'" in capsys.readouterr().err


def test_bench_of_an_installed_package_says_what_is_missing(scripts, monkeypatch, tmp_path, capsys):
    (tmp_path / "harness.py").unlink()
    assert main(["bench"]) == 2
    assert "no benchmarks in" in capsys.readouterr().err


def test_bench_without_matplotlib_measures_nothing_first(scripts, monkeypatch, capsys):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "csa", "--plots", "drawn"]) == 2
    assert scripts.ran == []
    assert "cuteforge[bench]" in capsys.readouterr().err


def test_bench_finds_the_benchmarks_of_this_checkout():
    assert {"harness.py", "plots.py", "bench_csa.py"} <= {path.name for path in bench.BENCHMARKS_DIR.glob("*.py")}
