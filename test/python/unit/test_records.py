"""What ran is recorded as it was: a selection is no pass, nothing that was left out goes unsaid, and the page of
versions shows the records."""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers import floor, gpu_record, parallel, recorder, torch_matrix

SUITE = Path(__file__).resolve().parents[1]

# A suite of two files: two passes, a failure, two skips.
RIGHT = """
import pytest

def test_right():
    pass

def test_also_right():
    pass

@pytest.mark.skip(reason="why not")
def test_skipped():
    pass
"""
WRONG = """
import pytest

def test_wrong():
    assert False

@pytest.mark.skip(reason="why not")
def test_skipped_too():
    pass
"""
CONFTEST = """
from helpers import recorder

def pytest_configure(config):
    config.addinivalue_line("markers", "few: some")
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(recorder.Deselected(config))
"""


@contextlib.contextmanager
def other_test_modules():
    """Files of tests that are imported meanwhile are found again afterwards as they were: those of the run here have
    common names."""

    def present():
        return {
            name: module
            for name, module in sys.modules.items()
            if name.split(".")[-1].startswith(("test_", "conftest"))
        }

    before = present()
    for name in before:
        del sys.modules[name]
    yield
    for name in present():
        del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """A folder of tests, and a function that runs pytest in it and returns the record of the run."""
    folder = tmp_path / "suite"
    (folder / "sub").mkdir(parents=True)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_right.py").write_text(RIGHT)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(gpu_record.TESTS))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)

    def run(*arguments: str) -> dict:
        plugin = recorder.Recorder(tmp_path / "record.json", tests=folder)
        with other_test_modules():
            # the plugin of unraisable exceptions collects garbage at its end: 1 s among the objects of a whole run
            options = ["-q", "-p", "no:cacheprovider", "-p", "no:unraisableexception", "-n", "0"]
            pytest.main([*options, *arguments], plugins=[plugin])
        return json.loads((tmp_path / "record.json").read_text())["runs"][-1]

    return SimpleNamespace(folder=folder, run=run)


def add_failing_file(suite) -> None:
    (suite.folder / "sub" / "test_wrong.py").write_text(WRONG)


@pytest.mark.parametrize("arguments", [(), (".",)], ids=["nothing", "the folder"])
def test_the_whole_suite_is_a_pass(suite, arguments):
    run = suite.run(*arguments)
    assert run["passed"] is True
    assert run["files"] == {"test_right.py": {"passed": 2, "skipped": 1}}
    assert run["skipped"] == {"why not": {"test_right.py": 1}}
    assert (run["selection"], run["deselected"], run["not_run"], run["failures"]) == ([], {}, [], [])
    assert (run["processes"], run["exit_status"], run["changed_while_running"]) == (1, 0, False)
    assert run["versions"]["pytest"] == pytest.__version__
    assert {"torch", "transformers", "nvidia-cutlass-dsl"} <= set(run["versions"])


def test_a_run_that_changes_the_committed_record_brings_the_page_up_to_date(suite, tmp_path, monkeypatch):
    """Else the second of two runs in a row fails: a test compares the page with the record."""
    page = tmp_path / "page.md"
    page.write_text("<!-- torch: begin -->\n<!-- torch: end -->\n")
    paths = {"PAGE": page, "RECORD": tmp_path / "torch.json", "GPU_RECORD": tmp_path / "record.json"}
    for name, path in paths.items():
        monkeypatch.setattr(torch_matrix, name, path)
    suite.run()
    assert f"| {importlib.metadata.version('torch')} |" in page.read_text()


