"""What the types have in common whose values are kept as JSON.

Such a type is the one description of its part of a file: by it msgspec encodes and decodes, and refuses what does not
fit. A field without a default has to be in the file.
"""

from typing import Annotated

from msgspec import Meta, Struct

Hash = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
Date = Annotated[str, Meta(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00\Z")]  # ISO 8601, in UTC


class Data(Struct, frozen=True, forbid_unknown_fields=True):
    """A value that is kept as JSON."""
