"""Are the variance formulas true at the activations of real models? Predicted over measured, per operator."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from estimates import share_within
from subjects import Batch, subject_of, train_briefly
from torch import Tensor, nn
from work import Clock, significant

from qsync_opt.kernels import KernelOptions, ops
from qsync_opt.runtimes.torch.execution import device_formats
from qsync_opt.runtimes.torch.interception import OperatorCall, intercept
from qsync_opt.runtimes.torch.sensitivity import collect_statistics, full_precision, operand_slots, replace_operands
from qsync_opt.sensitivity import NoiseOptions, OperatorKind, OperatorStatistics, variances

RESULTS = ("output", "weight_gradient", "input_gradient")
LOW, HIGH = 0.9, 1.1
# With 4 draws, what is measured of ResNet-50's weight gradients scatters by more than 10 % at one operator of twenty.
_DRAWS = {"full": 16, "small": 3, "tiny": 2}


@dataclass(slots=True)
class Recorded:
    """A call of an operator in a training step, with the gradient of its result."""

    call: OperatorCall
    gradient: Tensor | None = None


def record(model: nn.Module, batch: Batch) -> dict[str, Recorded]:
    """First call of every adjustable operator in one full-precision training step."""
    found: dict[str, Recorded] = {}

    def handler(call: OperatorCall) -> Any:
        output = call.run()
        if call.op_type in ops.ADJUSTABLE and call.name not in found:
            entry = found[call.name] = Recorded(_detached(call))
            output.register_hook(lambda g: setattr(entry, "gradient", g.detach()))
        return output

    with full_precision(), intercept(model, handler):
        loss = model(*batch)
        torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return {name: entry for name, entry in found.items() if entry.gradient is not None}


def _detached(call: OperatorCall) -> OperatorCall:
    plain = tuple(x.detach() if isinstance(x, Tensor) else x for x in call.args)
    named = {key: x.detach() if isinstance(x, Tensor) else x for key, x in call.kwargs.items()}
    return replace(call, args=plain, kwargs=named)


def run(entry: Recorded, precision: str, options: KernelOptions, loss_scale: float = 1.0) -> list[Tensor]:
    """Result and gradients of the operands of a recorded call at a precision, FP32.

    The gradient comes multiplied by the loss scale, which is taken out of what it makes.
    """
    call, gradient = entry.call, entry.gradient
    slots = operand_slots(call.name, call.op_type, call.function, call.args, call.kwargs)
    leaves = [slot.tensor.detach().clone().requires_grad_() for slot in slots]
    args, kwargs = replace_operands(call.args, call.kwargs, slots, leaves)
    with full_precision():
        output = ops.execute(call.op_type, precision, call.function, args, kwargs, options)
        assert gradient is not None
        gradients = torch.autograd.grad(output, leaves, (gradient * loss_scale).to(output.dtype))
    return [output.detach().float(), *(g.float() / loss_scale for g in gradients)]


def dithered(x: Tensor) -> Tensor:
    """FP32 numbers rounded stochastically to BF16, which no kernel does: up or down at random, without bias."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + torch.randint_like(bits, 1 << 16)) & -(1 << 16)).view(torch.float32)


def run_dithered(entry: Recorded) -> list[Tensor]:
    """Result and gradients with all operands, the gradient and the results rounded to BF16 at random."""
    call, gradient = entry.call, entry.gradient
    slots = operand_slots(call.name, call.op_type, call.function, call.args, call.kwargs)
    leaves = [dithered(slot.tensor.detach()).requires_grad_() for slot in slots]
    args, kwargs = replace_operands(call.args, call.kwargs, slots, leaves)
    with full_precision():
        output = call.function(*args, **kwargs)
        assert gradient is not None
        gradients = torch.autograd.grad(output, leaves, dithered(gradient))
    return [dithered(output.detach()), *(dithered(g) for g in gradients)]


LOSS_SCALE = 65536.0
SCALED = f"FP16, loss scale {LOSS_SCALE:.0f}"
"""As ``torch.amp.GradScaler`` begins; plain FP16 loses the smallest gradients."""
DITHERED = "BF16, rounded at random"
"""Tells whether formulas or their assumption, that errors are independent, miss where BF16 rounds to nearest."""


def cases() -> list[tuple[str, str, NoiseOptions]]:
    """Name, precision and rounding of what is compared."""
    granular = (("tensor", "tensor"), ("tensor", "channel"), ("row", "channel"))
    found = [
        (f"INT8 {first}/{second}", "INT8", NoiseOptions(activation_granularity=first, weight_granularity=second))  # type: ignore[arg-type]
        for first, second in granular
    ]
    found.append(("INT8 tensor/channel, nearest", "INT8", NoiseOptions(rounding="nearest")))  # type: ignore[arg-type]
    eight = NoiseOptions(weight_granularity="tensor", backward="eight")  # type: ignore[arg-type]
    found.append(("INT8 tensor/tensor, backward too", "INT8", eight))
    found.append(("FP8", "FP8", replace(eight, backward="half")))
    found.append(("FP8, backward too", "FP8", eight))
    found += [("BF16", "BF16", NoiseOptions()), (DITHERED, "BF16", NoiseOptions()), ("FP16", "FP16", NoiseOptions())]
    found.append((SCALED, "FP16", NoiseOptions()))
    return found


