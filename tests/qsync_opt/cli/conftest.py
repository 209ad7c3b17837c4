import pytest

from qsync_opt.cli import main


@pytest.fixture
def run(capfd):
    """A command run in this process: exit status, standard output, standard error."""

    def run_command(*arguments):
        capfd.readouterr()
        status = main([str(argument) for argument in arguments])
        return status, *capfd.readouterr()

    return run_command
