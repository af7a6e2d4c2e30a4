"""What the rounds on the device drew on one rank, for comparing ranks that never tell each other.

B = requests of a round, Q = rows of each.
"""

from specdec.device.started_round import StartedRound
from specdec.slot_table import Int64Array


class DecodedRecord:
    """Keeps the tokens of each round while it is kept; for proofs, not for the hot path."""

    def __init__(self) -> None:
        self._rounds: list[Int64Array] | None = None
        self._unread: StartedRound | None = None

    def begin(self) -> None:
        """Keep those that are started from now on."""
        self._rounds, self._unread = [], None

    def note(self, started: StartedRound) -> None:
        """Take in a round that was just started; waits for the one before, whose memory the next one takes."""
        if self._rounds is not None:
            self._read(self._rounds)
            self._unread = started

    def take(self) -> list[Int64Array]:
        """Give the tokens that each round drew, i64 [B, Q] with -1 behind a request's last, and keep no more."""
        rounds = self._rounds or []
        self._read(rounds)
        self._rounds = None
        return rounds

    def _read(self, rounds: list[Int64Array]) -> None:
        if self._unread is not None:
            rounds.append(self._unread.decoded().token_id_BQ)
            self._unread = None
