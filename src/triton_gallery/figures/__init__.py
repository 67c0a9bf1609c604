"""Recorded figures, all of them: one by one, what they come to, and against another revision's."""
