"""What is done once for all compilers: the process that theirs are forked from imports this, and nothing else does."""

from triton.compiler.compiler import make_backend
from triton.runtime.cache import triton_key

from triton_gallery.recipes.gpus import GPUS
from triton_gallery.run.compiler import target_of

triton_key()  # reads all of Triton; what it returns is kept, as what backends do
for gpu in GPUS:
    make_backend(target_of(gpu)).hash()
