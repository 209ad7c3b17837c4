"""Real graphs for `messages`: Debian's packages with their dependencies, and WordNet's synsets with their pointers.

Nothing is downloaded: the first is what ``apt-cache dumpavail`` knows (after ``apt-get update``), the second is read
from the files of the Debian package ``wordnet-base``. Edges go both ways, features are hashed words of the short
description or gloss, labels are sections or lexicographer files.
"""

from __future__ import annotations

import os
import re
import subprocess
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

WORDNET = Path(os.environ.get("QSYNC_WORDNET", "/usr/share/wordnet"))
_DIM = 128
_WORD = re.compile(r"[a-z0-9]{2,}")


def read_graph(name: str) -> Any:
    """A graph by name: ``debian`` or ``wordnet``, as ``torch_geometric.data.Data`` with masks as `block_graph` has."""
    if name == "debian":
        return debian_graph(
            subprocess.run(["apt-cache", "dumpavail"], check=True, capture_output=True, text=True).stdout
        )
    if name == "wordnet":
        lines = [line for part in ("noun", "verb", "adj", "adv") for line in (WORDNET / f"data.{part}").open()]
        return wordnet_graph(lines)
    raise SystemExit(f"no graph is named {name!r}; there are debian and wordnet")


def debian_graph(text: str) -> Any:
    """Packages of a Debian list (control paragraphs), joined by Depends, Pre-Depends and Recommends."""
    packages: dict[str, dict[str, str]] = {}
    for paragraph in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in paragraph.splitlines() if re.match(r"[A-Z][\w-]*: ", line))
        if {"Package", "Section"} <= fields.keys():
            packages.setdefault(fields["Package"], fields)
    numbers = {name: number for number, name in enumerate(packages)}
    edges = []
    for name, fields in packages.items():
        for key in ("Depends", "Pre-Depends", "Recommends"):
            for needed in re.split(r"[,|]", fields.get(key, "")):
                other = re.split(r"[\s:(]", needed.strip(), maxsplit=1)[0]
                if other in numbers:
                    edges.append((numbers[name], numbers[other]))
    sections = [fields["Section"].rpartition("/")[2] for fields in packages.values()]
    return _data(edges, sections, [fields.get("Description", "") for fields in packages.values()])


def wordnet_graph(lines: Iterable[str]) -> Any:
    """Synsets of the data files of WordNet (wndb(5WN)), joined by their pointers."""
    numbers: dict[tuple[str, str], int] = {}
    labels, glosses, pointers = [], [], []
    for line in lines:
        if line.startswith(" "):  # the license
            continue
        data, _, gloss = line.partition("|")
        fields = data.split()
        kind = fields[2].replace("s", "a")
        number = numbers[kind, fields[0]] = len(numbers)
        at = 4 + 2 * int(fields[3], 16)
        for k in range(int(fields[at])):
            _, offset, other, _ = fields[at + 1 + 4 * k : at + 5 + 4 * k]
            pointers.append((number, (other.replace("s", "a"), offset)))
        labels.append(fields[1])
        glosses.append(gloss)
    return _data([(number, numbers[key]) for number, key in pointers if key in numbers], labels, glosses)


def _data(edges: Sequence[tuple[int, int]], labels: Sequence[str], texts: Sequence[str]) -> Any:
    from torch_geometric.data import Data

    words = [[zlib.crc32(word.encode()) for word in _WORD.findall(text.lower())] for text in texts]
    rows = np.repeat(np.arange(len(texts)), [len(each) for each in words])
    codes = np.fromiter((code for each in words for code in each), np.int64)
    sums = np.bincount(rows * _DIM + codes % _DIM, np.where(codes >> 16 & 1, 1.0, -1.0), len(texts) * _DIM)
    x = torch.from_numpy(sums.reshape(len(texts), _DIM).astype(np.float32))
    half = torch.tensor(edges, dtype=torch.int64).T
    half = half[:, half[0] != half[1]]
    classes = {label: number for number, label in enumerate(sorted(set(labels)))}
    draw = torch.rand(len(texts), generator=torch.Generator().manual_seed(0))
    return Data(
        edge_index=torch.unique(torch.cat([half, half.flip(0)], 1), dim=1),
        x=x / x.norm(dim=1, keepdim=True).clamp(min=1.0),
        y=torch.tensor([classes[label] for label in labels]),
        train_mask=draw < 0.5, val_mask=(draw >= 0.5) & (draw < 0.75), test_mask=draw >= 0.75,
    )  # fmt: skip
