"""Passes of a stage that decode or judge drafts as CUDA graphs.

There is one by precision, new tokens of a sequence, and number of sequences and of pages, both rounded up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from qsync_opt.runtimes.torch.serving.steps import Layout, Precision, Step, pages_of
from qsync_opt.runtimes.torch.support import capture_stream, capturing, without_cudnn_attention

_LEAST_PAGES = 8
MOST_GRAPHS = 32
"""Graphs that are kept, each with memory of its own; the least recently replayed one goes first."""
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
    """Captures a stage's passes of a few tokens when a size comes up first and replays them afterwards.

    A graph holds addresses of pages, so `clear` must follow when these are made anew.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._graphs: dict[tuple[int, int, int, Precision], _Graph] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def clear(self) -> None:
        """Forget all graphs."""
        self._graphs.clear()

    def run(self, step: Step, x: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        """The result of the call for the tokens of a pass, and for no others; valid until the next one."""
        rows, tokens = rounded_up(len(step.tokens)), max(step.counts)
        longest = max(start + count for start, count in zip(step.starts, step.counts, strict=True))
        width = rounded_up(pages_of(longest), _LEAST_PAGES)
        layout = Layout.of(step, torch.device("cpu"), rows=rows, width=width, tokens=tokens)
        key = rows, tokens, width, step.precision
        graph = self._graphs.pop(key, None)
        if graph is None:
            while len(self._graphs) >= MOST_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            with without_cudnn_attention():  # it plans anew for every size
                graph = self._capture(layout.to(device), x)
        self._graphs[key] = graph  # the last one
        graph.layout.copy_(layout)
        own = _places(step.counts, tokens, device)
        if x is not None:
            graph.x[own] = x
        graph.graph.replay()
        return graph.result[own]

    def _capture(self, own: Layout, x: torch.Tensor | None) -> _Graph:
        """A graph that reads this layout from then on."""
        static = own.tokens_N if x is None else x.new_zeros((len(own.tokens_N), x.shape[1]))
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


def _places(counts: tuple[int, ...], tokens: int, device: torch.device) -> slice | torch.Tensor:
    """Where the tokens of a pass stand among those of a graph: as the last of ``tokens`` of each sequence."""
    if sum(counts) == len(counts) * tokens:
        return slice(sum(counts))
    places = [(row + 1) * tokens - count + k for row, count in enumerate(counts) for k in range(count)]
    return torch.tensor(places).to(device, non_blocking=True)
