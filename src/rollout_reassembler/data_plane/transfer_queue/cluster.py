"""The Ray cluster that a plane runs in: started on this machine alone, or joined.

A cluster that this package starts has Ray's token authentication (Ray's own default: a token in the home directory
of who starts it, made if it is missing) and listens on loopback alone. Ray binds to loopback where it is told
that it can be no part of a cluster, by a variable that is named for other systems. A process that attaches must
hold the same, or it looks for the cluster at this machine's own address, and waits: `attach_ray` finds out.

Ray is imported when it is needed, and not before.
"""

from __future__ import annotations

import importlib
import ipaddress
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rollout_reassembler.data_plane.ports import why_unreachable

logger = logging.getLogger(__name__)

_BIND_TO_NODE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
_KNOCK_SECONDS = 2.0
_TOKEN_HINT = "Do you hold its token? Ray takes it from RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"


def start_local_ray(num_cpus: int) -> None:
    """Start Ray on this machine, reachable from this machine alone, and join it.

    In the caller's own thread, which must live on: a local cluster dies with it. (Linux tells Ray's processes
    of the death of the *thread* that started them.) `num_cpus` is what it may promise, not what it uses. With
    `RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=1` in the environment it listens on the node's address, for others to join.
    """
    _bind_to_node(os.environ.get(_BIND_TO_NODE) == "1")
    _ray().init(address="local", num_cpus=num_cpus, include_dashboard=False, **_QUIET)
    if not has_tokens():
        logger.warning(
            "Ray runs without token authentication (RAY_AUTH_MODE=%s): who reaches its ports can run code here",
            os.environ.get("RAY_AUTH_MODE", ""),
        )


@contextmanager
def local_ray(*, num_cpus: int) -> Iterator[None]:
    """`start_local_ray` for the time of a block, unless this process is in a cluster already."""
    if _ray().is_initialized():
        yield
        return
    before = os.environ.get(_BIND_TO_NODE)
    start_local_ray(num_cpus)
    try:
        yield
    finally:
        _ray().shutdown()
        _bind_to_node(before != "0")


def attach_ray(address: str = "auto") -> None:
    """Join a running Ray cluster: `host:port`, or `auto` for the one on this machine (or of `RAY_ADDRESS`).

    Works for one that listens on loopback alone too, where a plain `ray.init` waits for minutes. Raises
    `ConnectionError` when nobody listens there, or when the cluster wants another token.
    """
    ray, services = _ray(), importlib.import_module("ray._private.services")
    if address == "auto":
        address = services.get_ray_address_from_environment("auto", None)
    host, _, port = address.rpartition(":")
    if port.isdigit() and "://" not in address:
        if why_unreachable(host, int(port), _KNOCK_SECONDS):
            raise ConnectionError(f"no Ray cluster answers at {address}")
        here = services.node_ip_address_from_perspective()
        is_local = is_loopback(host) and why_unreachable(here, int(port), _KNOCK_SECONDS) is not None
        _bind_to_node(not is_local)
    if not os.environ.get("RAY_AUTH_MODE"):
        # Ray itself shows a token to a cluster that it has found, but not to one that was named.
        setup = importlib.import_module("ray._private.authentication.authentication_token_setup")
        setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    try:
        ray.init(address=address, **_QUIET)
    except (ConnectionError, importlib.import_module("ray.exceptions").RayError) as error:
        what = str(error).partition(". ")[0]
        raise ConnectionError(f"cannot join the Ray cluster at {address}: {what}. {_TOKEN_HINT}") from error


def has_tokens() -> bool:
    """Whether this process shows Ray's token, and asks for it."""
    try:
        utils = importlib.import_module("ray._private.authentication.authentication_utils")
    except ImportError:
        return False
    return bool(utils.is_token_auth_enabled())


def is_on_loopback() -> bool:
    """Whether all nodes of this process's cluster are reached through loopback, so that no other machine can be one."""
    return all(is_loopback(node["NodeManagerAddress"]) for node in _ray().nodes() if node["Alive"])


def is_loopback(host: str) -> bool:
    """Whether `host` is an address of this machine that no other machine reaches."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _bind_to_node(to_node: bool) -> None:
    """Where Ray listens, and looks for others, in this process and in those that it starts."""
    if not to_node:
        os.environ[_BIND_TO_NODE] = "0"
    elif os.environ.get(_BIND_TO_NODE) == "0":
        del os.environ[_BIND_TO_NODE]
    # Ray reads its environment when it is imported, which may have been long ago.
    constants: Any = importlib.import_module("ray._private.ray_constants")
    constants.ENABLE_RAY_CLUSTER = to_node


def _ray() -> Any:
    # Ray warns that tokens are on, which is the rule here; what is said is that they are off.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    return importlib.import_module("ray")
