"""Backends by name: this package's own, what a config says of them, and what it says where there is none."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from rollout_reassembler.data_plane import backends
from rollout_reassembler.data_plane.config import DataPlaneConfig, MooncakeCpuBackendConfig

ROOT = Path(__file__).parents[2]


def test_our_own_backends_are_entry_points_too() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][backends.GROUP] == backends.OWN
    assert backends.names()[:3] == ["memory", "simple", "mooncake_cpu"]


@pytest.mark.parametrize("name", backends.OWN)
def test_a_backend_goes_by_its_name_and_by_what_a_config_says_for_it(name: str) -> None:
    backend = backends.require(name)
    cfg = DataPlaneConfig.model_validate({"impl": backend.impl, "backend": name})
    assert cfg.chosen is backend
    assert backend.config is None or isinstance(getattr(cfg, name), backend.config)
    assert all(finding.name for finding in backend.checks())


def test_a_block_may_stand_there_for_a_backend_that_is_not_chosen() -> None:
    cfg = DataPlaneConfig.model_validate({"simple": {"num_storage_units": 2}, "mooncake_cpu": {"memory_hosts": 1}})
    assert cfg.chosen.name == "memory"
    assert (cfg.simple.num_storage_units, cfg.mooncake_cpu) == (2, MooncakeCpuBackendConfig(memory_hosts=1))
    assert DataPlaneConfig.model_validate(cfg.model_dump()) == cfg


@pytest.mark.parametrize(
    ("given", "where", "what"),
    [
        ({"impl": "redis"}, (), "impl 'redis' with backend 'simple' is no data plane here; there are: impl 'memory', "),
        ({"impl": "transfer_queue", "backend": "memory"}, (), "impl 'transfer_queue' with backend 'simple', "),
        ({"impl": "simple"}, (), "impl 'transfer_queue' with backend 'mooncake_cpu'"),
        ({"redis": {"url": ""}}, ("redis",), "Extra inputs are not permitted"),
        ({"memory": {}}, ("memory",), "Extra inputs are not permitted"),
        ({"impl": "transfer_queue", "simple": {"units": 2}}, ("simple", "units"), "Extra inputs are not permitted"),
        (
            {"impl": "transfer_queue", "backend": "mooncake_cpu", "cells": "tensors"},
            (),
            "backend 'mooncake_cpu' holds cells='bytes' only",
        ),
    ],
)
def test_a_config_of_no_plane_says_what_there_is(given: dict[str, object], where: tuple[str, ...], what: str) -> None:
    with pytest.raises(ValidationError) as raised:
        DataPlaneConfig.model_validate(given)
    (error,) = raised.value.errors()
    assert error["loc"] == where
    assert what in error["msg"]
