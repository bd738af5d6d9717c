"""The one exception that a user of the package is meant to read."""

import signal


class UserError(ValueError):
    """Bad input, a failing environment, or a run folder that cannot be used.

    Its text is a single line that names the value, what is accepted and what to do next. The
    command line prints that line and exits with `exit_code`; `--debug` shows the traceback as well.
    """

    exit_code = 2


LONGEST = 1500  # characters of a line; what to do stands at its end


def one_line(error: BaseException) -> str:
    """Return an exception's text without its line breaks, and without the middle of a long one."""
    text = " ".join(str(error).split())
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[: half - 5]} ... {text[-half:]}"


def failures() -> tuple[type[BaseException], ...]:
    """Return what counts as a failure of an environment: anything, such as sys.exit() in its code.

    A KeyboardInterrupt does not where Ctrl-C raises it; the runner collects signals instead.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return Exception, SystemExit
    return (BaseException,)


def describe_failure(failure: BaseException) -> str:
    """Return one line about an exception that an environment raised."""
    text = one_line(failure) or "no message"
    if isinstance(failure, UserError):
        return text
    return (
        f"the environment raised {type(failure).__name__}: {text}; "
        "mend the environment (--debug shows the traceback)"
    )
