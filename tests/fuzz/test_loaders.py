"""Spoiled files of every kind: nothing but the package's own errors comes out; see also ``long_run.py``."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_corpus import loaders, run_loader
from mutations import _written, mutated

LOADERS = {loader.name: loader for loader in loaders()}


@pytest.mark.parametrize("name", LOADERS)
def test_valid_files_are_taken(name, tmp_path):
    """Else the spoiled ones would all be refused at the first step, and the test below would test little."""
    loader = LOADERS[name]
    for seed in loader.seeds[:1] if loader.kind == "onnx" else loader.seeds:
        data = seed if isinstance(seed, bytes) else _written(loader.kind, seed, random.Random(1))
        path = tmp_path / "file"
        path.write_bytes(data)
        assert run_loader(loader, path) == "taken"


@pytest.mark.parametrize("name", LOADERS)
def test_spoiled_files_are_taken_or_refused(name, tmp_path_factory):
    loader = LOADERS[name]
    folder = tmp_path_factory.mktemp("fuzz")

    @settings(max_examples=60)
    @given(st.randoms(use_true_random=False), st.sampled_from(range(len(loader.seeds))))
    def check(source, seed):
        path = folder / "file"
        path.write_bytes(mutated(loader.kind, loader.seeds[seed], source))
        run_loader(loader, path)

    check()


@pytest.mark.parametrize("name", LOADERS)
def test_any_bytes_are_taken_or_refused(name, tmp_path_factory):
    loader = LOADERS[name]
    folder = tmp_path_factory.mktemp("fuzz")

    @settings(max_examples=30)
    @given(st.binary(max_size=300))
    def check(data):
        path = folder / "file"
        path.write_bytes(data)
        run_loader(loader, path)

    check()
