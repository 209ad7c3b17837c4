"""Figures of single kernels, of layers and models made of them, and of what the host takes."""

from __future__ import annotations

import itertools
import statistics

from results_pages import Record, span
from runtime_figures import NOT_MEASURED


def kernel_figures(sections: Record) -> dict[str, str]:
    """Ratios of speed on the whole card; geometric means as the benchmark formed them."""
    found = {"kernels.hardware": sections["product"]["hardware"], "kernels.date": sections["product"]["date"]}
    for record in sections["product"]["records"]:
        if "summary" in record and record["multiprocessors"] == 132:
            implementation, ratio = record["summary"].split(": ")
            name = implementation.split()[1].lower() + ("-tensor" if "per tensor" in implementation else "")
            place = {"times_bf16": "", "times_rival": "-rival", "times_row_scaled_rival": "-row-rival"}[ratio]
            found[f"kernels.product.{name}{place}"] = f"{record['geometric_mean_mlp']:.2f}"
            found[f"kernels.product.{name}{place}.all"] = f"{record['geometric_mean_all']:.2f}"
            found[f"kernels.product.{name}{place}.least"] = f"{record['smallest']:.2f}"
            found["kernels.product.shapes"] = str(record["shapes"][1])
    for record in sections["convolution"]["records"]:
        if record.get("device") == "whole card" and "geometric_mean_of_23_shapes" in record:
            found.setdefault("kernels.convolution", f"{record['geometric_mean_of_23_shapes']:.2f}")
            found.setdefault("kernels.convolution.layers", f"{record['geometric_mean_of_53_layers']:.2f}")
            found.setdefault("kernels.convolution.least", f"{record['least']:.2f}")
    layers = [r for r in sections["layer"]["records"] if "speed_up" in r]
    found["kernels.layer"] = span(
        (r["speed_up"] for r in layers if r["implementation"].endswith("one operation")), ".2f"
    )
    found["kernels.layer-half"] = span((r["speed_up"] for r in layers if "BF16 backward" in r["implementation"]), ".2f")
    found |= _kernel_layers(sections)
    trained = sections.get("trained_convolution", {"records": ()})["records"]
    for name, ending in (("half", ", INT8"), ("eight", ", gradients in INT8")):
        ratios = [record["ratio"] for record in trained if record["implementation"].endswith(ending)]
        found[f"kernels.trained.{name}"] = f"{span(ratios, '.2f')} x" if ratios else NOT_MEASURED
    copies = [
        r["share_of_copy"]
        for r in sections["quantize"]["records"]
        if "share_of_copy" in r and "multiprocessors" not in r
    ]
    found["kernels.quantize"] = f"{100 * min(copies):.0f} to {100 * max(copies):.0f} %"
    return found


def _kernel_layers(sections: Record) -> dict[str, str]:
    """Linear-GELU-Linear as one operation with weights in BF16, and whole models; what no run has reached says so."""
    sizes = ("large", "small", "large-partition", "small-partition")
    names = [f"kernels.{section}.{size}" for section in ("layer", "peer") for size in sizes]
    found = dict.fromkeys((f"{n}{end}" for n in names for end in ("", ".int8", ".fp8")), NOT_MEASURED)
    for section in ("layer", "peer"):
        for record in sections.get(section, {"records": ()})["records"]:
            precision, _, form = record["implementation"].lower().partition(", ")
            if form != "one operation" or record.get("weights", "BF16") != "BF16":
                continue
            size = "large" if record["shape"][1] == 4096 else "small"
            name = f"kernels.{section}.{size}{'-partition' if 'multiprocessors' in record else ''}"
            found[f"{name}.{precision}"] = f"{record['speed_up']:.2f}"
            if precision == "fp8" and "times_torchao_tensorwise" in record:
                found[name] = f"{record['times_torchao_tensorwise']:.2f}"
    models = [record for record in sections["model"]["records"] if "seconds" in record]
    for how in ("eager", "graph", "compiled"):
        gains = [record["speed_up"] for record in models if record["how"] == how and "speed_up" in record]
        found[f"kernels.model.{how}"] = f"{span(gains, '.2f')} x" if gains else NOT_MEASURED
        found[f"kernels.model.{how}.mean"] = f"{statistics.geometric_mean(gains):.2f} x" if gains else NOT_MEASURED
        for width, precision in itertools.product(("768", "2048"), ("bf16", "int8", "fp8")):
            found[f"kernels.model.{width}.{how}.{precision}"] = NOT_MEASURED
    for record in models:
        width = record["model"].split("width ")[1].split(",")[0]
        gain = f", {record['speed_up']:.2f} x" if "speed_up" in record else ""
        name = f"kernels.model.{width}.{record['how']}.{record['precision'].split()[0].lower()}"
        found[name] = f"{1e3 * record['seconds']:.1f} ms{gain}"
    return found


def host_figures(sections: Record) -> dict[str, str]:
    """Whole steps, launched by the host and captured; ``before`` is of the code that came before."""
    ways = ("bf16-autocast", "fp16-autocast", "plan-bf16", "plan-fp16", "plan-int8", "plan-fp8")
    found = {
        f"host.{model}.{how}.{way}": NOT_MEASURED
        for model, how, way in itertools.product(("bert-base", "gpt-124m"), ("eager", "graphs", "before"), ways)
    }
    for section, suffix in (("steps", ""), ("steps (before)", "before")):
        for record in sections[section]["records"]:
            way = record["way"].lower().replace(" ", "-")
            if "step_ms" in record:
                found[f"host.{record['model']}.{suffix or record['how']}.{way}"] = f"{record['step_ms']:.1f} ms"
    return found
