"""What the command reports in one line instead of a traceback."""

from __future__ import annotations


class CliError(Exception):
    """The command could not do what it was asked: one line on stderr, exit status 1."""

    exit_status = 1


class UsageError(CliError):
    """The command was called wrongly, or the machine lacks what it needs: one line on stderr, exit status 2."""

    exit_status = 2
