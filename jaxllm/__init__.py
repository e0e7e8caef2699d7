"""jaxllm: compose, train, time and serve language models in JAX. See `python -m jaxllm.run --help`."""

__version__ = "0.1.0"
