"""Costs of a model's layers on this machine: random weights of its sizes, timed through the runtime itself.

A few layers of every scheme run the passes of a workload in turn, in a process like those of stages, and a clock around
each group, around the head and around the whole pass says what each takes; what is left over is what a pass costs by
itself. The first layer counts there: it computes what all layers of a pass share, such as the rotary angles. Serving
takes the sum of many passes, so means count, of passes that are spread over the time of measuring: a machine that
others share is slower for a second, then faster again. What passes between processes is measured on two stages that
compute next to nothing, and memory on two stages of the model's matrix sizes. Stages on one machine share its memory's
bandwidth, so other processes may compute the same passes meanwhile. On a card see `card_costs`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from qsync_opt.errors import ProblemError
from qsync_opt.runtimes.torch.serving.allocator import give_back_freed_memory, reuse_freed_memory
from qsync_opt.runtimes.torch.serving.card_costs import PassDifferences, ProcessMemory, card_memory
from qsync_opt.runtimes.torch.serving.config import DecoderConfig, config_from_json
from qsync_opt.runtimes.torch.serving.measuring import MemoryWatch, anonymous_kib
from qsync_opt.runtimes.torch.serving.packing import scheme_bits
from qsync_opt.runtimes.torch.serving.pipeline import Pipeline
from qsync_opt.runtimes.torch.serving.stage import StageModel, group_names
from qsync_opt.runtimes.torch.serving.steps import GREEDY, Step, pages_of
from qsync_opt.runtimes.torch.serving.weights import StateSource, open_model
from qsync_opt.runtimes.torch.serving.workers import LocalWorkers, StageError, Workers
from qsync_opt.serving import (
    KINDS,
    PhaseCosts,
    Plan,
    ServeModel,
    ServeWorkload,
    ServingProfile,
    Stage,
    Table,
    default_microbatches,
)

_KIB = 1024
_SCHEMES = ("W4", "W8", "W16", "W32")
_LAYERS = 4
"""Layers of the models that are timed, so many that their weights do not stay in the processor's nearest cache."""
_DECODE_PASSES = 4
"""Passes of decoding for one of prefilling."""
_LONG_TOKENS = 256
"""Prompts from which on two lengths are measured."""
_SMALL_LAYERS, _SMALL_VOCABULARY = 4, 4096
"""Of the model that the memory of a process is measured with."""
_LINK_PASSES = 60
_LINK_BATCHES, _SHORT_TOKENS = 10, 16
"""Passes through stages that compute next to nothing, and batches of as many new tokens."""


def serve_model(config: DecoderConfig, name: str) -> ServeModel:
    """The sizes of a model that can be run."""
    return ServeModel(
        name=name,
        layers=config.layers,
        hidden=config.hidden,
        inner=config.inner,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_size=config.head_size,
        vocabulary=config.vocabulary,
    )


