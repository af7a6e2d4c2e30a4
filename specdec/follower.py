"""A rank that follows: loads its share, then runs the passes it is told, until the engine ends.

Started by the leading rank, or by `torchrun`: `python -m specdec.follower` with the environment that it sets.
"""

import os
import sys
import traceback
from dataclasses import replace

import torch

from specdec.control_channel import FollowerChannel
from specdec.dcp.agreement import agree_ready
from specdec.errors import CollectiveError, RankError
from specdec.rank_group import Place, device_of, form_followers_groups, join_group, launched_place
from specdec.rank_setup import RankSetup, load_rank
from specdec.sampling_rows import SamplingBatch
from specdec.worker import Worker

FAILED_EXIT_CODE = 16


def follow(place: Place) -> int:
    """Serve as the rank of `place` until the engine ends; gives the exit code of the process."""
    channel, store, timeout_s = join_group(place)
    try:
        task = channel.next_task()
        if task is None:
            return 0
        setup: RankSetup = task.argument
        groups = form_followers_groups(
            place, store, dcp_size=setup.config.dcp_size, device=setup.device, timeout_s=timeout_s
        )
        device = device_of(setup.device, place)
        worker, error = None, None
        try:
            _, worker = load_rank(setup, groups, device=device)
        except Exception as failure:  # whatever it is, the leader must hear of it
            error = failure
        agree_ready(groups.tp, error, device=torch.device(device))
        assert worker is not None
        _serve(worker, channel)
    except RankError:
        return FAILED_EXIT_CODE  # every rank knows, and the leader says so
    except BaseException as error:
        channel.report_failure(f"{type(error).__name__}: {error}", is_consequence=isinstance(error, CollectiveError))
        if not isinstance(error, CollectiveError):
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(FAILED_EXIT_CODE)  # hangs up on the ranks that wait for this one, whatever threads are left
    channel.close()
    return 0


def _serve(worker: Worker, channel: FollowerChannel) -> None:
    sampling: SamplingBatch | None = None
    with torch.inference_mode():
        while (task := channel.next_task()) is not None:
            argument = task.argument
            if task.sampling is not None:
                sampling = task.sampling
                sampling.device = worker.device
            if task.reads_sampling:
                argument = replace(argument, sampling=sampling)
            try:
                worker.run(task.method, argument)
            except RankError as error:  # agreed on by every rank: that pass is dropped
                print(f"specdec rank {worker.groups.tp.rank}: {error}", file=sys.stderr)


def main() -> int:
    """Follow as the launcher's environment says."""
    place = launched_place()
    if place is None or place.rank == 0:
        print("specdec.follower runs as a rank above 0 of an engine, started by it or by torchrun", file=sys.stderr)
        return 2
    return follow(place)


if __name__ == "__main__":
    sys.exit(main())
