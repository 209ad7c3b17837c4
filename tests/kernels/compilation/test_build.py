import concurrent.futures
import os
import re
import shutil
from pathlib import Path

import pytest

from qsync_opt.errors import NotInstalledError, NotReadyError, UnsupportedError
from qsync_opt.kernels import backend
from qsync_opt.kernels.compilation import builder as build
from qsync_opt.kernels.compilation import compiler, library
from qsync_opt.kernels.compilation import compiler as toolchain

UNIT = "quantize"


def test_a_source_is_compiled_for_the_targets_of_its_path(tools):
    path = build.build(UNIT, ("sm_80", "sm_90a"))
    assert path.read_text() == "built\n"
    lines = tools.read_text().splitlines()
    compiled = {Path(line.split()[1]).name: line for line in lines if line.startswith("-c ")}
    assert set(compiled) == {"quantize.cu", "quantize_sm80.cu", "quantize_sm90_tiles.cu"}
    sm80, sm90 = "-gencode=arch=compute_80,code=[sm_80,compute_80]", "-gencode=arch=compute_90a,code=sm_90a"
    assert sm80 in compiled["quantize.cu"]
    assert sm90 in compiled["quantize.cu"]
    assert sm90 not in compiled["quantize_sm80.cu"]
    assert sm80 not in compiled["quantize_sm90_tiles.cu"]
    assert "-DQSYNC_HAS_SM80=1" in compiled["quantize.cu"]
    assert sorted(p.name for p in path.parent.iterdir()) == sorted([path.name, path.with_suffix(".lock").name])


def test_the_cache_is_used_until_something_changes(tools, monkeypatch):
    first = build.build(UNIT, ("sm_80",))
    done = len(tools.read_text().splitlines())
    assert build.build(UNIT, ("sm_80",)) == first
    assert len(tools.read_text().splitlines()) == done
    (build.CSRC / "cuda" / "rounding.cuh").write_text("// changed\n")
    second = build.build(UNIT, ("sm_80",))
    assert second != first
    assert build.library_path(UNIT, ("sm_75",)) != second
    (build.CSRC / "options.py").write_text("# other options of the compiler\n")
    with monkeypatch.context() as patched:
        patched.setattr(compiler, "__file__", str(build.CSRC / "options.py"))
        assert build.library_path(UNIT, ("sm_80",)) != second
    assert build.library_path(UNIT, ("sm_80",)) == second
    toolchain.find_toolchain.cache_clear()
    nvcc = Path(os.environ["CUDA_HOME"]) / "bin" / "nvcc"
    nvcc.write_text(nvcc.read_text().replace("V13.0.1", "V13.0.2"))
    assert build.library_path(UNIT, ("sm_80",)) != second


def test_two_builders_at_once_build_once(tools):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: build.build(UNIT, ("sm_75",)), range(2)))
    assert paths[0] == paths[1]
    assert sum(line.startswith("-c ") for line in tools.read_text().splitlines()) == 1


def test_the_first_error_of_the_compiler_is_told(tools):
    (build.CSRC / "cuda" / "quantize_broken.cu").write_text("?\n")
    with pytest.raises(NotReadyError, match=r"quantize_broken\.cu for sm_75 does not compile: .*what is this"):
        build.build(UNIT, ("sm_75",))
    assert not list(build.cache_folder().glob("*.so"))
    assert build.main(["--unit", "quantize", "--target", "sm_75"]) == 1


def test_what_is_missing_is_named(tools, monkeypatch, tmp_path):
    with pytest.raises(UnsupportedError, match="unit quantize for sm_60"):
        build.build(UNIT, ("sm_60",))
    monkeypatch.setenv(compiler.JOBS_VARIABLE, "none")
    with pytest.raises(UnsupportedError, match=compiler.JOBS_VARIABLE):
        build.build(UNIT, ("sm_89",))
    monkeypatch.setenv(build.CACHE_VARIABLE, "/proc/nowhere")
    with pytest.raises(NotReadyError, match=build.CACHE_VARIABLE):
        build.build(UNIT, ("sm_89",))
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    if shutil.which("nvcc") is None and not Path("/usr/local/cuda/bin/nvcc").is_file():
        toolchain.find_toolchain.cache_clear()
        with pytest.raises(NotInstalledError, match="install the CUDA toolkit"):
            build.build(UNIT, ("sm_75",))


def test_an_older_torch_is_refused(tools, monkeypatch):
    monkeypatch.setattr(toolchain.importlib.metadata, "version", lambda name: "2.9.1+cu128")
    with pytest.raises(NotInstalledError, match=r"torch 2\.9\.1\+cu128 lacks"):
        toolchain.find_toolchain()


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        ((7, 5), "sm_75"),
        ((8, 0), "sm_80"),
        ((8, 7), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((12, 0), "sm_89"),
    ],
)
def test_targets_of_cards(capability, target, monkeypatch):
    assert build.target_of(capability) == target
    monkeypatch.setenv(build.TARGET_VARIABLE, "sm_80")
    assert build.target_of(capability) == "sm_80"
    monkeypatch.setenv(build.TARGET_VARIABLE, "sm_8")
    with pytest.raises(UnsupportedError, match="sm_8'"):
        build.target_of(capability)


def test_cards_without_a_target(monkeypatch):
    monkeypatch.delenv(build.TARGET_VARIABLE, raising=False)
    with pytest.raises(UnsupportedError, match=r"7\.0: kernels need 7\.5"):
        build.target_of((7, 0))


def test_the_cache_follows_the_users_folders(monkeypatch, tmp_path):
    monkeypatch.delenv(build.CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_folder() == tmp_path / "qsync-opt" / "kernels"


def test_every_unit_has_sources_and_no_source_is_orphaned():
    folder = build.CSRC / "cuda"
    names = [path.name for path in folder.iterdir() if path.suffix in (".cu", ".cpp")]
    assert all(any(name.startswith(unit) for unit in build.UNITS) for name in names)
    assert build.sources(UNIT, build.TARGETS)


def test_no_unit_includes_a_header_of_another():
    folder = build.CSRC
    for unit in build.UNITS:
        allowed = {path.name for path in build._headers(unit)}
        ours = {path.name for path in folder.rglob("*.cuh")} | {path.name for path in folder.rglob("*.h")}
        for path in [*build.sources(unit, build.TARGETS), *build._headers(unit)]:
            names = {Path(name).name for name in re.findall(r'#include "([^"]+)"', path.read_text())}
            if not path.name.startswith(build.UNITS) or path.name.startswith(unit):
                assert not (names & ours) - allowed, path.name


def test_without_a_card_the_plain_operators_run_and_say_so():
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a card")
    assert not library.activate("quantize")
    assert library.reason("quantize") == "torch sees no CUDA card"
    assert set(backend.explain("cpu")) == {"linear", "convolution", "batched", "product", "attention"}
