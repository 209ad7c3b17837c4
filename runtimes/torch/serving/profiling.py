"""Costs of a model's layers on this machine: random weights of its sizes, timed through the runtime itself.

A layer's time is the difference between a model of several layers and one of a single layer; that of its attention the
same with an MLP of next to no size. So what is measured is what serving does, passes and caches included.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from qsync_opt.errors import ProblemError
from qsync_opt.runtimes.torch.serving.config import DecoderConfig
from qsync_opt.runtimes.torch.serving.measuring import MemoryWatch
from qsync_opt.runtimes.torch.serving.pipeline import Pipeline, generate_here
from qsync_opt.runtimes.torch.serving.stage import StageModel, group_names
from qsync_opt.runtimes.torch.serving.weights import StateSource, open_model
from qsync_opt.serving import KINDS, PhaseCosts, Plan, ServeModel, ServeWorkload, ServingProfile, Stage, Table

_KIB = 1024
_LAYERS = 4
"""Layers of the larger of two models whose difference is timed."""
_TINY_INNER = 32
_DECODE_STEPS = 8
_LONG_TOKENS = 256
"""Prompts from which on two lengths are measured."""
_KEPT_BYTES = 4 << 20
_SMALL_LAYERS, _SMALL_VOCABULARY = 4, 4096
"""Of the model that the memory of a process is measured with."""
_LINK_NS, _LINK_NS_PER_KIB = 150_000, 600.0
"""A message between two processes of one machine over gloo: 0.15 ms and 1.7 GB/s."""

Progress = Callable[[int, int, str], None]


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


def random_state(config: DecoderConfig, *, seed: int = 0, scale: float = 0.02) -> dict[str, torch.Tensor]:
    """Seeded random weights of a model, under the names of transformers."""
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
    name: str = "this CPU",
    schemes: Sequence[str] = ("W4", "W8", "W16", "W32"),
    threads: int = 1,
    dtype: torch.dtype = torch.float32,
    repeats: int = 3,
    progress: Progress | None = None,
) -> ServingProfile:
    """Measure a model's layers on this machine's CPU, for micro-batches of a workload.

    Args:
        model: A model folder, a ``.gguf`` file, or a configuration; weights are random in any case.
        workload: The largest one that will be planned with the profile.
        name: Of the profile.
        schemes: Weight schemes to measure.
        threads: Of a stage's process.
        dtype: Type of hidden states and caches.
        repeats: The fastest of so many passes counts.
        progress: Called before every measurement.

    Returns:
        The profile. It holds for stages that are alone on their cores.

    Raises:
        ProblemError: An argument is out of range.
        UnsupportedError: The runtime has no such scheme, or does not run the model.

    Source: ours.
    """
    if repeats < 1 or threads < 1:
        raise ProblemError(f"repeats is {repeats} and threads is {threads}, but both must be at least 1")
    if isinstance(model, DecoderConfig):
        config, label = model, model.kind
    else:
        config, label = open_model(model)[0], Path(model).name
    sizes = serve_model(config, label)
    rows = sorted({1, max(workload.prompts // 4, 1), workload.prompts})
    middle = workload.prompt_tokens + workload.new_tokens // 2
    lengths, pasts = [workload.prompt_tokens], [middle]
    if workload.prompt_tokens >= _LONG_TOKENS:
        lengths, pasts = [workload.prompt_tokens // 4, *lengths], [middle // 4, *pasts]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _measured(
            _Bench(config, dtype, repeats, rows, lengths, pasts), sizes, workload, name, schemes, threads, progress
        )
    finally:
        torch.set_num_threads(before)


class _Bench:
    """Models of a configuration's layers, and the times of their passes."""

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        repeats: int,
        rows: Sequence[int],
        lengths: Sequence[int],
        pasts: Sequence[int],
    ) -> None:
        self.config, self.dtype, self.repeats = config, dtype, repeats
        self.rows, self.lengths, self.pasts = tuple(rows), tuple(lengths), tuple(pasts)

    def stage(self, scheme: str, *, layers: int, tiny: bool) -> StageModel:
        """A whole model of some layers, all of the first layer's kind."""
        c = self.config
        config = dataclasses.replace(
            c,
            layers=layers,
            inner=_TINY_INNER if tiny else c.inner,
            windows=c.windows[:1] * layers,
            rotary=c.rotary[:1] * layers,
            end_tokens=(),
        )
        state, names = random_state(config), group_names(layers)
        source = StateSource(state)
        return StageModel(
            config, source, Stage(device="here", groups=names), dict.fromkeys(names, scheme), dtype=self.dtype
        )

    def seconds(self, stage: StageModel, rows: int, tokens: int, new: int) -> float:
        """The fastest of some generations."""
        prompts = [[1 + (row + t) % 7 for t in range(tokens)] for row in range(rows)]
        best = float("inf")
        for _ in range(self.repeats):
            began = time.perf_counter()
            generate_here([stage], prompts, new)
            best = min(best, time.perf_counter() - began)
        return best

    def phases(self, stage: StageModel) -> tuple[list[list[float]], list[list[float]]]:
        """Seconds of prefill by rows and prompt length, and of one decode step by rows and tokens in the cache."""
        prefill = [[self.seconds(stage, rows, tokens, 1) for tokens in self.lengths] for rows in self.rows]
        decode = []
        for rows in self.rows:
            line = []
            for past in self.pasts:
                short = self.seconds(stage, rows, past, 1)
                line.append((self.seconds(stage, rows, past, 1 + _DECODE_STEPS) - short) / _DECODE_STEPS)
            decode.append(line)
        return prefill, decode

    def table(self, seconds: Any, lengths: Sequence[int]) -> Table:
        values = tuple(tuple(max(round(1e9 * value), 0) for value in line) for line in seconds)
        return Table(rows=self.rows, lengths=tuple(lengths), values=values)

    def costs(self, phases: Sequence[Any]) -> PhaseCosts:
        return PhaseCosts(prefill=self.table(phases[0], self.lengths), decode=self.table(phases[1], self.pasts))


