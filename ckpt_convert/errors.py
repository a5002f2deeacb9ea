"""The one error of this package."""


class ConversionError(ValueError):
    """A checkpoint that cannot be found, read, converted or written; says what to do about it."""
