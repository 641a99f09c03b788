"""The version, read by the build and at run time."""

__version__ = "0.1.0"
