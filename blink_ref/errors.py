"""The one exception type whose text is meant for a user."""


class BlinkError(Exception):
    """A fault that the user can mend.

    The text names the thing, its value, the limit, and the mend, in one line. The command line
    prints it without a traceback (unless ``--debug``) and exits with 1.
    """
