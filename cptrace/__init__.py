"""Reads traces of context-parallel training and explains where the time goes."""

__version__ = "0.1.0"
