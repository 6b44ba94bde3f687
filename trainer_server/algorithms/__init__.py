"""The algorithms, each made of the functions in trainer_server.maths."""
