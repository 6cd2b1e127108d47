"""An inference executor as a package outside of rlite would bring it: it pushes tokens from a thread of its own.

Each worker serves one connection on a socket, and generates in a thread. The replica in the driver listens on that
socket. Nothing is pumped. Only what `rlite.runtime.replicas` and `rlite.engine.registry` declare is used of
rlite's engine.
"""