def random_state(
    config: DecoderConfig, *, seed: int = 0, scale: float = 0.02, repeat: bool = False
) -> dict[str, torch.Tensor]:
    """Seeded random weights of a model, under the names of transformers; ``repeat``: all layers share the first's."""
    generator = torch.Generator().manual_seed(seed)
    q, kv, hidden = config.heads * config.head_size, config.kv_heads * config.head_size, config.hidden

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    norm = torch.zeros if config.gemma else torch.ones
    state = {"model.embed_tokens.weight": matrix(config.vocabulary, hidden), "model.norm.weight": norm(hidden)}
    if not config.tied:
        state["lm_head.weight"] = matrix(config.vocabulary, hidden)
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        if repeat and layer:
            first = "model.layers.0."
            state |= {name.replace(first, prefix): value for name, value in state.items() if name.startswith(first)}
            continue
        shapes = {
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (config.inner, hidden),
            "mlp.up_proj": (config.inner, hidden),
            "mlp.down_proj": (hidden, config.inner),
        }
        state |= {f"{prefix}{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        if config.attention_bias:
            state |= {f"{prefix}self_attn.{x}_proj.bias": torch.zeros(n) for x, n in (("q", q), ("k", kv), ("v", kv))}
        norms = ["input_layernorm", "post_attention_layernorm"]
        if config.gemma:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        state |= {f"{prefix}{name}.weight": norm(hidden) for name in norms}
        if config.head_norms:
            state |= {f"{prefix}self_attn.{x}_norm.weight": norm(config.head_size) for x in "qk"}
    return state


def profile_serving(
    model: str | Path | DecoderConfig,
    workload: ServeWorkload,
    *,
    name: str | None = None,
    device: str = "cpu",
    schemes: Sequence[str] | None = None,
    threads: int = 1,
    beside: Sequence[int] = (),
    head: str | None = None,
    dtype: torch.dtype | None = None,
    repeats: int = 6,
) -> ServingProfile:
    """Measure a model's layers on this machine's CPU or on a card, for micro-batches of a workload.

    Args:
        model: A model folder, a ``.gguf`` file, or a configuration; weights are random in any case.
        workload: The largest one that will be planned with the profile.
        name: Of the profile; by default the device's.
        device: ``cpu``, or torch's name of a card, such as ``cuda:0``, which nothing else may use meanwhile.
        schemes: Weight schemes to measure; by default W4, W8, W16, and W32 on a CPU.
        threads: Of a stage's process.
        beside: Threads of each further process that computes the same passes meanwhile, as the other stages of a
            pipeline on this machine will: they share its memory. On a CPU only.
        head: Weight scheme of the head, which the stages must then be given too; None: as ``dtype``.
        dtype: Type of hidden states and caches; by default FP32 on a CPU and BF16 on a card, as `serving run` has it.
        repeats: Times that every pass of prefilling is measured; of decoding, four times as often. Means count.

    Returns:
        The profile. It holds for stages that are alone on their cores.

    Raises:
        ProblemError: An argument is out of range, or there is no such device.
        UnsupportedError: The runtime has no such scheme, or does not run the model.
        StageError: A process could not start.

    Source: ours.
    """
    if repeats < 1 or threads < 1:
        raise ProblemError(f"repeats is {repeats} and threads is {threads}, but both must be at least 1")
    if any(count < 1 for count in beside):
        raise ProblemError(f"beside is {list(beside)}, but each process needs at least 1 thread; leave it out")
    is_card = device != "cpu"
    cards = [f"cuda:{k}" for k in range(torch.cuda.device_count())]
    if is_card and device not in cards:
        raise ProblemError(f"device is {device!r}, but this machine has {', '.join(['cpu', *cards])}")
    if is_card and (beside or threads != 1):
        raise ProblemError("threads and beside are of stages on a CPU; leave them out for a card")
    schemes = schemes or [scheme for scheme in _SCHEMES if scheme != "W32" or not is_card]
    dtype = dtype or (torch.bfloat16 if is_card else torch.float32)
    name = name or (torch.cuda.get_device_name(device) if is_card else "this CPU")
    for scheme in (*schemes, *([] if head is None else [head])):
        scheme_bits(scheme)  # refuses an unknown one
    path = None if isinstance(model, DecoderConfig) else str(model)
    if isinstance(model, DecoderConfig):
        config, label = model, model.kind
    else:
        config, label = open_model(model)[0], Path(model).name
    sizes = serve_model(config, label)
    arguments = (config, workload, tuple(schemes), dtype, head, device)
    with (
        _computing_beside(beside, arguments),
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool,
    ):
        try:
            measured = pool.submit(_measure, path, threads, arguments, repeats).result()
            if is_card:
                memory = pool.submit(_card_memory, sizes, workload, dtype, device).result()
            pass_s = pool.submit(_small_pass_s, config.hidden, workload, dtype, device).result()
        except BrokenProcessPool:
            raise StageError(
                "the process that measures has ended; there may be too little memory for a few layers in each scheme: "
                "profile fewer schemes"
            ) from None
    if not is_card:
        memory = process_memory(sizes, workload, threads=threads)
    link = link_costs(config.hidden, workload, pass_s, threads=threads, device=device, dtype=dtype)
    end_kib = -(-sizes.vocabulary * sizes.hidden * dtype.itemsize // _KIB)
    head_kib = end_kib if head is None else measured.head_kib
    scores_kib = -(-workload.prompts * sizes.vocabulary * dtype.itemsize // _KIB)
    return ServingProfile(
        name=name,
        source="measured",
        model=sizes,
        threads=None if is_card else threads,
        base_kib=memory.base_kib + (0 if is_card else measured.opening_kib),
        load_kib=memory.load_kib,
        cache_bytes_per_number=dtype.itemsize,
        weights_kib=measured.weights_kib,
        costs=measured.costs,
        workspace=memory.workspace,
        first_kib=end_kib,
        last_kib=head_kib + scores_kib,
        first=measured.first,
        last=measured.last.longer_by(link.last_ns),
        link_ns=link.ns,
        link_ns_per_kib=link.ns_per_kib,
        link_kib=link.memory_kib,
    )


class _Clocks:
    """Seconds of the parts of a stage's passes on a CPU, by a clock around each group and around the head."""

    def __init__(self, stage: StageModel) -> None:
        self._stage = stage
        groups: Any = stage.groups
        groups[:] = [_Clock(group) for group in groups]
        scores: Any = _Clock(stage.scores)
        stage.scores = scores  # type: ignore[method-assign]
        self._clocks: dict[str, list[_Clock]] = {"attn": groups[0::2], "mlp": groups[1::2], "head": [scores]}

    def seconds(self, step: Step) -> dict[str, float]:
        """Seconds of one group of each kind, of the head, and of all that a pass needs besides ("rest")."""
        began = time.perf_counter()
        self._stage.run(step).tolist()
        rest = time.perf_counter() - began
        took = {part: [clock.taken() for clock in clocks] for part, clocks in self._clocks.items()}
        seconds = {"head": took["head"][0]}
        rest -= seconds["head"]
        for kind in KINDS:
            seconds[kind] = statistics.mean(took[kind][1:])
            rest -= seconds[kind] * len(took[kind])
        return seconds | {"rest": rest}


class _Clock:
    """Something that is called, with the seconds of each call."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.seconds: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __call__(self, *arguments: Any) -> Any:
        began = time.perf_counter()
        result = self._call(*arguments)
        self.seconds.append(time.perf_counter() - began)
        return result

    def taken(self) -> float:
        """Seconds of all calls since the last time."""
        total, self.seconds = sum(self.seconds), []
        return total


@dataclasses.dataclass(frozen=True, slots=True)
class _Cell:
    """Rows of a micro-batch, and a length: of the prompts, or of what is cached while decoding."""

    rows: int
    length: int
    decodes: bool

    def step(self) -> Step:
        """The pass."""
        start, count = (self.length, 1) if self.decodes else (0, self.length)
        pages = pages_of(start + count)
        return Step(
            number=0,
            tokens=tuple(tuple(1 + (row + t) % 7 for t in range(count)) for row in range(self.rows)),
            starts=(start,) * self.rows,
            pages=tuple(tuple(range(1 + row * pages, 1 + (row + 1) * pages)) for row in range(self.rows)),
            choices=(GREEDY,) * self.rows,
        )


_Arguments = tuple[DecoderConfig, ServeWorkload, tuple[str, ...], torch.dtype, str | None, str]
"""Of a `_Bench`."""


class _Bench:
    """Models of a few layers, one for each scheme, and the seconds of the parts of their passes."""

    def __init__(
        self,
        config: DecoderConfig,
        workload: ServeWorkload,
        schemes: Sequence[str],
        dtype: torch.dtype,
        head: str | None = None,
        device: str = "cpu",
    ) -> None:
        self._schemes = tuple(schemes)
        middle = workload.prompt_tokens + workload.new_tokens // 2
        lengths = {False: [workload.prompt_tokens], True: [middle]}
        if workload.prompt_tokens >= _LONG_TOKENS:
            lengths = {decodes: [longest[0] // 4, *longest] for decodes, longest in lengths.items()}
        # Every micro-batch that is planned with by default, so that nothing has to be interpolated.
        parts = {part for option in default_microbatches(workload.prompts) for part in (option.prefill, option.decode)}
        self._rows = sorted({-(-workload.prompts // part) for part in parts})
        self._lengths = lengths
        self._cells = [_Cell(r, n, d) for d, line in lengths.items() for n in line for r in self._rows]
        few = dataclasses.replace(
            config,
            layers=_LAYERS,
            windows=config.windows[:1] * _LAYERS,
            rotary=config.rotary[:1] * _LAYERS,
            end_tokens=(),
        )
        source, names = StateSource(random_state(few, repeat=True)), group_names(_LAYERS)
        whole = Stage(device="here", groups=names)
        self._stages = {
            s: StageModel(few, source, whole, dict.fromkeys(names, s), dtype=dtype, head=head, device=device)
            for s in schemes
        }
        self._embedding_bytes = config.vocabulary * config.hidden * dtype.itemsize
        for stage in self._stages.values():
            stage.reserve(1 + workload.prompts * pages_of(middle + 1))
        watch = _Clocks if device == "cpu" else PassDifferences
        self._watches: dict[str, _Clocks | PassDifferences] = {s: watch(stage) for s, stage in self._stages.items()}
        self._seconds: dict[tuple[str, str, _Cell], list[float]] = {}
        for each in self._watches.values():
            for cell in self._cells:
                each.seconds(cell.step())  # the first pass of a shape takes longer

    def weights_kib(self, kind: str, scheme: str) -> int:
        """Memory of a group's weights."""
        group = self._stages[scheme].groups[KINDS.index(kind)]
        return -(-group.bytes // _KIB)

    def head_kib(self) -> int:
        """Memory of a head that has a scheme."""
        stage = next(iter(self._stages.values()))
        groups = sum(group.bytes for group in stage.groups)
        return -(-(stage.bytes - groups - self._embedding_bytes) // _KIB)

    def round(self, ended: Callable[[], bool] = lambda: False) -> None:
        """Every pass of every scheme in turn: a machine that is slower for a while is so for all of them."""
        for k in range(_DECODE_PASSES):
            for cell, scheme in itertools.product(self._cells, self._schemes):
                if ended():
                    return
                if cell.decodes or k == 0:
                    self._pass(cell, scheme)

    def _pass(self, cell: _Cell, scheme: str) -> None:
        seconds = self._watches[scheme].seconds(cell.step())
        # Two stages of a pipeline prepare a pass each, the first and the last.
        half = seconds.pop("rest") / 2
        seconds |= {"begin": half, "end": half + seconds.pop("head")}
        for part, value in seconds.items():
            self._seconds.setdefault((part, scheme, cell), []).append(value)

    def costs(self, part: str, scheme: str | None = None) -> PhaseCosts:
        """Means over passes of one part's times, over one scheme or all of them."""
        schemes = self._schemes if scheme is None else (scheme,)

        def table(decodes: bool) -> Table:
            def ns(rows: int, length: int) -> int:
                cell = _Cell(rows, length, decodes)
                seconds = statistics.mean(s for x in schemes for s in self._seconds[part, x, cell])
                return max(round(1e9 * seconds), 0)

            lengths = self._lengths[decodes]
            values = tuple(tuple(ns(rows, length) for length in lengths) for rows in self._rows)
            return Table(rows=tuple(self._rows), lengths=tuple(lengths), values=values)

        return PhaseCosts(prefill=table(False), decode=table(True))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """What a `_Bench` found out, and what the process has more once it has opened the model's file."""

    opening_kib: int
    weights_kib: Mapping[str, Mapping[str, int]]
    head_kib: int
    costs: Mapping[str, Mapping[str, PhaseCosts]]
    first: PhaseCosts
    last: PhaseCosts


def _measure(path: str | None, threads: int, arguments: _Arguments, repeats: int) -> _Measured:
    """Run the passes of a `_Bench` in this process, as a stage would."""
    torch.set_num_threads(threads)
    reuse_freed_memory()
    if arguments[-1] != "cpu":
        torch.cuda.set_device(arguments[-1])
    opening_kib = 0 if path is None else _opening_kib(path)
    bench, schemes = _Bench(*arguments), arguments[2]
    give_back_freed_memory()
    for _ in range(repeats):
        bench.round()
    return _Measured(
        opening_kib=opening_kib,
        weights_kib={kind: {s: bench.weights_kib(kind, s) for s in schemes} for kind in KINDS},
        head_kib=bench.head_kib(),
        costs={kind: {s: bench.costs(kind, s) for s in schemes} for kind in KINDS},
        first=bench.costs("begin"),
        last=bench.costs("end"),
    )


def _opening_kib(path: str) -> int:
    """Memory that a model's open file has, with what reads it; 0 where the system does not say."""
    try:
        before = anonymous_kib(os.getpid())
        opened = open_model(path)
        after = anonymous_kib(os.getpid())
    except FileNotFoundError:
        return 0
    del opened
    return max(after - before, 0)


@contextlib.contextmanager
def _computing_beside(beside: Sequence[int], arguments: _Arguments) -> Iterator[None]:
    """Processes, of so many threads each, that run the passes of a `_Bench` with these arguments."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for threads in beside:
            own, other = context.Pipe()
            process = context.Process(target=_compute_beside, args=(threads, arguments, other), daemon=True)
            process.start()
            other.close()
            pipes.append(own)
            processes.append(process)
        for pipe in pipes:
            try:
                pipe.recv()
            except EOFError:
                raise StageError(
                    "a process that was to compute beside the profile has ended; there may be too little memory for "
                    "two models of a few layers: profile without beside"
                ) from None
        yield
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join()


def _compute_beside(threads: int, arguments: _Arguments, pipe: connection.Connection) -> None:
    """Run passes until the other end of the pipe is closed."""
    torch.set_num_threads(threads)
    reuse_freed_memory()
    bench = _Bench(*arguments)
    give_back_freed_memory()
    with contextlib.suppress(BrokenPipeError, EOFError, KeyboardInterrupt):
        pipe.send("computing")
        while not pipe.poll():
            bench.round(pipe.poll)


class LinkCosts(NamedTuple):
    """What stages have beside their computation.

    Attributes:
        last_ns: Nanoseconds of a pass until its result is there and the next one begins, in the last stage.
        ns: Nanoseconds of a pass in every stage where there are several.
        ns_per_kib: The same for each KiB of its hidden states in FP32, in whatever type they are sent.
        memory_kib: Memory on a card where there are several; on a CPU it is part of a process's.
    """

    last_ns: int
    ns: int
    ns_per_kib: float
    memory_kib: int


def link_costs(
    hidden: int,
    workload: ServeWorkload,
    pass_s: float,
    *,
    threads: int = 1,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> LinkCosts:
    """Measure what stages have beside their computation.

    A model of next to no size, but in the width of its hidden states, generates in one stage and in two. What a pass
    takes longer there than ``pass_s``, its computation alone, is that of the last stage; what it takes longer in two
    stages, on the way to the second and back, is shared by the two. A card's second stage is on the next card, or on
    itself where it is the only one.

    Raises:
        StageError: A process could not start.
    """
    from qsync_opt.runtimes.torch.serving.sample import write_sample

    names = group_names(2)
    schemes = dict.fromkeys(names, "W32")
    devices = [device, _next_card(device)]
    large = _Cell(workload.prompts, workload.prompt_tokens, False)
    steps_s, prefills_s, memory = [], [], []
    with tempfile.TemporaryDirectory(prefix="qsync-serving-") as folder:
        write_sample(folder, _smallest_model(hidden))
        for parts in ((names,), (names[:2], names[2:])):
            stages = tuple(Stage(device=str(j), groups=part) for j, part in enumerate(parts))
            plan = Plan(microbatch=0, stages=stages, schemes=schemes)
            with Pipeline(
                folder, plan, threads=[threads] * len(parts), devices=devices[: len(parts)], dtype=dtype
            ) as pipeline:
                prefills_s.append(_pass_s(pipeline, large))
                steps_s.append(_decoding_s(pipeline, workload.prompts))
                pipeline.reserve(1)
                memory.append(max(pipeline.beside_bytes))
    kib = large.rows * large.length * hidden * 4 / _KIB
    step_ns, prefill_ns = (max(two - one, 0.0) * 1e9 / 2 for one, two in (steps_s, prefills_s))
    return LinkCosts(
        last_ns=round(max(steps_s[0] - pass_s, 0.0) * 1e9),
        ns=round(step_ns),
        ns_per_kib=max(prefill_ns - step_ns, 0.0) / kib,
        memory_kib=max(memory[1] - memory[0], 0) // _KIB if devices[0] != devices[1] else 0,
    )


def _smallest_model(hidden: int) -> dict[str, Any]:
    """The configuration of a model of next to no size, but in the width of its hidden states."""
    from qsync_opt.runtimes.torch.serving.sample import sample_config

    config = sample_config(layers=2, hidden=hidden, inner=32, heads=1, kv_heads=1, vocabulary=64)
    return config | {"head_dim": 16}


def _small_pass_s(hidden: int, workload: ServeWorkload, dtype: torch.dtype, device: str) -> float:
    """Seconds of a decoding pass of the smallest model in this process."""
    config, names = config_from_json(_smallest_model(hidden)), group_names(2)
    whole = Stage(device="here", groups=names)
    stage = StageModel(
        config, StateSource(random_state(config)), whole, dict.fromkeys(names, "W32"), dtype=dtype, device=device
    )
    return _pass_s(LocalWorkers([stage]), _Cell(workload.prompts, _SHORT_TOKENS // 2, True))


def _next_card(device: str) -> str:
    return device if device == "cpu" else f"cuda:{(torch.device(device).index + 1) % torch.cuda.device_count()}"


def _decoding_s(pipeline: Pipeline, rows: int) -> float:
    """The median time of a decoding pass in batches of short prompts, from one to the next."""
    seconds = []
    for _ in range(_LINK_BATCHES):
        run = pipeline.generate([[1]] * rows, _SHORT_TOKENS, prefill=1, decode=1)
        seconds.append(run.decode_s / (_SHORT_TOKENS - 1))
    return statistics.median(seconds[2:])  # of a card, the first capture


def _pass_s(workers: Workers, cell: _Cell) -> float:
    """The median time of one pass after another."""
    workers.reserve(1 + cell.rows * pages_of(cell.length + 1))
    seconds, step = [], cell.step()
    for _ in range(_LINK_PASSES if cell.decodes else _LINK_PASSES // 10):
        began = time.perf_counter()
        workers.submit(step)
        workers.result()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[len(seconds) // 10 + 1 :])


def process_memory(model: ServeModel, workload: ServeWorkload, *, threads: int = 1) -> ProcessMemory:
    """Memory that a stage's process holds beside weights, caches and ends, as measured on two stages.

    They load a Llama of the model's matrix sizes, but of few layers and a small vocabulary, and prefill a workload's
    prompts in micro-batches of more and more rows. What the allocator keeps of passes is part of it.

    Raises:
        StageError: A process could not start.
    """
    from qsync_opt.runtimes.torch.serving.sample import write_sample

    small, config = _small_model(model)
    names = group_names(small.layers)
    parts = (names[: len(names) // 2], names[len(names) // 2 :])
    plan = Plan(
        microbatch=0,
        stages=tuple(Stage(device=str(j), groups=part) for j, part in enumerate(parts)),
        schemes=dict.fromkeys(names, "W8"),
    )
    prompts, new_tokens = [[1] * workload.prompt_tokens] * workload.prompts, min(workload.new_tokens, 8)
    counts = _prompt_parts(workload)
    peaks = []
    with tempfile.TemporaryDirectory(prefix="qsync-serving-") as folder:
        write_sample(folder, config)
        with MemoryWatch() as loading:
            pipeline = Pipeline(folder, plan, threads=[threads] * 2, started=loading.add)
        with pipeline:
            for count in counts:
                with MemoryWatch(pipeline.pids) as watch:
                    for _ in range(3):
                        pipeline.generate(prompts, new_tokens, prefill=count)
                peaks.append(max(watch.peaks_kib.values()))
        weights = [size // _KIB for size in pipeline.weight_bytes]
    loads = [peak - held for peak, held in zip(loading.peaks_kib.values(), weights, strict=True)]
    cache_kib = small.layers // 2 * workload.prompts * small.cache_bytes(workload.prompt_tokens + new_tokens) // _KIB
    rows = tuple(-(-workload.prompts // count) for count in counts)
    lengths = tuple(sorted({1, workload.prompt_tokens}))
    more = tuple((0, max(peak - peaks[0], 0))[-len(lengths) :] for peak in peaks)
    base_kib = peaks[0] - max(weights) - cache_kib
    return ProcessMemory(
        base_kib=base_kib,
        load_kib=max(max(loads) - base_kib, 0),
        workspace=Table(rows=rows, lengths=lengths, values=more),
    )


def _prompt_parts(workload: ServeWorkload) -> list[int]:
    """Numbers of micro-batches of the prompts that are planned with, falling."""
    return sorted({option.prefill for option in default_microbatches(workload.prompts)}, reverse=True)


def _small_model(model: ServeModel) -> tuple[ServeModel, dict[str, Any]]:
    """A model of the same matrices, but of few layers and a small vocabulary, and its configuration."""
    from qsync_opt.runtimes.torch.serving.sample import sample_config

    small = dataclasses.replace(model, layers=_SMALL_LAYERS, vocabulary=min(model.vocabulary, _SMALL_VOCABULARY))
    config = sample_config(
        layers=small.layers,
        hidden=small.hidden,
        inner=small.inner,
        heads=small.heads,
        kv_heads=small.kv_heads,
        vocabulary=small.vocabulary,
    )
    config["head_dim"] = small.head_size
    return small, config


def _card_memory(model: ServeModel, workload: ServeWorkload, dtype: torch.dtype, device: str) -> ProcessMemory:
    """Memory on a card, in the process that has measured times: kernels are loaded."""
    gc.collect()  # graphs and what they call refer to each other
    config = config_from_json(_small_model(model)[1])
    return card_memory(
        config,
        random_state(config, repeat=True),
        workload,
        _prompt_parts(workload),
        dtype=dtype,
        device=torch.device(device),
    )
