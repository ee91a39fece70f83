"""The data plane on TransferQueue: rows in the memory of the queue's storage units, found through its controller.

client.py      the `DataPlaneClient`: deadlines, schemas, errors; what callers meet
rows.py        what one call does on the wire: its steps, each a round trip
store.py       where values lie; another backend replaces it
sockets.py     round trips that end: sockets, deadlines, lost peers
wire.py        a checked column as the queue holds it, and back
connection.py  starting the queue, attaching to it, ending it
"""

from rollout_reassembler.data_plane.transfer_queue.client import TransferQueueDataPlane

__all__ = ["TransferQueueDataPlane"]
