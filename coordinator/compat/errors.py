"""Errors that are also the `AssertionError` that callers of other engines' code catch."""


class NotInitializedError(RuntimeError, AssertionError):
    """There are no such groups, or not yet."""


class NotDivisibleError(ValueError, AssertionError):
    """A size does not divide another."""
