"""A recorded training step under one plan: inputs, results, kept tensors and cost of each operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qsync_opt.steps.memory_timeline import Block
from qsync_opt.steps.trace import StepSpans


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTensors:
    """Tensors that an operator keeps for the backward pass, and the lifetime of its result.

    Attributes:
        inputs: Positions of inputs whose storage is kept as it arrives.
        output: Whether the result is kept.
        result_bytes: Storage of the result; 0 if it lives in another's.
        root: Operator in whose storage the result lives.
        held_until: Operator during or after which the program released the result; "" if it held it beyond the forward
            pass.
    """

    inputs: tuple[int, ...] = ()
    output: bool = False
    result_bytes: int = 0
    root: str = ""
    held_until: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """A step of one worker under one plan.

    Attributes:
        name: Of the plan.
        precisions: Of the adjustable operators.
        outputs: Format of each operator's result; operators without one, or not observed, are missing.
        spans: Times, from a step that was traced without its memory.
        memory: Changes of memory in the same spans, from another step.
        kept: By observed operator.
        host_ns: By phase, median time on the host of untraced steps.
        iteration_ns: Median time of untraced steps that follow one another without waiting.
        resident_bytes: In use between two steps.
        peak_bytes: Most memory in use during an untraced step.
        latencies_ns: Of untraced steps that each began on an idle device.
        host_unit_ns: Time on the host of a small fixed piece of work, around the untraced steps; 0 if not measured.
        resting_ns: Time on the host of a step in which the runtime stands aside for a plan of FP32 alone, as it does in
            training; 0 for other plans. ``iteration_ns`` is then of such a step too; everything else is of the plan
            executed like others, because plans that contain FP32 besides other precisions are.
        host_rounds_ns: Time on the host of a whole step, in each round of the measurement of ``host_ns``.
        graphs: Compiled graphs per pass, 0 if the model was not compiled. For a compiled one, ``kept`` is empty, and
            changes of memory are those up to the peak of the passes.
        blocks: Memory of a compiled step with its lifetimes.
    """

    name: str
    precisions: Mapping[str, str]
    outputs: Mapping[str, str]
    spans: StepSpans
    memory: StepSpans
    kept: Mapping[str, KeptTensors]
    host_ns: Mapping[str, float]
    iteration_ns: float
    resident_bytes: int
    peak_bytes: int
    latencies_ns: tuple[float, ...] = ()
    host_unit_ns: float = 0.0
    resting_ns: float = 0.0
    host_rounds_ns: tuple[float, ...] = ()
    graphs: int = 0
    blocks: tuple[Block, ...] = ()
