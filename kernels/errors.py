"""The errors of specdec, by what the caller can do about them.

They live in the lowest package because every other one raises them; `specdec.errors` is the public name.
"""


class SpecdecError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(SpecdecError):
    """A setting, or a combination of settings, cannot work: change the settings."""


class CheckpointError(SpecdecError):
    """A checkpoint cannot be used as it lies on disk: repair or replace the named file."""


class RequestError(SpecdecError):
    """One request cannot be served: change that request; others are not affected.

    Attributes:
        parameter: The parameter that is wrong, with which the message begins; None where it is none.
    """

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class ContextLengthError(RequestError):
    """A prompt leaves no room for an output: shorten it."""


class RoundError(SpecdecError):
    """A request ended because a round failed for another cause than the request: it may be sent again."""


class DeadlineError(SpecdecError):
    """A request had not ended in the time it was given: give it more, or send it when less is running."""


class OutOfPagesError(SpecdecError):
    """No free KV page is left: retry once other requests have ended."""


class GeometryError(SpecdecError):
    """A pool was given metadata built for another pool, size or rank: an error of the caller, never served."""


class RankError(SpecdecError):
    """A pass failed on a rank before any rank began it, or the ranks began it with different inputs: it is dropped."""


class RankLostError(SpecdecError):
    """A rank failed, died or stopped inside of a pass: the group has ended, start the engine again."""


class CollectiveError(RankLostError):
    """A collective broke off because another rank is gone: a consequence, never the cause."""


class TransferError(SpecdecError):
    """A transfer cannot be planned, or broke off: the request it belongs to fails, others go on."""
