"""Log records as JSON, one a line: time, level, message, and whatever was given as `extra`."""

import json
import logging
import sys
import traceback
from datetime import UTC, datetime

_OWN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class JsonFormatter(logging.Formatter):
    """Writes a record.

    Of an exception it writes the kind and the places, never the message, which may hold what a user wrote.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Give the line."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **{name: value for name, value in vars(record).items() if name not in _OWN_FIELDS},
        }
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            fields["exception"] = type(error).__qualname__
            frames = traceback.extract_tb(error.__traceback__)
            fields["frames"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
        return json.dumps(fields, ensure_ascii=False, default=str)


def log_to_stderr() -> None:
    """Send what the server and the HTTP library have to say to standard error, as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    levels = {"specdec.serving": logging.INFO, "specdec.prefill": logging.WARNING, "uvicorn": logging.WARNING}
    for name, level in levels.items():
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False
