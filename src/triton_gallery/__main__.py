"""`python -m triton_gallery`."""

import sys

from triton_gallery.cli import main

sys.exit(main())
