"""`python -m specdec` is the command `specdec`; also for `torchrun -m specdec`."""

from specdec.cli.main import run

run()
