"""The sidecar's log on standard error: one JSON object a line, or text for a terminal.

What belongs to a line beyond its message travels in `extra={"fields": {...}}`, first of all its `event`; a line
of a library has the library's name for one. Tokens are never logged.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone
from typing import Any


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        line: dict[str, Any] = {
            "time": rfc3339(record.created),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """For eyes: time, level, message, fields."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        parts = [
            rfc3339(record.created),
            record.levelname.ljust(7),
            record.getMessage(),
            # As JSON: a value with a newline must not look like a line of its own.
            *(
                f"{name}={json.dumps(value, default=str)}"
                for name, value in _fields(record).items()
            ),
        ]
        text = " ".join(parts)
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {"event": record.name, **getattr(record, "fields", {})}


def configure_logs(level: str, style: str) -> None:
    """Set up logging for the whole process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore", "uvicorn", "uvicorn.error", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def rfc3339(seconds: float) -> str:
    """A time in UTC, to the millisecond."""
    moment = datetime.fromtimestamp(seconds, timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
