"""Memory of a stage's process: what loading needs beside the weights, and what passes ask the system for."""

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from qsync_opt.runtimes.torch.serving import (  # noqa: E402
    MemoryWatch,
    Pipeline,
    StageModel,
    group_names,
    open_model,
    pack,
    row_parts,
    sample_config,
    unpack,
    write_sample,
)
from qsync_opt.serving import Plan, Stage  # noqa: E402

MIB = 1 << 20
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="memory and page faults are read from Linux' /proc")


def plan_of(layers, cut, scheme="W8"):
    names = group_names(layers)
    parts = [part for part in (names[:cut], names[cut:]) if part]
    return Plan(
        microbatch=0,
        stages=tuple(Stage(device=str(k), groups=part) for k, part in enumerate(parts)),
        schemes=dict.fromkeys(names, scheme),
    )


def faults(pid):
    """Pages that a process had to wait for."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


def test_rows_come_a_part_at_a_time(tmp_path):
    data = sample_config(layers=1, hidden=1024, inner=1500, heads=8, kv_heads=2, vocabulary=64)
    _, source = open_model(write_sample(tmp_path, data))
    names = [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up")]
    shape, parts = row_parts(source, names)
    rows = [len(part) for part in parts]
    assert shape == (3000, 1024) and sum(rows) == 3000 and len(rows) > 4
    assert all(count % 64 == 0 for count in rows[:-1]) and 4 * 1024 * max(rows) <= 2 * MIB
    both = torch.cat([source.read(name) for name in names])
    assert torch.equal(torch.cat([*row_parts(source, names)[1]]), both)
    stage = StageModel(*open_model(tmp_path), Stage(device="here", groups=("0.mlp",)), {"0.mlp": "W8"})
    assert torch.equal(unpack(stage.groups[0].gate_up), unpack(pack(both, "W8")))


@on_linux
def test_loading_a_large_head_needs_little_beside_what_it_holds(tmp_path):
    data = sample_config(layers=1, hidden=256, inner=64, heads=4, kv_heads=1, vocabulary=131072)
    (tmp_path / "config.json").write_text(json.dumps(data))
    folder = write_sample(tmp_path, {**data, "tie_word_embeddings": True})
    with MemoryWatch(every_s=0.002) as loading:
        pipeline = Pipeline(str(folder), plan_of(1, 1), head="W8", started=loading.add)
    with pipeline, MemoryWatch(pipeline.pids) as serving:
        pipeline.generate([[1, 2]], 2)
    head_mib = 4 * 131072 * 256 // MIB  # 128 in FP32, 33 as it is held
    for pid, held in zip(pipeline.pids, pipeline.weight_bytes, strict=True):
        assert held > head_mib * MIB // 4
        assert (loading.peaks_kib[pid] - serving.peaks_kib[pid]) / 1024 < head_mib / 4


@on_linux
def test_passes_use_memory_again_that_earlier_ones_freed(tmp_path, monkeypatch):
    # As a system may be set up: what is freed goes back at once.
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.setenv(name, str(4 * MIB))
    folder = write_sample(tmp_path, sample_config(layers=1, hidden=256, inner=4096, heads=4, kv_heads=1, vocabulary=64))
    prompts = [[1 + t % 7 for t in range(256)]] * 8  # 8 MiB of gate and up for each
    with Pipeline(str(folder), plan_of(1, 2)) as pipeline:
        pages = []
        for count in (1, 1, 1, 1, 1, 8):  # other pages of caches: what passes had goes back, and comes once more
            before = faults(pipeline.pids[0])
            pipeline.generate(prompts[:count], 1, prefill=count)
            pages.append(faults(pipeline.pids[0]) - before)
    # Where what is freed goes back, each pass asks for 0.9 times the first one's pages, and eight prompts for 7 times.
    assert min(pages[1:5]) < pages[0] / 2  # not in each: a tensor may not fit between others
    assert pages[5] < 4 * pages[0]
