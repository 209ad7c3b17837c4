"""How completely and how fast are known models captured? Every product counted twice, by module.

Each model of ``example_models`` (and two small ones with tied and shared modules) is
captured at full size. Beside it, ``torch.utils.flop_counter`` watches one plain forward pass: its products and
convolutions, calls and FLOPs, are compared module by module with those of the graph. Writes
``benchmarks/results/capture.json`` and prints a table.

    python benchmarks/capture_models.py [--small] [--threads N] [--output FILE] [NAME ...]
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parent))

from example_models import NAMES, Example, example

from qsync_opt.model import PRODUCTS, OpGraph, Role
from qsync_opt.runtimes.torch.capture import CapturedModel, capture_model

RESULTS = Path(__file__).parent / "results" / "capture.json"


class TiedWeights(nn.Module):
    """Token embedding and output projection share one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 64)
        self.body = nn.Linear(64, 64)
        self.head = nn.Linear(64, 1000, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.body(self.embedding(tokens)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class SharedModule(nn.Module):
    """One block called twice, once under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(64, 64), nn.GELU())
        self.again = self.block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.block(x)).sum()


def build(name: str, small: bool) -> Example:
    if name == "tied-weights":
        return Example(model=TiedWeights().train(), kwargs={"tokens": torch.arange(32).reshape(2, 16)})
    if name == "shared-module":
        return Example(model=SharedModule().train(), kwargs={"x": torch.randn(4, 64)})
    return example(name, small=small)


class CallCounter(FlopCounterMode):
    """Counts calls besides FLOPs; attention as its two products, whatever kernel the device would choose."""

    def __init__(self) -> None:
        super().__init__(display=False)
        self.calls = 0

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        self.calls += func_packet in self.flop_registry
        return super()._count_flops(func_packet, out, args, kwargs)


def counted_by_torch(model: nn.Module, kwargs: Mapping[str, Any]) -> tuple[int, dict[str, int]]:
    """Calls of products and convolutions in one forward pass, and their FLOPs by module path."""
    counter = CallCounter()
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        model(**kwargs)
    root = type(model).__name__
    totals: dict[str, int] = {}
    for path, counts in counter.get_flop_counts().items():
        if path != "Global":
            totals[path.removeprefix(root).removeprefix(".")] = sum(counts.values())
    return counter.calls, totals


def captured_by_module(graph: OpGraph) -> dict[str, int]:
    """FLOPs of the graph's operators by module path, those of inner modules included, as torch counts them."""
    totals: dict[str, int] = defaultdict(int)
    for operator in graph:
        parts = operator.module.split(".") if operator.module else []
        for depth in range(len(parts) + 1):
            totals[".".join(parts[:depth])] += operator.flops
    return totals


def measure(name: str, small: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    chosen = build(name, small)
    start = time.perf_counter()
    captured: CapturedModel = capture_model(chosen.model, (), chosen.kwargs, name=name)
    seconds = time.perf_counter() - start
    graph = captured.graph
    calls, by_torch = counted_by_torch(chosen.model, chosen.kwargs)
    by_graph = captured_by_module(graph)
    products = [o for o in graph if o.op_type in PRODUCTS]
    attentions = sum(o.op_type == "scaled_dot_product_attention" for o in products)
    differing = [path for path, flops in by_torch.items() if by_graph.get(path, 0) != flops]
    return {
        "model": name,
        "parameters": sum(p.spec.elements for p in graph.parameters),
        "operators": len(graph),
        "adjustable": len(graph.by_role(Role.ADJUSTABLE)),
        "dependent": len(graph.by_role(Role.DEPENDENT)),
        "fixed": len(graph.by_role(Role.FIXED)),
        "products_found": len(products) + attentions,
        "products_counted": calls,
        "flops_found": sum(o.flops for o in graph),
        "flops_counted": by_torch[""],
        "modules_compared": len(by_torch),
        "modules_differing": differing,
        "onnx_nodes": sum(len(o.onnx_nodes) for o in graph),
        "fingerprint": graph.fingerprint(),
        "seconds": round(seconds, 2),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | parameters | adjustable / dependent / fixed | products found / counted | GFLOPs found / counted "
        "| modules equal | ONNX nodes | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        equal = r["modules_compared"] - len(r["modules_differing"])
        lines.append(
            f"| {r['model']} | {r['parameters'] / 1e6:.1f} M | {r['adjustable']} / {r['dependent']} / {r['fixed']} "
            f"| {r['products_found']} / {r['products_counted']} "
            f"| {r['flops_found'] / 1e9:.3f} / {r['flops_counted'] / 1e9:.3f} "
            f"| {equal} of {r['modules_compared']} | {r['onnx_nodes']} | {r['seconds']:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    everything = (*NAMES, "tied-weights", "shared-module")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(everything)}; all if none is given")
    parser.add_argument("--small", action="store_true", help="two layers of a few channels")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = []
    for name in arguments.names or everything:
        rows.append(measure(name, arguments.small))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    report = {
        "format": "qsync-bench-capture/1",
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {arguments.threads} thread(s)",
        "small": arguments.small,
        "note": "one attention counts as two products; torch's counter ran with the kernel that is made of these two",
        "models": rows,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"\n{table(rows)}\n\nwritten to {arguments.output}")


if __name__ == "__main__":
    main()
