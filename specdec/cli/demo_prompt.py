"""The prompt of `specdec demo`: the beginning of a small module, written for it and so in no training text."""

DEMO_PROMPT = '''\
"""Read and write inventories kept as plain text, one item a line."""

import os
import re


class InventoryError(Exception):
    """Raised when a line cannot be understood."""


class Inventory:
    """A collection of items, each with a name, a count and an optional place."""

    def __init__(self, items=None):
        self.items = dict(items or {})
        self.places = {}

    def add(self, name, count=1, place=None):
        """Add count items of the given name."""
        if not isinstance(name, str):
            raise TypeError("name must be a string, not %r" % type(name))
        if count < 0:
            raise ValueError("count must not be negative")
        self.items[name] = self.items.get(name, 0) + count
        if place is not None:
            self.places[name] = place

    def remove(self, name, count=1):
        """Remove count items of the given name."""
        if name not in self.items:
            raise KeyError(name)
        self.items[name] -= count
        if self.items[name] == 0:
            del self.items[name]

    def __len__(self):
        return'''
