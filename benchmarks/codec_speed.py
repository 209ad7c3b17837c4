"""Time the codecs of gradients and of messages on a card, beside a copy's bandwidth.

python benchmarks/codec_speed.py [--tiny] [--output benchmarks/results/codec-speed.json]

Every figure is the median of replays of a captured graph that goes through inputs beyond the cache.
``share_of_copy`` is the time in which a kernel copies as many bytes as are read and written, measured in the same way,
over the time that is taken: starting a kernel is a fifth of what 26 MB take. ``--tiny`` runs small sizes on any device,
to check the benchmark itself.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent / "kernel_bench"))
from measuring import copies_beyond_cache, median_in_turn_s
from results_head import asked_row, results_head

from qsync_opt.gradients import scheme
from qsync_opt.io import write_json
from qsync_opt.kernels.gradients import Codec, Layout
from qsync_opt.kernels.messages import pack_rows, row_bytes, unpack_rows

HERE = Path(__file__).parent
MEGABYTES, WORKERS = 26, 2
SUM_SCHEMES, OWN_FORMS = ("sum8", "packed8", "sum4"), ("int8", "fp8", "bf16")
DIMS, WIDTHS, ENTRIES = (64, 128, 256, 500), (1, 2, 4, 8, 16), 100_000_000
ENCODE_US, ALL_US, GRADIENT_SHARE, MESSAGE_SHARE = 11, 35, 0.8, 0.7
"""What is asked: of a gradient of `MEGABYTES`, and of the bandwidth of a copy."""


def seconds(call: Callable[[Any], Any], inputs: Sequence[Any], device: torch.device) -> float:
    """Of one call, over all inputs in turn."""
    if device.type == "cuda":
        return median_in_turn_s(call, inputs)
    began = time.perf_counter()
    for each in inputs:
        call(each)
    return (time.perf_counter() - began) / len(inputs)


def copies(num_bytes: int, device: torch.device) -> int:
    """Number of inputs of so many bytes."""
    return copies_beyond_cache(num_bytes) if device.type == "cuda" else 2


@functools.cache
def copy_seconds(num_bytes: int, device: torch.device) -> float:
    """In which a kernel, a negation, reads and writes so many bytes in total."""
    elements = max(1, num_bytes // 8)
    pairs = [
        (torch.randn(elements, device=device), torch.empty(elements, device=device))
        for _ in range(copies(4 * elements, device))
    ]
    return seconds(lambda pair: torch.neg(pair[0], out=pair[1]), pairs, device)


def gradient_records(device: torch.device, elements: int) -> Iterator[dict[str, Any]]:
    """Passes of the codec over one gradient; ``moved_bytes`` are read and written."""
    codec, block = Codec(), 256
    gradients = [torch.randn(elements, device=device) for _ in range(copies(4 * elements, device))]
    blocks = -(-elements // block)

    def record(
        subject: str, what: str, call: Callable[[Any], Any], inputs: Sequence[Any], moved: int
    ) -> dict[str, Any]:
        spent = seconds(call, inputs, device)
        return {"part": "gradients", "subject": subject, "pass": what, "seconds": spent, "moved_bytes": moved}

    for name in SUM_SCHEMES:
        each = scheme(name)
        layout, levels = Layout(width=each.width, lanes=each.lanes, block=block), each.levels(WORKERS)
        scales = [codec.sum_scales(x, block) for x in gradients]
        pairs = list(zip(gradients, scales, strict=True))
        codes = [codec.encode_sum(x, s, levels, layout, 1) for x, s in pairs]
        wire, wide = codes[0].nbytes + 2 * blocks, 4 * elements
        yield record(name, "scales", lambda x: codec.sum_scales(x, block), gradients, wide + 2 * blocks)
        yield record(name, "encode", lambda x, o=(levels, layout): codec.encode_sum(*x, *o, 1), pairs, wide + wire)
        yield record(
            name,
            "decode",
            lambda x, o=(levels, WORKERS, layout, elements): codec.decode_sum(*x, *o),
            list(zip(codes, scales, strict=True)),
            wide + wire,
        )
    for form in OWN_FORMS:
        encoded = [codec.encode(x, form, block, 1) for x in gradients]
        wire = encoded[0].codes.nbytes + encoded[0].scales.nbytes
        received = [(torch.stack([e.codes] * WORKERS), torch.stack([e.scales] * WORKERS)) for e in encoded]
        yield record(form, "encode", lambda x, f=form: codec.encode(x, f, block, 1), gradients, 4 * elements + wire)
        yield record(form, "reduce", lambda x, f=form: codec.reduce(*x, f, block, 1), received, (WORKERS + 1) * wire)
        yield record(form, "decode", lambda x, f=form: codec.decode(x, f, block), encoded, 4 * elements + wire)


def message_records(device: torch.device, entries: int) -> Iterator[dict[str, Any]]:
    """Half of a graph's rows, in any order, packed and unpacked."""
    for dim in DIMS:
        nodes = entries // dim
        x, out = torch.randn((nodes, dim), device=device), torch.empty((nodes, dim), device=device)
        index = torch.randperm(nodes, device=device)[: nodes // 2]
        for bits in WIDTHS:
            wire = pack_rows(x, index, bits, 1)
            moved = len(index) * (4 * dim + row_bytes(dim, bits) + 8)

            def pack(each: Tensor, bits: int = bits, x: Tensor = x) -> Tensor:
                return pack_rows(x, each, bits, 1)

            def unpack(each: Tensor, bits: int = bits, wire: Tensor = wire, out: Tensor = out) -> None:
                unpack_rows(wire, each, out, bits)

            for what, call in (("pack", pack), ("unpack", unpack)):
                spent = seconds(call, [index], device)
                yield {
                    "part": "messages", "dim": dim, "bits": bits, "rows": len(index), "pass": what,
                    "seconds": spent, "moved_bytes": moved,
                }  # fmt: skip


def asked(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each figure that was set as a target."""
    rows = []
    of_sum8 = {r["pass"]: r for r in records if r.get("subject") == "sum8"}
    for what, passes, most in (("encode", ["encode"], ENCODE_US), ("all passes", [*of_sum8], ALL_US)):
        spent = round(1e6 * sum(of_sum8[each]["seconds"] for each in passes), 2)
        rows.append(asked_row(f"sum8, {MEGABYTES} MB, {what}", f"<= {most} us", spent, spent <= most))
    least = min(of_sum8.values(), key=lambda r: r["share_of_copy"])
    share = round(least["share_of_copy"], 3)
    what = f"sum8, {MEGABYTES} MB: least share of a copy's speed"
    rows.append(asked_row(what, f">= {GRADIENT_SHARE}", share, share >= GRADIENT_SHARE, least["pass"]))
    for what in ("pack", "unpack"):
        own = [r for r in records if r["part"] == "messages" and r["pass"] == what]
        least = min(own, key=lambda r: r["share_of_copy"])
        share = round(least["share_of_copy"], 3)
        note = f"rows of {least['dim']}, {least['bits']} bits"
        what = f"messages, {what}: least share of a copy's speed"
        rows.append(asked_row(what, f">= {MESSAGE_SHARE}", share, share >= MESSAGE_SHARE, note))
    return rows


def main() -> None:
    """Measure and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "codec-speed.json")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.tiny:
        parser.error("there is no card here; --tiny runs small sizes on the CPU")
    elements, entries = (10_000, 10_000) if options.tiny else (MEGABYTES * 1_000_000 // 4, ENTRIES)
    records = []
    for record in (*gradient_records(device, elements), *message_records(device, entries)):
        record["share_of_copy"] = copy_seconds(record["moved_bytes"], device) / record["seconds"]
        print(json.dumps(record), flush=True)
        records.append(record)
    card = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    head = results_head(card, {"torch": torch.__version__})
    write_json(options.output, {**head, "asked": asked(records), "records": records})


if __name__ == "__main__":
    main()
