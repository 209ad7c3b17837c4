"""Copies of what a save writes, taken while training goes on, in host memory that is kept from save to save."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from qsync_opt.errors import NotReadyError
from qsync_opt.runtimes.torch.checkpoints.memory import HostBuffer, chunks_of
from qsync_opt.runtimes.torch.checkpoints.storage import RankFile


class Staging:
    """The file that a rank writes, copied into host memory that is allocated (and pinned for a GPU) once.

    What changes at any time is copied at once; what only the optimizers' steps change is copied beside the next
    forward and backward pass, by a thread that calls `copy`. `finish`, called before an optimizer's step, ends the
    copying: on a CPU it waits, on a GPU it lets the step's stream wait for the copy, not the host.
    """

    def __init__(self) -> None:
        self._buffer: HostBuffer | None = None
        self._file: RankFile | None = None
        self._slices: list[Tensor] = []
        self._lock = threading.Lock()
        self._deferred: Sequence[tuple[Tensor, Tensor]] = ()
        self._error: BaseException | None = None
        self._event: Any = None
        self._stream: Any = None
        self._held: Sequence[Any] = ()  # so that the sources' memory is not used anew before it is copied

    @property
    def num_bytes(self) -> int:
        """Host memory that is held."""
        return 0 if self._buffer is None else self._buffer.bytes.numel()

    def begin(self, file: RankFile, sources: Sequence[Tensor], later: Sequence[bool]) -> None:
        """Copy the boxes of a file, but leave those marked as ``later`` to `copy`."""
        self._error = self._event = None
        self.reserve(file, sources)
        pairs = list(zip(sources, self._slices, strict=True))
        self._deferred = self._held = list(compress(pairs, later))
        device = next((source.device for source in sources if source.is_cuda), None)
        with torch.no_grad():
            for source, target in compress(pairs, map(operator.not_, later)):
                target.copy_(source, non_blocking=source.is_cuda)  # in the order of the current stream
        if device is not None:
            if self._stream is None:
                self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def copy(self) -> None:
        """Copy what `begin` left, unless that is done: whichever thread comes first does, and others wait for it.

        On a GPU too a thread of its own is to come first: to begin a thousand copies takes some milliseconds.
        """
        with self._lock:
            pairs, self._deferred = self._deferred, ()
            if not pairs:
                return
            try:
                with torch.no_grad(), torch.cuda.stream(self._stream):
                    for source, target in pairs:
                        target.copy_(source, non_blocking=source.is_cuda)
                    if self._stream is not None:
                        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                        self._event.record(self._stream)
            except BaseException as failure:  # raised again by finish
                self._error = failure

    def reserve(self, file: RankFile, sources: Sequence[Tensor]) -> None:
        """Allocate what `begin` needs, if it is not there yet.

        Raises:
            NotReadyError: So much cannot be pinned.
        """
        pinned = any(source.is_cuda for source in sources)
        end, buffer = file.num_bytes, self._buffer
        if file is self._file and buffer is not None and (buffer.pinned or not pinned):
            return  # the same boxes in the same places as before
        self._file = None
        if buffer is None or not end <= buffer.bytes.numel() <= 2 * end + 2**20 or (pinned and not buffer.pinned):
            self._slices = []
            self._buffer = buffer = None  # the old one goes before the new one comes
            self._buffer = buffer = HostBuffer(end, pinned=pinned)
        place = len(file.header)
        buffer.bytes[:place] = torch.frombuffer(bytearray(file.header), dtype=torch.uint8)
        self._slices = []
        for source in sources:
            end = place + source.numel() * source.element_size()
            self._slices.append(buffer.bytes[place:end].view(source.dtype).view(source.shape))
            place = end
        self._file = file

    def finish(self) -> None:
        """Let nothing change the sources before they are copied.

        Raises:
            NotReadyError: A copy failed.
        """
        self._copied()
        if self._event is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._event)

    def chunks(self) -> Iterator[memoryview]:
        """The chunks of the copied file, once it is there; for the thread that writes it.

        Raises:
            NotReadyError: A copy failed.
        """
        self._copied()
        if self._event is not None:
            self._event.synchronize()
        self._held = ()
        if self._buffer is not None and self._file is not None:
            yield from chunks_of(self._buffer, self._file.num_bytes)

    def _copied(self) -> None:
        self.copy()
        if self._error is not None:
            raise NotReadyError(f"what is to be saved was not copied: {self._error}") from self._error


class Background:
    """One piece of work at a time on a thread; its error is raised by the next `wait`."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin; the work before must have been waited for. Python does not end before the work does."""

        def run() -> None:
            try:
                work()
            except BaseException as failure:  # raised again by wait
                self._error = failure

        self._thread = threading.Thread(target=run, name="checkpoint-writing", daemon=False)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the work is not done yet."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the work, if any, and raise its error."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
