"""What a graph replays for a pass, with a stand-in for captured code; captured code is tested on cards."""

import pytest
import torch

from qsync_opt.kernels.paged_attention import paged_attention
from qsync_opt.runtimes.torch.serving import Choice, Layout, Step
from qsync_opt.runtimes.torch.serving.graphs import MOST_GRAPHS, DecodeGraphs, _Graph


def step_of(counts, starts, pages):
    tokens = tuple(tuple(100 * row + k for k in range(count)) for row, count in enumerate(counts))
    choices = (Choice(),) * sum(counts)
    return Step(number=0, tokens=tokens, starts=tuple(starts), pages=tuple(pages), choices=choices, every=True)


@pytest.fixture
def graphs(monkeypatch):
    """A graph gives each token of its layout back, or the hidden states that it was given."""
    captured = []

    def capture(self, own, x):
        captured.append(own)
        static = own.tokens_N.clone() if x is None else x.new_zeros((len(own.tokens_N), x.shape[1]))
        result = torch.zeros_like(own.tokens_N if x is None else static)

        class Replayed:
            def replay(self):
                result.copy_(own.tokens_N if x is None else static)

        return _Graph(Replayed(), static, own, result)

    monkeypatch.setattr(DecodeGraphs, "_capture", capture)
    return DecodeGraphs(lambda *_: None), captured


def test_tokens_that_fill_a_pass_up_go_to_page_0_and_give_no_result(graphs):
    subject, captured = graphs
    step = step_of((3, 1, 2), (14, 30, 5), ((4, 5), (6, 7), (8,)))
    assert subject.run(step, None, torch.device("cpu")).tolist() == [0, 1, 2, 100, 200, 201]
    (layout,) = captured
    assert layout.tokens_N.view(4, 3).tolist() == [[0, 1, 2], [0, 0, 100], [0, 200, 201], [0, 0, 0]]
    assert layout.positions_N.view(4, 3).tolist() == [[14, 15, 16], [0, 0, 30], [0, 5, 6], [0, 0, 0]]
    page, place = layout.slots_N.view(4, 3) // 16, layout.slots_N.view(4, 3) % 16
    assert page.tolist() == [[4, 4, 5], [0, 0, 7], [0, 8, 8], [0, 0, 0]]
    assert torch.equal(place, layout.positions_N.view(4, 3) % 16)
    assert layout.contexts_S.tolist() == [17, 31, 7, 1] and layout.last_S.tolist() == [2, 5, 8, 11]
    assert layout.table_SP[:3, :3].tolist() == [[4, 5, 0], [6, 7, 0], [8, 0, 0]]
    subject.clear()  # another stage takes hidden states
    hidden = torch.arange(12.0).view(6, 2)
    assert torch.equal(subject.run(step, hidden, torch.device("cpu")), hidden)


def test_passes_of_a_size_share_a_graph_and_few_are_kept(graphs):
    subject, captured = graphs
    device = torch.device("cpu")

    def decode(rows, tokens=1):
        pages = [(1 + row,) for row in range(rows)]
        return subject.run(step_of((tokens,) * rows, (3,) * rows, pages), None, device)

    assert decode(3).tolist() == [0, 100, 200] and decode(4).tolist() == [0, 100, 200, 300]
    assert len(captured) == len(subject) == 1
    for tokens in range(2, MOST_GRAPHS + 1):
        decode(1, tokens)
        decode(3)  # it stays
    assert len(subject) == MOST_GRAPHS and len(captured) == MOST_GRAPHS
    decode(1, MOST_GRAPHS + 1)
    assert len(subject) == MOST_GRAPHS
    decode(3)
    assert len(captured) == MOST_GRAPHS + 1
    decode(1, 2)  # it went
    assert len(captured) == MOST_GRAPHS + 2


def test_what_fills_a_pass_up_is_seen_by_no_token_of_a_sequence():
    """Whatever stands in page 0 and in the rows that fill up: a broken request may have left NaN there."""
    size, tokens = 8, 3
    draw = torch.Generator().manual_seed(1)
    pool = torch.randn((2, 1, 9 * 16, size), generator=draw)
    q = torch.randn((4 * tokens, 2, size), generator=draw)
    step = step_of((1, 2, 3), (15, 10, 31), ((4,), (5,), (6, 7, 8)))
    layout = Layout.of(step, torch.device("cpu"), rows=4, width=8, tokens=tokens)
    results = []
    for filling in (0.0, torch.nan):
        pool[:, :, :16] = filling
        y = paged_attention(q, pool, layout.table_SP, layout.contexts_S, scale=0.3, window=7)
        results.append(y[[2, 4, 5, 6, 7, 8]])
    assert torch.equal(*results) and results[0].isfinite().all()
