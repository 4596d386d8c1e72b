"""What a caller is told when something did not work: one class for each kind, by what the caller must do."""


class Error(Exception):
    """The base of all of them. `reason` says why in one word that does not change; the text is for people."""

    kind = "bug"

    def __init__(self, text="", reason=""):
        super().__init__(text)
        self.reason = reason


class Miss(Error):
    """The bytes are not here: recompute them."""

    kind = "miss"


class Retry(Error):
    """Not now: ask again."""

    kind = "retry"


class Refused(Error):
    """Not allowed: a quota, the budget, a right."""

    kind = "refused"


class Invalid(Error, ValueError):
    """The request can never succeed as it is: fix it."""

    kind = "invalid"


class Deadline(Error, TimeoutError):
    """The time that was given passed first."""

    kind = "deadline"


class Corrupt(Error):
    """Bytes on disk were not what was written: recompute them. It has been reported and counted."""

    kind = "corrupt"


class ReadOnly(Error):
    """The store takes no writes after a fault; reads go on."""

    kind = "read_only"


class Bug(Error):
    """A defect in Kvarts: report it."""

    kind = "bug"


for _class in (Error, Miss, Retry, Refused, Invalid, Deadline, Corrupt, ReadOnly, Bug):
    _class.__module__ = "kvarts"
del _class


def _make(name, reason, text):
    return globals()[name](text, reason)
