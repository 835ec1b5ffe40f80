"""`cache`: what it lists, what it removes, and that it finds damaged entries."""

from __future__ import annotations

import os
import time

import pytest

from cuteforge.__main__ import main
from cuteforge.cli import cache as command
from cuteforge.cli.families import split_builder
from cuteforge.runtime import cutlass_compat, disk_cache
from cuteforge.runtime.sources import kernel_sources

DAY_S = 24 * 3600


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("CUTEFORGE_CACHE_DIR", str(tmp_path / "cache"))
    return disk_cache.DiskCache()


@pytest.fixture
def store(cache):
    """A function that makes an entry, used so many days ago."""

    def make(builder: str, arch: str = "sm_90a", days: float = 0) -> disk_cache.Entry:
        key = {"builder": builder, "arch": arch, "traits": f"Traits(dims=[{days}])"}
        entry = cache.store(key, "symbol", {"kernel.o": b"code" * 256})
        used_at = time.time() - days * DAY_S
        os.utime(entry.path, (used_at, used_at))
        return entry

    return make


def damage(entry: disk_cache.Entry) -> None:
    (entry.path / "kernel.o").write_bytes(b"other")


def test_ls_shows_kernel_architecture_age_and_traits(store, capsys):
    store("cuteforge.families.csa.compressor.forward:build", days=3)
    store("cuteforge.families.rotary.kernel:build", arch="sm_80")
    assert main(["cache", "ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (forward,) = (line for line in lines if "compressor.forward" in line)
    assert all(text in forward for text in ("csa", "sm_90a", "3 days ago", "Traits(dims=[3])"))
    (rotary,) = (line for line in lines if "rotary" in line)
    assert "sm_80" in rotary
    assert lines.index(rotary) < lines.index(forward), "the one used last comes first"
    assert lines[-1].startswith("2 entries, 0.0 MiB in ")


def test_ls_of_an_empty_cache_is_one_line(cache, capsys):
    assert main(["cache", "ls"]) == 0
    assert capsys.readouterr().out == f"0 entries, 0.0 MiB in {cache.root}\n"


def test_ls_works_while_the_cache_is_switched_off(store, monkeypatch, capsys):
    store("mine:build")
    monkeypatch.setenv("CUTEFORGE_DISK_CACHE", "0")
    assert main(["cache", "ls"]) == 0
    assert "1 entry" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ([], set()),
        (["--older-than", "2"], {"new", "new sm_80"}),
        (["--arch", "sm_80"], {"new", "old"}),
        (["--older-than", "2.5", "--arch", "sm_80"], {"new", "old", "new sm_80"}),
        (["--arch", "sm_100a"], {"new", "old", "new sm_80", "old sm_80"}),
        (["--stale"], set()),
    ],
)
def test_clear_removes_what_the_options_choose(store, cache, options, left, capsys):
    for name, days in (("new", 0), ("old", 3)):
        store(name, days=days)
        store(f"{name} sm_80", arch="sm_80", days=days)
    assert main(["cache", "clear", *options]) == 0
    assert {entry.builder for entry in cache.ls()} == left
    assert f"removed {4 - len(left)} entr" in capsys.readouterr().out


def test_clear_without_options_removes_unreadable_entries_too(store, cache):
    (store("mine:build").path / "entry.json").write_text("{")
    assert main(["cache", "clear"]) == 0
    assert cache.paths() == []


def test_clear_names_what_it_could_not_remove(store, monkeypatch, capsys):
    entry = store("mine:build")
    monkeypatch.setattr(disk_cache.DiskCache, "_discard", lambda self, path: False)
    assert main(["cache", "clear"]) == 1
    assert f"could not be removed: {entry.path}" in capsys.readouterr().out


def test_clear_refuses_a_name_that_is_no_architecture_and_lists_those_that_are(store, cache, capsys):
    store("mine:build")
    for typo in ("sm_99", "sm90a", "sm_70"):
        with pytest.raises(SystemExit) as end:
            main(["cache", "clear", "--arch", typo])
        assert end.value.code == 2
        text = capsys.readouterr().err
        assert "argument --arch: " in text
        assert typo in text
    with pytest.raises(SystemExit):
        main(["cache", "clear", "--arch", "sm_99"])
    assert "sm_80, sm_86, sm_87, sm_89, sm_90, sm_100" in capsys.readouterr().err
    assert len(cache.paths()) == 1


def test_clear_says_what_there_is_where_nothing_is_for_an_architecture(store, capsys):
    store("mine:build")
    assert main(["cache", "clear", "--arch", "sm_90"]) == 0
    assert "no entry is for sm_90; there are some for sm_90a" in capsys.readouterr().out


def test_clear_stale_leaves_what_these_sources_and_this_toolchain_made(store, cache, capsys):
    store("stale:build")
    builder = "cuteforge.families.rotary.kernel:build"
    current = {
        "builder": builder,
        "sources": dict(kernel_sources(builder)),
        "toolchain": cutlass_compat.toolchain_fingerprint(),
    }
    for key in (current, {**current, "toolchain": {}}, {**current, "sources": {"cuteforge": "0"}}):
        cache.store(key, "symbol", {"kernel.o": b"code"})
    assert main(["cache", "clear", "--stale"]) == 0
    assert [entry.key for entry in cache.ls()] == [current]
    assert "removed 3 entries" in capsys.readouterr().out


def test_verify_of_sound_entries_is_status_0(store, capsys):
    store("mine:build")
    assert main(["cache", "verify"]) == 0
    assert "1 sound, 0 damaged" in capsys.readouterr().out


def test_verify_reports_a_wrong_digest_and_removes_it_when_asked_to(store, cache, capsys):
    kept, damaged = store("mine:build"), store("other:build")
    damage(damaged)
    assert main(["cache", "verify"]) == 1
    text = capsys.readouterr().out
    assert "1 sound, 1 damaged" in text
    assert f"damaged: {damaged.path.name}" in text
    assert damaged.path in cache.paths()
    assert main(["cache", "verify", "--remove"]) == 0
    assert f"damaged, removed: {damaged.path.name}" in capsys.readouterr().out
    assert cache.paths() == [kept.path]
    assert main(["cache", "verify"]) == 0


def test_a_directory_that_others_can_write_is_refused(monkeypatch, tmp_path, capsys):
    tmp_path.chmod(0o777)
    monkeypatch.setenv("CUTEFORGE_CACHE_DIR", str(tmp_path))
    assert main(["cache", "clear"]) == 1
    assert "the disk cache cannot be used" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["shrink"], ["clear", "--older-than", "0"], ["clear", "--older-than", "nan"]])
def test_wrong_options_are_usage_errors(options, capsys):
    with pytest.raises(SystemExit) as end:
        main(["cache", *options])
    assert end.value.code == 2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0 s"),
        (1, "1 s"),
        (119, "119 s"),
        (120, "2 min"),
        (7200, "2 hours"),
        (40 * 3600, "40 hours"),
        (3 * DAY_S, "3 days"),
    ],
)
def test_an_age_is_in_the_largest_unit_of_which_there_are_two(seconds, text):
    assert command.format_age(seconds) == text


@pytest.mark.parametrize(
    ("builder", "parts"),
    [
        ("cuteforge.families.csa.compressor.forward:build", ("csa", "compressor.forward")),
        ("cuteforge.families.attention.forward.kernel:build", ("attention", "forward.kernel")),
        ("mine:build", ("mine", "")),
        ("unknown", ("unknown", "")),
    ],
)
def test_a_builder_is_split_into_family_and_kernel(builder, parts):
    assert split_builder(builder) == parts
