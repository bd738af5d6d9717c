"""The one exception that a user of the package is meant to read."""


class UserError(ValueError):
    """Bad input, a failing environment, or a run folder that cannot be used.

    Its text is a single line that names the value, what is accepted and what to do next. The
    command line prints that line and exits with code 2; `--debug` shows the traceback as well.
    """


LONGEST = 580  # characters of a line; what to do stands at its end


def one_line(error: BaseException) -> str:
    """Return an exception's text without its line breaks, and without the middle of a long one."""
    text = " ".join(str(error).split())
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[: half - 5]} ... {text[-half:]}"
