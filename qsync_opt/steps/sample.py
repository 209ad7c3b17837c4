"""One plan, observed: what each operator was given, delivered, kept and cost in a recorded training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qsync_opt.steps.memory_timeline import Block
from qsync_opt.steps.trace import StepSpans


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTensors:
    """What an operator keeps for the backward pass, and until when the program holds its result.

    ``inputs`` are positions among the operator's inputs whose storage is kept as it arrives; ``output`` says that the
    result is. ``result_bytes`` is the storage of the result, 0 if it lives in another's. ``root`` is the operator in
    whose storage the result lives. ``held_until`` is the operator during or after which the program let go of the
    result, "" if it held it beyond the forward pass.
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
        outputs: Format that each operator delivered; those that deliver none, or were not met, are missing.
        spans: Times, from a step that was traced without its memory.
        memory: The same step's accounting with changes of memory, from another step.
        kept: Per operator that was met.
        host_ns: Per phase, time on the host of steps that nobody traced; the median.
        iteration_ns: Median time of untraced steps that follow one another without waiting.
        resident_bytes: In use between two steps.
        peak_bytes: At most in use during an untraced step.
        latencies_ns: Of untraced steps that each began on an idle device.
        resting_ns: Time on the host of a step in which a plan of FP32 alone stands aside, as it does in training; 0 for
            other plans. ``iteration_ns`` is then of such a step too; all else is of a plan that does not stand aside,
            as those that have FP32 beside others.
        host_rounds_ns: Time on the host of a whole step, in each of the rounds that ``host_ns`` is the median of.
        graphs: Compiled graphs per pass, 0 if the model was not compiled. Where it was, ``kept`` is empty, and changes
            of memory are those up to the moment at which the passes need most.
        blocks: Memory of a compiled step, from when until when.
        host_unit_ns: Time on the host of a small fixed piece of work, around the untraced steps; 0 if it was not taken.
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
    latencies_ns: tuple[float, ...] = field(default=())
    host_unit_ns: float = 0.0
    resting_ns: float = 0.0
    host_rounds_ns: tuple[float, ...] = ()
    graphs: int = 0
    blocks: tuple[Block, ...] = ()
