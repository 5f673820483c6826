"""The exceptions that reach a user, one exit code each.

CptraceError            1   anything below, when the caller does not care which
├── UsageError          2   an option or argument that cannot be meant
├── SourceError         3   a file that cannot be read as a trace: missing, damaged, another format, no device work
├── TraceError          4   a trace whose content contradicts itself
├── RenderError         5   an output that cannot be produced or written
└── RunError            6   a run that could not start or did not finish

A message says what was asked, what was found and what to do, in one line, and needs no traceback.
"""


class CptraceError(Exception):
    """Base of every error that cptrace reports to a user."""

    exit_code = 1


class UsageError(CptraceError):
    """An option or argument that cannot be meant."""

    exit_code = 2


class SourceError(CptraceError):
    """A file that cannot be read as a trace, or has no device work where that is asked for."""

    exit_code = 3


class TraceError(CptraceError):
    """A trace whose content contradicts itself."""

    exit_code = 4


class RenderError(CptraceError):
    """An output that cannot be produced or written."""

    exit_code = 5


class RunError(CptraceError):
    """A run that could not start or did not finish."""

    exit_code = 6


class GateError(CptraceError):
    """A condition that was to be checked holds: what a CI gate stops at."""

    exit_code = 10
