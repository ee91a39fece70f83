"""Everything that configures a data plane, in one place.

`impl` picks the adapter, `backend` the store behind it; the block named for the backend holds what
only that store needs. The same config goes to every process: the one that bootstraps the plane
reads the sizes, all others only connect.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Deadlines(_Block):
    """How long each kind of call may take, in seconds. Every wait in the system is bounded by one of these."""

    read: PositiveFloat = 60.0
    write: PositiveFloat = 60.0
    clear: PositiveFloat = 30.0
    metadata: PositiveFloat = 15.0
    connect: PositiveFloat = 60.0
    bootstrap: PositiveFloat = 120.0
    checkpoint: PositiveFloat = 600.0


class SimpleBackendConfig(_Block):
    """TransferQueue's own in-memory storage units, one CPU each."""

    num_storage_units: PositiveInt = 1
    total_storage_size: PositiveInt = Field(1_000_000, description="rows that all units together hold")


class MooncakeCpuBackendConfig(_Block):
    """A Mooncake store in host memory. Sizes are bytes, addresses `host:port`."""

    master_server_address: str = "127.0.0.1:50051"
    metadata_server: str = "P2PHANDSHAKE"
    local_hostname: str = "127.0.0.1"
    protocol: Literal["tcp", "rdma"] = "tcp"
    device_name: str = ""
    global_segment_size: PositiveInt = 1 << 30
    local_buffer_size: PositiveInt = 256 << 20


class DataPlaneConfig(_Block):
    """Which data plane to use and how to reach it.

    `cells` says how TransferQueue holds jagged columns: `"bytes"` (one bytes value a cell, several
    times cheaper; read through this package's client) or `"tensors"` (jagged tensors that any
    TransferQueue client reads).
    """

    enabled: bool = True
    impl: Literal["memory", "transfer_queue"] = "memory"
    backend: Literal["simple", "mooncake_cpu"] = "simple"
    cells: Literal["bytes", "tensors"] = "bytes"
    deadlines: Deadlines = Deadlines()
    simple: SimpleBackendConfig = SimpleBackendConfig()
    mooncake_cpu: MooncakeCpuBackendConfig = MooncakeCpuBackendConfig()
