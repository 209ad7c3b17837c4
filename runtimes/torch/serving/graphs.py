"""Decoding passes of a stage as CUDA graphs, one by precision and number of sequences and of pages, both rounded up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from qsync_opt.runtimes.torch.serving.steps import Layout, Precision, Step, pages_of
from qsync_opt.runtimes.torch.support import capture_stream, capturing, without_cudnn_attention

_LEAST_PAGES = 8
Call = Callable[[torch.Tensor, Layout], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    graph: torch.cuda.CUDAGraph
    x: torch.Tensor
    layout: Layout
    result: torch.Tensor


def rounded_up(value: int, least: int = 1) -> int:
    """The next power of two, at least ``least``."""
    return max(least, 1 << (value - 1).bit_length())


class DecodeGraphs:
    """Captures a stage's decoding when a size comes up first and replays it afterwards.

    A graph holds addresses of pages, so `clear` must follow when these are made anew.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._graphs: dict[tuple[int, int, Precision], _Graph] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def clear(self) -> None:
        """Forget all graphs."""
        self._graphs.clear()

    def run(self, step: Step, x: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        """The result of the call for a decoding pass, for its own sequences only; valid until the next one."""
        sequences = len(step.tokens)
        rows = rounded_up(sequences)
        width = rounded_up(max(pages_of(start + 1) for start in step.starts), _LEAST_PAGES)
        layout = Layout.of(step, device, rows=rows, width=width)
        key = rows, width, step.precision
        if key not in self._graphs:
            with without_cudnn_attention():  # it plans anew for every size
                self._graphs[key] = self._capture(layout, x)
        graph = self._graphs[key]
        graph.layout.copy_(layout)
        if x is not None:
            graph.x[:sequences].copy_(x)
        graph.graph.replay()
        return graph.result[:sequences]

    def _capture(self, layout: Layout, x: torch.Tensor | None) -> _Graph:
        rows = layout.tokens_N.shape[0]
        static = layout.tokens_N.clone() if x is None else x.new_zeros((rows, x.shape[1]))
        own = Layout(
            layout.tokens_N.clone(), layout.positions_N.clone(), layout.slots_N.clone(), layout.contexts_S.clone(),
            layout.table_SP.clone(), layout.last_S, (), (), layout.precision,
        )  # fmt: skip
        stream = capture_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # workspaces and kernels are made outside the graph
                own.forget()
                self._call(static, own)
        torch.cuda.current_stream().wait_stream(stream)
        own.forget()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, stream):
            result = self._call(static, own)
        return _Graph(graph, static, own, result)
