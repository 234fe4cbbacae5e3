"""SPPO: rows in chunks that go through a pipeline one behind the other, their activations partly in host memory."""
