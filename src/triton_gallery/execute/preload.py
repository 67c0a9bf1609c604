"""Imported by the fork server of `supervisor` as it starts: imports what recipes import, so that their forks need not.

It touches no GPU, as CUDA would not survive the fork.
"""

import gc
import json
import os
from contextlib import suppress
from importlib import import_module

from triton_gallery.execute import PRELOAD

modules, variables = json.loads(os.environ[PRELOAD])
os.setpgrp()  # Ctrl-C is for the build, which then ends this process
os.environ.clear()
os.environ.update(variables)
for module in modules:
    with suppress(Exception):  # the recipe that needs it will say so
        import_module(module)
gc.freeze()  # a collection would write to the memory that all recipes share
