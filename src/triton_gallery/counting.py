"""Counts the statements of kernels, and the bytes that PyTorch's operators read and write.

A lesson imports what it uses. Its page, and the script and the notebook that readers take, have the text instead. This
text counts as the lesson's own code: after a change, the lessons that use it have to be recorded again.
"""

import ast
import inspect

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def statements(*kernels):
    """Count the statements in the bodies of kernels, without docstrings."""
    count = 0
    for kernel in kernels:
        (function,) = ast.parse(inspect.getsource(kernel.fn)).body
        nodes = ast.walk(function)
        count += sum(isinstance(node, ast.stmt) for node in nodes) - 1
        count -= ast.get_docstring(function) is not None
    return count


class Traffic(TorchDispatchMode):
    """Count the bytes that PyTorch's operators read and write.

    ``operators`` has of each its name, the bytes of the tensors that it takes,
    and those of the tensors that it returns. Views and empty tensors move
    nothing, and are left out.
    """

    def __init__(self):
        """Begin with no operators."""
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        """Run an operator, and note what it reads and writes."""
        out = operator(*args, **(kwargs or {}))
        if not operator.is_view and "empty" not in str(operator):
            read = sum(getattr(t, "nbytes", 0) for t in tree_leaves(args))
            written = sum(getattr(t, "nbytes", 0) for t in tree_leaves(out))
            self.operators.append((str(operator), read, written))
        return out

    @property
    def moved(self):
        """Return the bytes that all of them read and write."""
        return sum(read + written for _, read, written in self.operators)
