import stat

import pytest
import torch

from qsync_opt.kernels.compilation import builder as build
from qsync_opt.kernels.compilation import compiler as toolchain


@pytest.fixture(autouse=True)
def _same_numbers_every_run():
    torch.manual_seed(0)


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A compiler that copies nothing but names, and logs what it was asked; a cache and sources of this test's own."""
    log = tmp_path / "log"
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo "release 13.0, V13.0.1"; exit 0; fi\n'
        'if [ "$1" = --help ]; then echo "--Ofast-compile <level>"; exit 0; fi\n'
        f'echo "$@" >> {log}\n'
        'for last; do [ "$previous" = -o ] && out="$last"; previous="$last"; done\n'
        'case "$*" in *broken*) echo "quantize_broken.cu(3): error: what is this" >&2; exit 2;; esac\n'
        'sleep 0.05; echo built > "$out"\n'
    )
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "cache"))
    sources = tmp_path / "csrc"
    (sources / "cuda").mkdir(parents=True)
    for name in ("quantize.cu", "quantize_sm80.cu", "quantize_sm90_tiles.cu", "other.cu", "rounding.cuh"):
        (sources / "cuda" / name).write_text(f"// {name}\n")
    monkeypatch.setattr(build, "CSRC", sources)
    toolchain.find_toolchain.cache_clear()
    yield log
    toolchain.find_toolchain.cache_clear()
