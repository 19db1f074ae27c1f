"""Misuse, as flexc's InputError and as the builtin that PyTorch raises in its place, so that `except` clauses keep working."""

from flexc.errors import InputError


class ArgumentError(InputError, ValueError):
    """Where PyTorch raises ValueError."""


class UsageError(InputError, RuntimeError):
    """Where PyTorch raises RuntimeError."""


class CallableError(InputError, AssertionError):
    """Where PyTorch raises AssertionError: a function of another kind, half of a pair of arguments."""