def _measured(
    bench: _Bench,
    model: ServeModel,
    workload: ServeWorkload,
    name: str,
    schemes: Sequence[str],
    threads: int,
    progress: Progress | None,
) -> ServingProfile:
    weights: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}
    costs: dict[str, dict[str, PhaseCosts]] = {kind: {} for kind in KINDS}
    last: Any = None
    for done, scheme in enumerate(schemes):
        if progress is not None:
            progress(done, len(schemes), scheme)
        many, one = bench.stage(scheme, layers=_LAYERS, tiny=False), bench.stage(scheme, layers=1, tiny=False)
        source = StateSource(random_state(one.config))
        for kind in KINDS:
            inner = f"0.{kind}"
            alone = StageModel(
                bench.config, source, Stage(device="here", groups=(inner,)), {inner: scheme}, dtype=bench.dtype
            )
            # The first group brings the embedding; the rest is its own.
            ends = one.config.vocabulary * one.config.hidden * bench.dtype.itemsize if alone.first else 0
            weights[kind][scheme] = -(-(alone.bytes - ends) // _KIB)
        whole = [torch.tensor(phase) for phase in bench.phases(many)]
        single = [torch.tensor(phase) for phase in bench.phases(one)]
        del many
        layer = [(a - b).clamp_min(0) / (_LAYERS - 1) for a, b in zip(whole, single, strict=True)]
        slim = [torch.tensor(p) for p in bench.phases(bench.stage(scheme, layers=_LAYERS, tiny=True))]
        slim_one = [torch.tensor(p) for p in bench.phases(bench.stage(scheme, layers=1, tiny=True))]
        attention = [(a - b).clamp_min(0) / (_LAYERS - 1) for a, b in zip(slim, slim_one, strict=True)]
        attention = [torch.minimum(a, b) for a, b in zip(attention, layer, strict=True)]
        costs["attn"][scheme] = bench.costs([a.tolist() for a in attention])
        costs["mlp"][scheme] = bench.costs([(b - a).tolist() for a, b in zip(attention, layer, strict=True)])
        ends_s = [(a - b).clamp_min(0) for a, b in zip(single, layer, strict=True)]
        last = ends_s if last is None else [torch.minimum(a, b) for a, b in zip(last, ends_s, strict=True)]
        gc.collect()
    nothing = Table(rows=(1,), lengths=(1,), values=((0,),))
    end_kib = -(-model.vocabulary * model.hidden * bench.dtype.itemsize // _KIB)
    return ServingProfile(
        name=name,
        source="measured",
        model=model,
        threads=threads,
        base_kib=process_kib(model, workload, threads=threads),
        load_kib=0,
        cache_bytes_per_number=bench.dtype.itemsize,
        weights_kib=weights,
        costs=costs,
        workspace=nothing,
        first_kib=end_kib,
        last_kib=end_kib,
        first=PhaseCosts(prefill=nothing, decode=nothing),
        last=bench.costs([phase.tolist() for phase in last]),
        link_ns=_LINK_NS,
        link_ns_per_kib=_LINK_NS_PER_KIB,
    )


@contextlib.contextmanager
def steady_allocator() -> Iterator[None]:
    """Processes that start within give freed memory back soon, so that what they hold can be predicted.

    By itself glibc keeps up to 64 MiB, or nothing, as the order of requests has it. Other C libraries take no notice.
    """
    names = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, str(_KEPT_BYTES)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def process_kib(model: ServeModel, workload: ServeWorkload, *, threads: int = 1) -> int:
    """Memory that a stage's process holds beside weights, caches and ends, in KiB, as measured on two stages.

    They serve a workload with a Llama of the model's matrix sizes, but of few layers and a small vocabulary. What the
    allocator keeps of loading and of passes is part of it, so that a profile needs no further allowance.

    Raises:
        StageError: A process could not start.
    """
    from qsync_opt.runtimes.torch.serving.sample import sample_config, write_sample

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
    names = group_names(small.layers)
    parts = (names[: len(names) // 2], names[len(names) // 2 :])
    plan = Plan(
        microbatch=0,
        stages=tuple(Stage(device=str(j), groups=part) for j, part in enumerate(parts)),
        schemes=dict.fromkeys(names, "W8"),
    )
    prompts = [[1] * workload.prompt_tokens] * workload.prompts
    with tempfile.TemporaryDirectory(prefix="qsync-serving-") as folder:
        write_sample(folder, config)
        with steady_allocator():
            pipeline = Pipeline(folder, plan, threads=[threads] * 2)
        with pipeline, MemoryWatch(pipeline.pids) as watch:
            for _ in range(3):
                pipeline.generate(prompts, min(workload.new_tokens, 8), prefill=1)
        weights = max(pipeline.weight_bytes)
    cache = small.layers // 2 * workload.prompts * small.cache_bytes(workload.prompt_tokens + 8)
    return max(watch.peaks_kib.values()) - (weights + cache) // _KIB
