"""Unary calls of a gRPC service over a socket of this host: the same messages, handlers and errors, without HTTP/2.

In Python a gRPC call costs a millisecond or more after a rest, on either side mostly in getting from one thread to
another; such a call has one hop on each side. gRPC remains the way for other hosts, for streams and for people.
"""
