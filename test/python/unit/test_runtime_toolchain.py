"""What is predicted of the compiler without importing it agrees with the import; and what it makes can be loaded."""

import ctypes
import shutil

import pytest

from cuteforge.errors import UnsupportedError
from cuteforge.runtime import cutlass_compat
from helpers.process import run
from helpers.tiny_traits import TinyTraits


@pytest.fixture
def fresh(monkeypatch):
    """Nothing remembered of this machine's toolchain, and no cutlass imported as far as the prediction can see."""
    functions = (cutlass_compat._predicted_flavour, cutlass_compat.toolchain_fingerprint)
    for function in functions:
        function.cache_clear()
    monkeypatch.setattr(cutlass_compat, "_IR_MODULE", "not.imported")
    yield
    for function in functions:
        function.cache_clear()


def test_predicted_flavour_and_library_agree_with_the_real_import():
    out = run(
        "import sys\n"
        "from cuteforge.runtime import cutlass_compat as compat\n"
        "before, library = compat.cuda_flavour(), compat.runtime_library()\n"
        "assert not any(name in sys.modules for name in ('torch', 'cutlass', 'tvm_ffi'))\n"
        "import cutlass\n"
        "from cutlass.base_dsl.env_manager import get_prefix_dsl_libs\n"
        "assert compat.toolchain_fingerprint()['nvidia-cutlass-dsl'] == cutlass.__version__\n"
        "assert str(library) in get_prefix_dsl_libs('CUTE_DSL').split(':'), library\n"
        "print(before, compat.cuda_flavour(), cutlass.CUDA_VERSION.major)\n",
        CUTE_DSL_LIBS=None,
    )
    assert len(set(out.split())) == 1


@pytest.mark.parametrize(
    ("installed", "driver", "flavour"),
    [([12, 13], None, 13), ([12, 13], 13, 13), ([12, 13], 12, 12), ([12], 13, 12), ([12, 13], 14, 13)],
)
def test_flavour_is_the_newest_that_the_driver_supports(fresh, monkeypatch, installed, driver, flavour):
    monkeypatch.setattr(cutlass_compat, "_installed_flavours", lambda: installed)
    monkeypatch.setattr(cutlass_compat, "_driver_major", lambda: driver)
    assert cutlass_compat.cuda_flavour() == flavour


def test_no_flavour_for_the_driver_is_refused(fresh, monkeypatch):
    monkeypatch.setattr(cutlass_compat, "_installed_flavours", lambda: [13])
    monkeypatch.setattr(cutlass_compat, "_driver_major", lambda: 12)
    with pytest.raises(UnsupportedError, match="the driver supports CUDA 12"):
        cutlass_compat.cuda_flavour()


def test_flavour_and_code_changing_switches_are_in_the_fingerprint(fresh, monkeypatch):
    def fingerprint(driver, **environment):
        cutlass_compat._predicted_flavour.cache_clear()
        cutlass_compat.toolchain_fingerprint.cache_clear()
        monkeypatch.setattr(cutlass_compat, "_driver_major", lambda: driver)
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            return cutlass_compat.toolchain_fingerprint()

    monkeypatch.setattr(cutlass_compat, "_installed_flavours", lambda: [12, 13])
    plain = fingerprint(13)
    assert fingerprint(12) != plain
    assert fingerprint(13, CUTE_DSL_LINEINFO="1") != plain
    assert fingerprint(13, CUTE_DSL_LOG_TO_CONSOLE="1") == plain


def test_a_missing_package_is_named(fresh, monkeypatch):
    def missing(name):
        raise cutlass_compat.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(cutlass_compat.importlib.metadata, "version", missing)
    with pytest.raises(UnsupportedError, match="nvidia-cutlass-dsl: not installed"):
        cutlass_compat.toolchain_fingerprint()


@pytest.fixture(scope="module")
def compiled():
    from helpers import tiny_kernel

    build = tiny_kernel.build(TinyTraits())
    options = cutlass_compat.SPILLS_ARE_ERRORS
    return cutlass_compat.compile_host(build.host, build.args, arch="sm_90a", options=options)


def test_cubin_is_an_elf_image_for_cuda(compiled):
    cubin = cutlass_compat.cubin_of(compiled)
    assert cubin[:4] == b"\x7fELF"
    machine = int.from_bytes(cubin[18:20], "little")
    assert machine == 190, "EM_CUDA"


def test_object_and_library_offer_the_entry(compiled, tmp_path):
    obj, shared = tmp_path / "k.o", tmp_path / "k.so"
    cutlass_compat.export_object(compiled, obj, "my_entry")
    loaders = [(cutlass_compat.load_object, obj)]
    if cutlass_compat.link_shared(obj, shared):
        loaders.append((cutlass_compat.load_shared, shared))
        with pytest.raises(Exception, match="not_there"):
            cutlass_compat.load_shared(shared, "not_there")
    for load, path in loaders:
        # Its own argument check answers, so the entry is callable up to the launch.
        with pytest.raises(TypeError, match="Expects 4 parameters"):
            load(path, "my_entry")()


def test_a_linked_library_names_no_directory(compiled, tmp_path):
    obj, shared = tmp_path / "k.o", tmp_path / "k.so"
    cutlass_compat.export_object(compiled, obj, "my_entry")
    if cutlass_compat.link_shared(obj, shared) is None:
        pytest.skip("no linker")
    assert str(cutlass_compat._dsl_root()).encode() not in shared.read_bytes()
    assert str(tmp_path).encode() not in shared.read_bytes()


def test_no_linker_is_no_error(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert cutlass_compat.link_shared(tmp_path / "k.o", tmp_path / "k.so") is None


def test_a_failing_linker_is_no_error(tmp_path):
    (tmp_path / "k.o").write_bytes(b"not an object")
    assert cutlass_compat.link_shared(tmp_path / "k.o", tmp_path / "k.so") is None


def test_driver_query_survives_a_machine_without_driver(monkeypatch):
    def absent(name, *args, **kwargs):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert cutlass_compat._driver_major() is None