def test_failures_are_named_and_no_pass(suite):
    add_failing_file(suite)
    run = suite.run()
    assert run["passed"] is False
    assert run["failures"] == ["sub/test_wrong.py::test_wrong"]
    assert run["files"]["sub/test_wrong.py"] == {"failed": 1, "skipped": 1}
    assert run["skipped"] == {"why not": {"sub/test_wrong.py": 1, "test_right.py": 1}}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-k", "also"), "-k also"),
        (("-m", "not few"), "-m not few"),
        (("--deselect", "test_right.py::test_right"), "--deselect ['test_right.py::test_right']"),
        (("--ignore", "sub"), "--ignore"),
        (("--ignore-glob", "*sub*"), "--ignore-glob"),
        (("test_right.py",), "test_right.py"),
        (("test_right.py::test_right",), "test_right.py::test_right"),
        (("sub",), "sub"),
        (("..",), ".."),  # pytest.ini is not found from there
        (("--maxfail", "1"), "--maxfail 1"),
    ],
    ids=lambda x: x[0] if isinstance(x, tuple) else "",
)
def test_a_selection_is_no_pass_and_is_named(suite, arguments, said):
    add_failing_file(suite)
    run = suite.run(*arguments)
    assert run["passed"] is False
    assert any(each.startswith(said) for each in run["selection"]), run["selection"]


def test_a_maxfail_that_stops_nothing_is_no_selection(suite):
    assert suite.run("--maxfail", "1")["passed"] is True


def test_files_that_did_not_run_are_listed(suite):
    add_failing_file(suite)
    run = suite.run("test_right.py")
    assert run["not_run"] == ["sub/test_wrong.py"]


def test_deselected_tests_are_counted_by_file(suite):
    assert suite.run("-k", "also")["deselected"] == {"test_right.py": 2}


def test_deselected_tests_reach_the_record_from_workers(suite):
    run = suite.run("-n", "2", "-k", "also")
    assert run["processes"] == 2
    assert run["deselected"] == {"test_right.py": 2}
    assert run["passed"] is False


def test_what_a_conftest_deselects_is_no_pass(suite):
    body = "    config.hook.pytest_deselected(items=items[1:])\n    del items[1:]\n"
    hook = f"\ndef pytest_collection_modifyitems(config, items):\n{body}"
    (suite.folder / "conftest.py").write_text(CONFTEST + hook)
    run = suite.run()
    assert (run["exit_status"], run["selection"]) == (0, [])
    assert run["passed"] is False


def test_files_that_skip_themselves_or_do_not_import_are_recorded(suite):
    skip = "import pytest\npytest.skip('transformers 5.17 is too old', allow_module_level=True)\n"
    (suite.folder / "test_skips.py").write_text(skip)
    run = suite.run()
    assert run["passed"] is True
    assert run["skipped"]["transformers 5.17 is too old"] == {"test_skips.py": 1}
    (suite.folder / "test_broken.py").write_text("import no_such_module\n")
    run = suite.run()
    assert run["files"]["test_broken.py"] == {"error": 1}
    assert run["passed"] is False


# The record of GPU runs, and its check.


def run_of(files, **changes):
    run = {
        "passed": True,
        "gpu": "G",
        "driver": "1",
        "date": "2026-12-01",
        "selection": [],
        "deselected": {},
        "not_run": [],
        "files": {name: {"passed": 3, "skipped": 1} for name in files},
    }
    return {**run, **changes}


@pytest.fixture
def tree(tmp_path):
    """Sources, tests, and a function that says what `check` says of a record with the given runs."""
    sources, tests, path = tmp_path / "package", tmp_path / "tests", tmp_path / "record.json"
    for file in (
        sources / "kernel.py",
        sources / "cli" / "demo.py",
        tests / "unit" / "test_a.py",
        tests / "helpers.py",
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x = 1\n")
    state = {"digests": gpu_record.digests(sources), "tests_digests": gpu_record.digests(tests)}

    def check(*runs):
        path.write_text(json.dumps({**state, "runs": runs}))
        return gpu_record.check(path, sources, tests)

    return SimpleNamespace(sources=sources, tests=tests, path=path, check=check, run=run_of(["unit/test_a.py"]))


def test_check_accepts_passes_of_the_present_sources(tree):
    assert gpu_record.check(tree.path)[1].startswith("GPU record: none")
    current, line = tree.check(tree.run)
    assert current and line == "GPU record: current (G, driver 1, 2026-12-01: 3 passed, 1 skipped)"
    current, line = tree.check(tree.run, tree.run)
    assert current and "2 runs in a row: 3 passed, 1 skipped; 3 passed, 1 skipped" in line


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"passed": False}, "is not a pass"),
        ({"gpu": None}, "saw no GPU"),
        ({"passed": False, "selection": ["-k rotary"]}, "a selection, not of the whole suite: -k rotary"),
        ({"passed": False, "deselected": {"unit/test_a.py": 3}}, "a selection, not of the whole suite: unit/test_a.py"),
        ({"passed": False, "not_run": ["unit/test_b.py"]}, "a selection, not of the whole suite: unit/test_b.py"),
    ],
)
def test_check_refuses_what_is_no_pass_of_the_whole_suite(tree, changes, said):
    for runs in ([{**tree.run, **changes}], [{**tree.run, **changes}, tree.run]):
        current, line = tree.check(*runs)
        assert not current and said in line


