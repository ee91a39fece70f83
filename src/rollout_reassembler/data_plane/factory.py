"""From a `DataPlaneConfig` to a connected client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_reassembler.data_plane.base import DataPlaneClient
from rollout_reassembler.data_plane.config import DataPlaneConfig


def build_data_plane_client(cfg: DataPlaneConfig | Mapping[str, Any], *, bootstrap: bool = True) -> DataPlaneClient:
    """Connect to the data plane that `cfg` describes; a mapping of its fields will do.

    With `bootstrap=True` the caller starts the plane if it is not running and owns it: closing that
    client ends it. With `bootstrap=False` it only connects, and raises `DataPlaneUnavailable` within
    the connect deadline when there is nothing to connect to.

    A plane imports what it needs when it is chosen: the memory plane runs without torch, Ray or
    TransferQueue. Raises `MissingExtra` where they are not installed, and pydantic's `ValidationError`
    for a mapping that is no config.
    """
    if isinstance(cfg, Mapping):
        cfg = DataPlaneConfig.model_validate(cfg)
    if not isinstance(cfg, DataPlaneConfig):
        raise TypeError(f"cfg must be a DataPlaneConfig or a mapping of its fields, got {cfg!r:.80}")
    if not cfg.enabled:
        raise ValueError("the data plane is disabled in this config (enabled=False)")
    return cfg.chosen.build(cfg, bootstrap=bootstrap)
