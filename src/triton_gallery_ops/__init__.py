"""Ops for PyTorch in Triton: each module is one op, made of torch and triton.

Import what you use, ``from triton_gallery_ops.softmax import softmax``. To
import the package itself imports no op, and so no Triton.
"""

__version__ = "0.1.0"
