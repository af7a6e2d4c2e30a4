"""A rank that follows: loads its share, then runs the passes it is told, until the engine ends.

The leading rank starts `python -m specdec.ranks.follower -` and writes an invitation to its standard input. Under a
launcher such as `torchrun` every process runs the same program, and those above rank 0 call `follow` or
`follow_until_dismissed` where rank 0 makes its engine.
"""

import os
import sys
import traceback
from dataclasses import replace
from typing import Protocol

import torch

from specdec.errors import CollectiveError, RankError, RankLostError
from specdec.ranks.control_messages import Task
from specdec.ranks.place import Place, launched_place
from specdec.ranks.rank_group import await_summons, form_groups, join_group, leave_groups
from specdec.ranks.rank_setup import RankSetup, load_rank
from specdec.ranks.rendezvous import Dismissal, Invitation, decode_summons
from specdec.ranks.worker import Worker
from specdec.sampling.sampling_rows import SamplingBatch

FAILED_EXIT_CODE = 16


def follow(place: Place) -> Dismissal | None:
    """Serve as the rank that a launcher started at `place`, for the next engine of rank 0, until that ends.

    Waits for the engine however long. A fault, of this rank or another, ends the process.

    Returns:
        None after an engine; a dismissal where rank 0 makes none any more.

    Raises:
        RankLostError: The leader turned this rank away.
    """
    summons = await_summons(place)
    if isinstance(summons, Dismissal):
        return summons
    serve_engine(place, summons)
    return None


def follow_until_dismissed(place: Place) -> int:
    """Serve all engines of rank 0; gives its exit code once it is done."""
    while (dismissal := follow(place)) is None:
        pass
    return dismissal.exit_code


def serve_engine(place: Place, invitation: Invitation) -> None:
    """Serve one engine as a follower.

    Raises:
        RankLostError: The leader is gone, or turned this rank away.
    """
    channel, store = join_group(place, invitation)
    groups = None
    try:
        task = channel.next_task()
        if task is not None:
            setup: RankSetup = task.argument
            groups = form_groups(
                place,
                store,
                invitation,
                dcp_size=setup.config.dcp_size,
                cp_size=setup.config.cp_size,
                device=setup.device,
                peer_memory=setup.config.peer_memory,
            )
            worker, failure = None, None
            try:
                _, worker = load_rank(setup, groups, device=place.device(setup.device))
            except Exception as error:  # whatever it is, the leader must hear of it, and then ends the engine
                failure = f"{type(error).__name__}: {error}"
            channel.report_loaded(failure)
            if worker is not None:
                serve(worker, channel)
                worker.close()
            else:
                channel.next_task()
        leave_groups(groups)
    except BaseException as error:
        channel.report_failure(f"{type(error).__name__}: {error}", is_consequence=isinstance(error, CollectiveError))
        if isinstance(error, Exception) and not isinstance(error, CollectiveError):
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(FAILED_EXIT_CODE)  # hangs up on the ranks that wait for this one, whatever threads are left
    channel.close()


class TaskSource(Protocol):
    """Where a follower's tasks come from."""

    def next_task(self) -> Task | None:
        """Wait for the next task; None when the engine ended."""


def serve(worker: Worker, tasks: TaskSource) -> None:
    """Run the passes a rank is told, with the other ranks, until there are no more."""
    sampling: SamplingBatch | None = None
    with torch.inference_mode():
        while (task := tasks.next_task()) is not None:
            argument = task.argument
            if task.sampling is not None:
                sampling = task.sampling
                sampling.device = worker.device
            if task.reads_sampling:
                argument = replace(argument, sampling=sampling)
            try:
                worker.run(task.method, argument, told=task.argument)
            except RankError as error:  # agreed on by every rank: that pass is dropped
                if error.__cause__ is not None:  # it was this rank that could not
                    print(f"specdec: on rank {worker.groups.all_ranks.rank}:", file=sys.stderr)
                    traceback.print_exception(error.__cause__)


def main() -> int:
    """Follow the leader that started this process, or the launcher's rank 0."""
    place = launched_place()
    if place is None or place.rank == 0:
        print(
            "specdec.ranks.follower runs as a rank above 0 of an engine, started by it or by torchrun", file=sys.stderr
        )
        return 2
    if sys.argv[1:] != ["-"]:
        return follow_until_dismissed(place)
    summons = decode_summons(sys.stdin.read())
    assert isinstance(summons, Invitation)
    try:
        serve_engine(place, summons)
    except RankLostError:  # before it could begin; the leader says why, if it still can
        return FAILED_EXIT_CODE
    return 0


if __name__ == "__main__":
    exit_code = main()
    sys.stderr.flush()
    os._exit(exit_code)  # nothing is left to be done, so nothing is left that could hang
