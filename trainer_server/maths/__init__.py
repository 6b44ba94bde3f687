"""The maths that algorithms are made of: pure functions on tensors, fp32."""
