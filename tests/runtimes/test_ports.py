import sys

import pytest

from qsync_opt.errors import NotReadyError
from qsync_opt.runtimes import free_port
from qsync_opt.runtimes import host as ports


def test_free_ports_are_none_that_the_system_gives_away(tmp_path, monkeypatch):
    said = tmp_path / "range"
    monkeypatch.setattr(ports, "_EPHEMERAL_PORTS", said)
    assert 20000 <= free_port() < 49152
    said.write_text("20200\t60999\n")
    given = [free_port() for _ in range(20)]
    assert all(20000 <= port < 20200 for port in given)
    if sys.platform == "linux":
        assert len(set(given)) == 20  # kept until they are used
    said.write_text("1024\t60999\n")
    assert 20000 <= free_port() < 49152

    def refuse(*_):
        raise OSError("in use")

    monkeypatch.setattr(ports.socket.socket, "bind", refuse)
    with pytest.raises(NotReadyError, match="100 ports between 20000 and 49152 are in use"):
        free_port()
