"""The data plane on TransferQueue: rows in the memory of the queue's storage units, found through its controller.

client.py      the `DataPlaneClient`: deadlines, schemas, errors; what callers meet
rows.py        what one call does on the wire: its steps, each a round trip
controller.py  what a client asks the queue's controller
store.py       where values lie; another backend replaces it
sockets.py     round trips that end: sockets, deadlines, lost peers
wire.py        a checked column as the queue holds it, and back
calls.py       what an error says about its call; the processes that a call depends on
checkpoint.py  the queue's state on disk
connection.py  starting the queue, attaching to it, ending it
cluster.py     the Ray cluster that it runs in, on this machine alone or joined
keys.py        what a plane's sockets prove to each other
handshake.py   connecting with keys, and why a peer does not take them
servers.py     the queue's own processes, with keys
environment.py the version that this adapter was measured with, and what the queue reads from the environment
backend.py     how the plane is named, built and examined

Nothing is imported here: to look at the backend needs neither torch nor TransferQueue.
"""