def test_check_notices_a_file_of_tests_that_the_run_did_not_have(tree):
    (tree.tests / "test_new.py").write_text("")
    current, line = tree.check(tree.run)
    assert not current and "not of the whole suite: test_new.py was added since" in line
    (tree.tests / "test_new.py").unlink()
    (tree.tests / "unit" / "test_a.py").unlink()
    current, line = tree.check(tree.run)
    assert not current and "not of the whole suite: unit/test_a.py is gone" in line


def test_check_names_what_changed_since(tree):
    (tree.sources / "cli" / "demo.py").rename(tree.sources / "cli" / "show.py")
    (tree.tests / "unit" / "test_a.py").write_text("x = 2\n")
    current, line = tree.check(tree.run)
    assert current
    assert line.startswith(
        "GPU record: current but for cli/demo.py, cli/show.py, test/python/unit/test_a.py, changed since"
    )
    (tree.sources / "kernel.py").write_text("x = 2\n")
    current, line = tree.check(tree.run)
    assert not current and line.startswith("GPU record: STALE, cli/demo.py, cli/show.py, kernel.py changed since")


CODE = 'def f(x: int = 2):\n    """Text."""\n    return f"{x} a" "b"  # why\n'


@pytest.mark.parametrize(
    ("before", "after", "counts"),
    [
        (CODE, CODE.replace("Text", "Other text").replace("why", "why not"), False),
        (CODE, "# Above.\n\n\n" + CODE.replace("(x: int = 2)", "(\n    x: int = 2,\n)"), False),
        (CODE, CODE.replace('    """Text."""\n', ""), False),
        (CODE, CODE.replace("2", "3"), True),
        (CODE, CODE.replace("2", "2.0"), True),
        (CODE, CODE.replace("2", "None"), True),
        (CODE, CODE.replace('"b"', '"c"'), True),
        (CODE, CODE.replace("int", "str"), True),
        (CODE, CODE.replace(' = 2', ''), True),
        ("if a:\n    b\nc\n", "if a:\n    b\n    c\n", True),
    ],
)  # fmt: skip
def test_a_record_is_of_code_not_of_comments(tree, before, after, counts):
    """A sentence in a comment needs no run on a GPU; a number or an indent does."""
    (tree.sources / "kernel.py").write_text(before)
    state = gpu_record.digests(tree.sources)
    (tree.sources / "kernel.py").write_text(after)
    assert gpu_record.changed_since(state, tree.sources) == ["kernel.py"] * counts


def test_a_digest_is_the_same_in_every_python():
    """The GPU machine has another one, and a record was stale there for a file that had not changed."""
    older, newer = (ast.parse('f"{x:<{n}}"') for _ in range(2))
    spec = newer.body[0].value.values[0].format_spec.values
    spec[:] = [spec[0], spec[1], ast.Constant("")]  # as in 3.12
    assert gpu_record._code(older.body[0].value) == gpu_record._code(newer.body[0].value)
    changed = ast.parse('f"{x:<{n} }"').body[0].value
    assert gpu_record._code(older.body[0].value) != gpu_record._code(changed)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"runs": []}', '{"runs": [{}], "digests": {}, "tests_digests": {}}', '{"passed": true}']
)
def test_check_says_that_a_record_is_unreadable(tree, text):
    tree.path.write_text(text)
    assert "unreadable" in gpu_record.check(tree.path, tree.sources, tree.tests)[1]


def test_a_gpu_record_keeps_two_runs_of_the_same_sources_and_tests():
    record = {}
    for number in range(3):
        record = recorder.add_gpu_run(record, {"number": number})
    assert record["runs"] == [{"number": 1}, {"number": 2}]
    for name in ("digests", "tests_digests"):
        assert recorder.add_gpu_run({**record, name: {"another.py": "1"}}, {"number": 3})["runs"] == [{"number": 3}]