def kernel_options(options: NoiseOptions, offset: int) -> KernelOptions:
    """What the kernels take for what the indicator was told."""
    return KernelOptions(
        rounding=str(options.rounding),
        activation_granularity=str(options.activation_granularity),
        weight_granularity=str(options.weight_granularity),
        backward=options.backward,
        offset=offset,
    )


def compare(
    entry: Recorded,
    found: OperatorStatistics,
    precision: str,
    options: NoiseOptions,
    device: torch.device,
    draws: int,
    dither: bool = False,
    loss_scale: float = 1.0,
) -> dict[str, float]:
    """Predicted over measured variance of the operator's results; results without error are left out."""
    formats = device_formats(device)
    predicted = variances(found, precision, formats[precision], options)
    exact = run(entry, "FP32", KernelOptions())
    repeats = draws if dither or precision in ("INT8", "FP8") else 1
    # A number between two others is rounded to the nearer one with half the squared error of rounding at random.
    scale = 0.5 if dither else 1.0
    sums = []
    for draw in range(repeats):
        chosen = kernel_options(options, draw)
        results = run_dithered(entry) if dither else run(entry, precision, chosen, loss_scale)
        pairs = zip(results, exact, strict=True)
        sums.append(torch.stack([(low - true).square().sum(dtype=torch.float64) for low, true in pairs]))
    totals = (torch.stack(sums).mean(0) * scale).tolist()
    lead = 1 if found.op_type == "embedding" else 0
    # Three operands (attention) have no weight; their gradients are counted as the input's.
    noises = (predicted.first_gradient, predicted.second_gradient, predicted.third_gradient)[lead:]
    ratios: dict[str, float] = {}
    if totals[0] > 0:
        ratios["output"] = predicted.output.total / found.calls / totals[0]
    sums = {"weight_gradient": [0.0, 0.0], "input_gradient": [0.0, 0.0]}
    owners = (found.first_parameter, found.second_parameter, None)[lead:]
    for noise, measured, owner in zip(noises, totals[1:], owners, strict=False):
        if noise is not None:
            pair = sums["input_gradient" if owner is None else "weight_gradient"]
            pair[0] += noise.total / found.calls
            pair[1] += measured
    return ratios | {name: pair[0] / pair[1] for name, pair in sums.items() if pair[1] > 0}


def rows(
    entries: Mapping[str, Recorded], model: nn.Module, batch: Batch, device: torch.device, draws: int, clock: Clock
) -> Iterator[dict[str, Any]]:
    """One row per case, with the ratios of all operators."""
    plain = collect_statistics(model, [batch])
    scaled = collect_statistics(model, [batch], loss_scale=LOSS_SCALE)
    # Random rounding has no error that repeats: what was measured of rounding to nearest does not belong to it.
    independent = replace(plain, operators=tuple(replace(operator, nearest={}) for operator in plain.operators))
    for name, precision, options in cases():
        dithered_case, loss_scale = name == DITHERED, LOSS_SCALE if name == SCALED else 1.0
        statistics_found = independent if dithered_case else scaled if name == SCALED else plain
        ratios: dict[str, dict[str, float]] = {}
        for operator, entry in entries.items():
            supported = ops.supports(entry.call.op_type, precision, device)
            if options.backward == "eight" and entry.call.op_type.startswith("conv"):
                supported = False  # runs backward in 16 bits, which is another case
            if dithered_case and statistics_found[operator].kind is not OperatorKind.PRODUCT:
                supported = False
            if supported and not clock.over():
                found = statistics_found[operator]
                ratios[operator] = compare(entry, found, precision, options, device, draws, dithered_case, loss_scale)
        if ratios:
            yield {"case": name, **summary(ratios), "ratios": significant(ratios)}


def summary(ratios: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Shares within the bounds."""
    every = {kind: [r[kind] for r in ratios.values() if kind in r] for kind in RESULTS}
    return {
        "operators": len(ratios),
        "within": {kind: share_within(values, LOW, HIGH) for kind, values in every.items() if values},
        "median": {kind: statistics.median(values) for kind, values in every.items() if values},
        "all_within": sum(all(LOW <= v <= HIGH for v in r.values()) for r in ratios.values()) / len(ratios),
    }


MODELS = ("bert", "resnet50")


def section(device: torch.device, scale: str, clock: Clock, names: Sequence[str] = MODELS) -> Iterator[dict[str, Any]]:
    """Records of the section, one per model and case."""
    for name in names:
        subject = subject_of(name, device, scale=scale)
        model = subject.model(0, device)
        train_briefly(subject, model, 3 if scale == "tiny" else 60)
        batch = subject.batch(10**6)
        entries = record(model, batch)
        for found in rows(entries, model, batch, device, _DRAWS[scale], clock):
            yield {"model": subject.name, "what": subject.what, **found}
