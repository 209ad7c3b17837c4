"""How long each stage of planning a job takes."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

_LOGGER = logging.getLogger(__name__)


class Stages:
    """Seconds by stage on this rank; stages end together on all ranks."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the block's time to a stage."""
        began = time.perf_counter()
        _LOGGER.info("%s begins", name)
        try:
            yield
        finally:
            spent = time.perf_counter() - began
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
            _LOGGER.info("%s took %.1f s", name, spent)
