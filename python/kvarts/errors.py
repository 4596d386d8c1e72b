"""The exceptions of the module: one class for each reaction that a caller must take."""


class Error(Exception):
    """The base of all errors. The subclass determines how the caller must react. `reason` names the cause in one word that does not change
    between versions. The text is for people."""

    kind = "bug"

    def __init__(self, text="", reason=""):
        super().__init__(text)
        self.reason = reason


class Miss(Error):
    """The block is not stored: compute the block."""

    kind = "miss"


class Retry(Error):
    """A temporary failure: retry. Calls also raise this error while the server cannot be reached; a later call reconnects automatically."""

    kind = "retry"


class Refused(Error):
    """Not permitted: a quota or the budget is exhausted, or a right is missing."""

    kind = "refused"


class Invalid(Error, ValueError):
    """The request is wrong and can never succeed: correct the request."""

    kind = "invalid"


class Deadline(Error, TimeoutError):
    """The timeout passed before the result was available."""

    kind = "deadline"


class Corrupt(Error):
    """The block is damaged on disk: compute the block. The damage has been logged and counted."""

    kind = "corrupt"


class ReadOnly(Error):
    """The store refuses writes after a fault; reads continue."""

    kind = "read_only"


class Bug(Error):
    """A defect in Kvarts: report it."""

    kind = "bug"


for _class in (Error, Miss, Retry, Refused, Invalid, Deadline, Corrupt, ReadOnly, Bug):
    _class.__module__ = "kvarts"
del _class


def _make(name, reason, text):
    return globals()[name](text, reason)
