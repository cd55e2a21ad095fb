"""A small codec and a small dialogue model, written for the tests of the PersonaPlex adapters.

Nothing of the vendor's is here. What is alike are the names that the adapters look for and how state is kept: pasts
that each call rebinds to a slice of what it has joined and that are None before the first frame, padding that the host
remembers, what is left over of a sum, rings of keys and values, and a ring of tokens that an int, `offset`, points to.
"""

__version__ = "0.1.0"
