import copy
import json
from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parents[1] / "data" / "instances"


@pytest.fixture
def instance_path():
    """Path of a recorded problem by its name."""
    return lambda name: DATA / f"{name}.json"


@pytest.fixture
def tiny_data():
    """The JSON data of the tiny problem, free to be spoiled."""
    return copy.deepcopy(json.loads((DATA / "tiny.json").read_text()))
