"""To be a driver of a Ray cluster, or to start one of this machine alone."""

import contextlib
import logging
import os
import re
import secrets
import signal
import socket
import tempfile
from collections.abc import Generator
from typing import Any

from common.errors import UserError, one_line

CONNECT_SECONDS = 10.0


@contextlib.contextmanager
def connected(address: str | None, num_cpus: int = 1) -> Generator[None, None, None]:
    """Be a driver of a cluster; Ray ends all that a driver started when it goes.

    To be entered before JAX starts its threads, since Ray forks processes off this one.

    Args:
        address: HOST:PORT, or auto for the cluster of this machine; None starts one here, which
            ends with the block.
        num_cpus: cores that a cluster that is started here counts as its own.

    Raises:
        UserError: there is no such cluster, or it could not be started.
    """
    check_address(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address is None:  # else Ray writes a token into the home folder
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    import ray

    with tempfile.TemporaryDirectory(prefix="quartet-ray-", ignore_cleanup_errors=True) as folder:
        try:
            with _own_signals():
                ray.init(**_where(address, num_cpus, folder), log_to_driver=False)
        except Exception as error:  # Ray raises it bare for a node that starts too slowly
            raise UserError(
                f"--ray-address {address} is no cluster that this machine reaches "
                f"({one_line(error)}); start one by `ray start --head`, or leave the flag out"
                if address
                else f"Ray could not be started on this machine ({one_line(error)}); see that it "
                "has memory and disk left, or give a --ray-address"
            ) from error
        try:
            yield
        finally:
            ray.shutdown()


def check_address(address: str | None) -> None:
    """Refuse what cannot be the address of a cluster.

    Raises:
        UserError: it is neither None nor auto nor HOST:PORT.
    """
    if address is not None and not re.fullmatch(r"auto|[^\s/]+:\d+", address):
        raise UserError(f"--ray-address must be auto or HOST:PORT, got {address!r}")


@contextlib.contextmanager
def _own_signals() -> Generator[None, None, None]:
    """Keep this process's handlers (Ray has one for SIGTERM); what starts is deaf to SIGHUP.

    Else a terminal that ends takes Ray's processes along, and they the driver before it has saved.
    """
    handlers = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for one, handler in handlers.items():
            signal.signal(one, handler)


def _where(address: str | None, num_cpus: int, folder: str) -> dict[str, Any]:
    """Return what `ray.init` needs; look whether somebody listens at the address."""
    quiet = {"logging_level": logging.ERROR}
    if address is None:
        local = {"address": "local", "include_dashboard": False, "_temp_dir": folder}
        return quiet | local | {"num_cpus": num_cpus}
    if address != "auto":  # Ray itself tries for a quarter of an hour
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    return quiet | {"address": address}