# Versions of torch.


def torch_run(version, gpu=None, **changes):
    versions = {"torch": version, "transformers": "5.24.0", "python": "3.12.3"}
    return {**run_of(["a.py"], gpu=gpu, versions=versions), **changes}


def test_a_torch_record_holds_the_last_run_of_each_version_in_order():
    record = {}
    for run in (
        torch_run("2.15.0+cpu"),
        torch_run("2.9.1"),
        torch_run("2.11.0"),
        torch_run("2.11.0", date="2026-12-02"),
    ):
        record = recorder.add_torch_run(record, run)
    assert list(record) == ["2.9.1", "2.11.0", "2.15.0"]
    assert record["2.11.0"]["date"] == "2026-12-02"


def test_the_table_of_versions_shows_whole_runs_and_their_failures():
    failing = {"a.py": {"passed": 5, "failed": 2, "error": 1}}
    torch_record = {
        "2.11.0": torch_run("2.11.0", files=failing, passed=False),
        "2.12.0": torch_run("2.12.0", selection=["-k x"]),
    }
    gpu = {"runs": [torch_run("2.11.0", "G"), torch_run("2.13.0", "G")]}
    page = torch_matrix.rendered("a\n<!-- torch: begin -->\nold\n<!-- torch: end -->\nb\n", torch_record, gpu)
    assert page == (
        "a\n<!-- torch: begin -->\n\n"
        "| torch | transformers | Python | where | passed | failed | skipped | when |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |\n"
        "| 2.11.0 | 5.24.0 | 3.12.3 | CPU | 5 | 3 | 0 | 2026-12-01 |\n"
        "| 2.13.0 | 5.24.0 | 3.12.3 | G | 3 | 0 | 1 | 2026-12-01 |\n"
        "\n<!-- torch: end -->\nb\n"
    )
    assert torch_matrix.rendered(page, torch_record, gpu) == page
    with pytest.raises(ValueError, match="wanted the markers"):
        torch_matrix.rendered("no markers\n", torch_record, gpu)


def test_support_page_shows_the_records():
    """`python test/python/helpers/torch_matrix.py render` brings it up to date."""
    page = torch_matrix.PAGE.read_text()
    records = map(torch_matrix.read, (torch_matrix.RECORD, torch_matrix.GPU_RECORD))
    assert torch_matrix.rendered(page, *records) == page


def test_an_environment_with_another_torch_is_refused_before_anything_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(torch_matrix, "torch_of", lambda python: "2.13.0+cpu")
    monkeypatch.setattr(torch_matrix.subprocess, "run", lambda *_, **__: pytest.fail("something ran"))
    with pytest.raises(SystemExit, match=r"wanted an environment with torch 2\.11\.0, got 2\.13\.0"):
        torch_matrix.run("2.11.0", tmp_path / "python", tmp_path / "record.json", [])


def test_the_record_is_named_as_pytest_takes_a_file_that_exists(monkeypatch, tmp_path):
    """After a space, pytest takes it for one more path with tests, and does not find its settings."""
    ran = []
    monkeypatch.setattr(torch_matrix, "torch_of", lambda python: "2.11.0")
    monkeypatch.setattr(
        torch_matrix.subprocess, "run", lambda command, **_: ran.append(command) or SimpleNamespace(returncode=0)
    )
    torch_matrix.run("2.11.0", tmp_path / "python", record := tmp_path / "record.json", ["-x"])
    assert ran[0][1:] == ["-m", "pytest", "test/python", f"--torch-record={record}", "-x"]


def test_floors_are_those_of_the_project():
    assert floor.floor_of("transformers").count(".") >= 1
    with pytest.raises(ValueError, match="unpack"):
        floor.floor_of("no-such-package")


# How many processes.


