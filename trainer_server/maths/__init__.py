"""The maths of the algorithms: pure functions on tensors, fp32."""
