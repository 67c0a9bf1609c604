"""The machinery behind the Triton Gallery: a Sphinx extension and a command line."""

__version__ = "0.1.0"
