"""The data plane on Mooncake: the queue's controller knows the rows, a Mooncake store holds their values.

client.py       the `DataPlaneClient`: the queue's, over rows whose values are here, with checkpoints of its own
values.py       the values of rows as objects of a store
objects.py      a row as objects, and back
store.py        the store itself: its quirks end here
connection.py   starting master, controller and memory hosts; attaching
master.py       a Mooncake master as a child process
host.py         a memory host: the process that owns a segment
participant.py  checkpoint commands, run by an owner of memory
owners.py       the handles by which a driver commands owners
checkpoint.py   the driver's side of a checkpoint
backend.py      how the plane is named, built and examined

Nothing is imported here: a memory host needs neither torch nor TransferQueue.
"""