def config_of(folder, arguments=(), plugins=("xdist",), **option):
    """What `choose_processes` reads of a configuration."""
    defaults = {
        "numprocesses": None,
        "dist": "no",
        "tx": [],
        "usepdb": False,
        "trace": False,
        "capture": "fd",
        "setupshow": False,
        "setuponly": False,
    }
    options = SimpleNamespace(**{**defaults, **option})
    return SimpleNamespace(
        option=options,
        args=[str(folder / argument) for argument in arguments] or [str(folder)],
        pluginmanager=SimpleNamespace(hasplugin=lambda name: name in plugins),
        getoption=lambda name, default=None: getattr(options, name, default),
    )


@pytest.fixture
def cores(monkeypatch):
    """Seven, and nothing said about threads."""
    monkeypatch.setattr(parallel, "default_processes", lambda: 7)
    monkeypatch.setenv("OMP_NUM_THREADS", "restored afterwards")
    monkeypatch.delenv("OMP_NUM_THREADS")


def test_whole_folders_run_in_parallel_with_one_thread_each(cores, tmp_path):
    config = config_of(tmp_path)
    parallel.choose_processes(config)
    assert (config.option.numprocesses, config.option.dist) == (7, "worksteal")
    assert os.environ["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    "options",
    [
        {"numprocesses": 0}, {"usepdb": True}, {"trace": True}, {"capture": "no"}, {"keyword": "x"}, {"markexpr":
        "multi_gpu"},
        {"lf": True}, {"collectonly": True}, {"arguments": ["test_x.py"]}, {"arguments": ["test_x.py::test_y"]},
    ],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_what_is_watched_or_selected_runs_in_one_process(cores, tmp_path, options):
    config = config_of(tmp_path, **options)
    parallel.choose_processes(config)
    assert not config.option.numprocesses
    assert config.option.dist == "no"
    assert "OMP_NUM_THREADS" not in os.environ


def test_without_xdist_and_in_its_workers_nothing_is_chosen(cores, tmp_path):
    worker = config_of(tmp_path)
    worker.workerinput = {}
    for config in (config_of(tmp_path, plugins=()), worker):
        parallel.choose_processes(config)
        assert config.option.numprocesses is None


def test_threads_that_are_given_stay(cores, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    parallel.choose_processes(config_of(tmp_path))
    assert os.environ["OMP_NUM_THREADS"] == "4"


def test_a_number_or_a_way_to_distribute_that_is_given_stays(cores, tmp_path):
    given = [({"numprocesses": 3}, (3, "worksteal")), ({"numprocesses": 3, "dist": "loadfile"}, (3, "loadfile"))]
    for options, wanted in given:
        config = config_of(tmp_path, **options)
        parallel.choose_processes(config)
        assert (config.option.numprocesses, config.option.dist) == wanted


@pytest.mark.parametrize(("cores", "gib", "processes"), [(1, 64, 0), (2, 64, 2), (64, 512, 15), (16, 6, 4), (16, 1, 0)])
def test_processes_are_as_many_as_cores_and_memory_allow(monkeypatch, cores, gib, processes):
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": (gib << 30) // 4096}
    monkeypatch.setattr(parallel.os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(parallel.os, "sysconf", sizes.__getitem__)
    assert parallel.default_processes() == processes


def test_a_record_that_hides_the_settings_is_refused(tmp_path):
    """Behind a blank an existing file counts as a path with tests, which moves the place where pytest looks for its
    settings."""
    suite = tmp_path / "test" / "python"
    suite.mkdir(parents=True)
    for name in ("conftest.py", "pytest.ini"):
        shutil.copy(SUITE / name, suite)
    (tmp_path / "pyproject.toml").touch()
    record = tmp_path / "test" / "record.json"
    record.write_text("{}")
    command, places = [sys.executable, "-m", "pytest", str(suite)], {**os.environ, "PYTHONPATH": str(SUITE)}
    refused = subprocess.run([*command, "--gpu-record", str(record)], capture_output=True, text=True, env=places)
    assert refused.returncode == pytest.ExitCode.USAGE_ERROR, refused.stdout
    assert "write --gpu-record=FILE, with an equals sign" in refused.stderr
    # the settings are looked for before the help is printed; a run would take digests of all sources
    taken = subprocess.run([*command, f"--gpu-record={record}", "--help"], capture_output=True, text=True, env=places)
    assert taken.returncode == 0, taken.stderr
    assert "share N minutes among the fuzz tests" in taken.stdout
