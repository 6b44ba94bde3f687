"""How payload gets to and from the broker: through shared memory on one host, as raw frames of gRPC otherwise."""
