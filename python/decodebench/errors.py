"""Every error that decodebench raises on purpose.

All derive from :class:`DecodeBenchError`, a :class:`ValueError`: one ``except`` catches them all,
and every message is one line that says what is wrong and where. They pickle, so that an engine can
send them from a worker process to its front end.
"""

__all__ = [
    "BackendError",
    "DecodeBenchError",
    "LayoutError",
    "PatternError",
    "PlanError",
    "TraceError",
]


class DecodeBenchError(ValueError):
    """Base of every error that decodebench raises on purpose."""


class PlanError(DecodeBenchError):
    """A plan was refused: nothing was planned, nothing may be written.

    Attributes:
        kind: Stable name of the broken rule, such as ``"range_outside_table"``.
        request: Id of the request that broke it, or ``None`` when no request is concerned.
    """

    def __init__(self, message: str, kind: str = "invalid", request: str | None = None) -> None:
        super().__init__(message, kind, request)
        self.kind = kind
        self.request = request

    def __str__(self) -> str:
        """Return the message alone."""
        return str(self.args[0])


class LayoutError(DecodeBenchError):
    """A cache cannot be addressed block by block, or a plan does not fit the caches."""


class PatternError(DecodeBenchError):
    """A fill value or pattern cannot be encoded for the caches it is meant for."""


class TraceError(DecodeBenchError):
    """A request trace, or the replay asked for on it, was refused."""


class BackendError(DecodeBenchError):
    """The backend that was asked for cannot be used here."""
