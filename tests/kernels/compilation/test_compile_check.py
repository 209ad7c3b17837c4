import os
from pathlib import Path

import pytest

from qsync_opt.errors import NotReadyError
from qsync_opt.kernels.compilation import builder, compile_check, compiler
from qsync_opt.kernels.compilation import builder as build

UNIT = "quantize"


def compiled(log):
    """What the compiler was asked: lines of compiles by source and targets, and lines of links."""
    lines = log.read_text().splitlines()
    return [line for line in lines if line.startswith("-c ")], [line for line in lines if line.startswith("-shared")]


def test_every_source_is_compiled_for_every_target_and_linked(tools, tmp_path):
    (build.CSRC / "cuda" / "quantize.cpp").write_text("#if QSYNC_HAS_SM80\n#endif\n")
    assert compile_check.check((UNIT,), tmp_path, jobs=2) == 5 + 5 + 3 + 1
    compiles, links = compiled(tools)
    by_source = {}
    for line in compiles:
        by_source.setdefault(Path(line.split()[1]).name, []).append(line)
    assert {name: len(lines) for name, lines in by_source.items()} == {
        "quantize.cu": 1,  # all targets at once
        "quantize.cpp": 5,  # its host part depends on the target
        "quantize_sm80.cu": 1,
        "quantize_sm90_tiles.cu": 1,
    }
    for target in build.TARGETS:
        assert compiler.code(target) in by_source["quantize.cu"][0]
        assert sum(compiler.code(target) in line for line in by_source["quantize.cpp"]) == 1
    assert all(" -O3 " not in line and "--Ofast-compile=max" in line for line in compiles)
    assert [sum(compiler.code(target) in line for line in links) for target in build.TARGETS] == [1] * 5
    (sm90,) = (line for line in links if compiler.code("sm_90a") in line)
    assert [Path(part).name for part in sm90.split() if part.endswith(".o")] == [
        "quantize.cpp-sm_90a.o",
        "quantize.cu-sm_75-sm_80-sm_86-sm_89-sm_90a.o",
        "quantize_sm90_tiles.cu-sm_90a.o",
    ]


def test_a_source_that_does_not_compile_fails_the_check(tools, tmp_path, capsys):
    (build.CSRC / "cuda" / "quantize_broken_sm89.cu").write_text("?\n")
    with pytest.raises(NotReadyError, match=r"quantize_broken_sm89\.cu for sm_89 does not compile: .*what is this"):
        compile_check.check((UNIT,), tmp_path)
    assert builder.main(["--check", "--jobs", "2"]) == 1
    assert "does not compile" in capsys.readouterr().err


def test_an_older_compiler_gets_no_option_that_it_does_not_know(tools, tmp_path):
    nvcc = Path(os.environ["CUDA_HOME"]) / "bin" / "nvcc"
    nvcc.write_text(nvcc.read_text().replace("--Ofast-compile <level>", "--optimize <level>"))
    compile_check.check((UNIT,), tmp_path)
    compiles, _ = compiled(tools)
    assert compiles
    assert not any("Ofast" in line for line in compiles)


def test_everything_that_compiles_is_printed(tools, capsys):
    for unit in build.UNITS:
        (build.CSRC / "cuda" / f"{unit}_all.cu").write_text("//\n")
    assert builder.main(["--check"]) == 0
    assert capsys.readouterr().out == (
        "54 pairs of source and target compile; all units link for sm_75, sm_80, sm_86, sm_89, sm_90a\n"
    )
