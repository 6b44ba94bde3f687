"""Moves payload between a client and the broker: frames of gRPC streams, or shared memory on one host."""
