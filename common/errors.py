"""The one exception that a user of the package is meant to read."""


class UserError(ValueError):
    """Bad input, a failing environment, or a run folder that cannot be used.

    Its text is a single line that names the value, what is accepted and what to do next. The
    command line prints that line and exits with code 2; `--debug` shows the traceback as well.
    """


def one_line(error: Exception) -> str:
    """Return an exception's text without its line breaks."""
    return " ".join(str(error).split())


def describe_failure(failure: Exception) -> str:
    """Return one line about an exception that an environment raised."""
    text = one_line(failure) or "no message"
    if isinstance(failure, UserError):
        return text
    return (
        f"the environment raised {type(failure).__name__}: {text}; "
        "mend the environment (--debug shows the traceback)"
    )
