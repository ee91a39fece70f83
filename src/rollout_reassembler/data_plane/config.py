"""Everything that configures a data plane, in one place.

`impl` picks the adapter, `backend` the store behind it where it has several; the block named for the
chosen one holds what only that needs, and is checked by its own model (`backends.py`). The same config
goes to every process: the one that bootstraps the plane reads the sizes, all others only connect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    create_model,
    model_validator,
)

from rollout_reassembler.data_plane import backends
from rollout_reassembler.data_plane.backends import Backend


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
    quiesced: PositiveFloat = Field(600.0, description="how long a write waits while the plane is quiesced")


def _bytes_of(size: object) -> object:
    try:
        return _SIZES.validate_python(size)
    except ValidationError as error:
        raise ValueError(f"{size!r:.80} is no size; write for example 512MiB or 64GiB, or the bytes") from error


_SIZES = TypeAdapter(ByteSize)

Size = Annotated[PositiveInt, BeforeValidator(_bytes_of)]
"""Bytes, as a number or as text with a unit."""


class SimpleBackendConfig(_Block):
    """TransferQueue's own in-memory storage units, one CPU each."""

    num_storage_units: PositiveInt = 1
    total_storage_size: PositiveInt = Field(1_000_000, description="rows that all units together hold")


class MooncakeCpuBackendConfig(_Block):
    """A Mooncake store in host memory. Sizes are bytes, addresses `host:port`.

    Memory belongs to *memory hosts*, processes that do nothing else; those who write and read mount
    none, so that their death takes no row along. One master serves one run at a time.
    """

    master_server_address: str = "127.0.0.1:50051"
    start_master: bool = Field(False, description="start a master there and end it with the plane; port 0: a free one")
    metadata_server: str = "P2PHANDSHAKE"
    local_hostname: str = Field("127.0.0.1", description="this node as others reach it; empty: as Ray knows it")
    protocol: Literal["tcp", "rdma"] = "tcp"
    device_name: str = Field("", description="RDMA devices, comma-separated; rdma needs them")
    memory_hosts: NonNegativeInt = Field(0, description="memory hosts to start as Ray actors; 0: they run already")
    global_segment_size: Size = Field(1 << 30, description="memory of each memory host")
    local_buffer_size: Size = Field(256 << 20, description="what one call of one client may move at a time")
    client_segment_size: NonNegativeInt = Field(0, description="memory that each client gives; lost when it dies")

    @model_validator(mode="after")
    def _rdma_names_its_devices(self) -> Self:
        # With no name the engine looks for devices itself, finds none, and goes on over TCP without a word.
        if self.protocol == "rdma" and not self.device_name:
            raise ValueError("protocol 'rdma' needs device_name, for example 'mlx5_0'; there is no fall back to TCP")
        return self


class DataPlaneConfig(_Block):
    """Which data plane to use and how to reach it.

    `cells` says how TransferQueue holds jagged columns: `"bytes"` (one bytes value a cell, or an array
    where it is large; several times cheaper, read through this package's client) or `"tensors"` (jagged
    tensors that any TransferQueue client reads).

    A backend of another distribution is chosen by `impl`, and its block is an attribute of its name like
    those below. Whatever else is not named here is refused.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    enabled: bool = True
    impl: str = Field("memory", description="memory, transfer_queue, or the name of an installed backend")
    backend: str = Field("simple", description="where rows of transfer_queue are: simple or mooncake_cpu")
    cells: Literal["bytes", "tensors"] = "bytes"
    deadlines: Deadlines = Deadlines()
    simple: SimpleBackendConfig = SimpleBackendConfig()
    mooncake_cpu: MooncakeCpuBackendConfig = MooncakeCpuBackendConfig()
    security: Literal["auto", "plain", "curve", "trusted_network"] = Field(
        "auto",
        description="how the queue's sockets know who belongs to the plane. plain: by a password, readable on the "
        "wire. curve: by keys, encrypted, 3 ms of CPU a MB. auto: plain where all of the Ray cluster is on loopback, "
        "curve elsewhere. trusted_network: not at all; whoever reaches a port of the queue can run code in it. The "
        "process that starts the plane decides, all others take what runs; plain and curve refuse to attach to "
        "anything else",
    )

    @property
    def chosen(self) -> Backend:
        """The backend that `impl` and `backend` name."""
        return backends.chosen(self.impl, self.backend)

    @property
    def block(self) -> Any:
        """The settings of the chosen backend, an instance of its `config`. `AttributeError` where it takes none."""
        return getattr(self, self.chosen.name)

    @model_validator(mode="before")
    @classmethod
    def _check_blocks(cls, given: Any) -> Any:
        """Check each block that is no field below by the model of the backend of its name; the chosen one has one."""
        if not isinstance(given, Mapping):
            return given
        blocks = {name: block for name, block in given.items() if name not in cls.model_fields}
        impl = given.get("impl")
        if isinstance(impl, str) and impl not in given and (backend := backends.find(impl)) and backend.config:
            blocks[impl] = {}
        models: Any = {
            name: (backend.config, ...) for name in blocks if (backend := backends.find(name)) and backend.config
        }
        checked = create_model(cls.__name__, __config__=ConfigDict(extra="forbid"), **models).model_validate(blocks)
        return {**given, **{name: getattr(checked, name) for name in models}}

    @model_validator(mode="after")
    def _holds_such_cells(self) -> Self:
        if self.cells not in self.chosen.cells:
            kinds = " or ".join(f"cells={kind!r}" for kind in self.chosen.cells)
            raise ValueError(f"backend {self.chosen.name!r} holds {kinds} only")
        return self
