"""An open file with some of its methods replaced."""


class WrappedFile:
    """Passes on everything that a subclass does not define."""

    def __init__(self, file) -> None:
        self._file = file

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._file.close()

    def __getattr__(self, name):
        return getattr(self._file, name)
