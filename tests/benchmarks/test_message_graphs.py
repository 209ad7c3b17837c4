"""Real graphs are read as their files say."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch_geometric")

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def graphs():
    sys.path.insert(0, str(FOLDER))
    import message_graphs

    yield message_graphs
    sys.path.remove(str(FOLDER))


def test_packages_depend_on_packages(graphs):
    text = """Package: a
Section: libs
Depends: b (>= 1), c | missing, b (<< 3)
Description: a list
 Tag of many lines

Package: b
Section: contrib/net
Pre-Depends: a

Package: c
Section: libs

Package: without-section
"""
    data = graphs.debian_graph(text)
    assert sorted(map(tuple, data.edge_index.T.tolist())) == [(0, 1), (0, 2), (1, 0), (2, 0)]
    assert data.y.tolist() == [0, 1, 0] and data.x[0].norm() > 0 and not data.x[1:].any()
    assert (data.train_mask.int() + data.val_mask.int() + data.test_mask.int()).tolist() == [1, 1, 1]


def test_synsets_point_to_synsets(graphs):
    lines = [
        "  1 license\n",
        "00000001 03 n 02 entity 0 thing 1 002 ~ 00000002 n 0000 + 00000009 v 0101 | what exists\n",
        "00000002 04 n 01 act 0 001 @ 00000001 n 0000 | something done\n",
        "00000002 00 s 01 able 0 001 & 00000002 a 0000 | able to\n",
    ]
    data = graphs.wordnet_graph(lines)
    assert sorted(map(tuple, data.edge_index.T.tolist())) == [(0, 1), (1, 0)]
    assert data.y.tolist() == [1, 2, 0]
