"""Every error a caller may want to tell apart; each message says what, found against expected, and the next step."""

# A list of every shard of the largest model that is missing has 6,000.
_MAX_CHARS = 8000


class GlmGpuError(Exception):
    """The root: whatever the program refuses with one line and exit code 1.

    The message is cut where it is too long, in the middle, whatever a file or a caller put into it.
    """

    def __init__(self, message: str) -> None:
        half = _MAX_CHARS // 2
        super().__init__(message if len(message) <= _MAX_CHARS else f"{message[:half]} … {message[-half + 3 :]}")


class CheckpointError(GlmGpuError):
    """A model folder, shard, tensor, or side file does not add up."""


class UnsupportedModelError(GlmGpuError):
    """The checkpoint is sound, but of a kind this program does not run."""


class DeviceError(GlmGpuError):
    """A device is missing, unsuitable, or failed."""


class CapacityError(GlmGpuError):
    """Memory, disk, or context does not suffice; the message holds the numbers."""


class RequestError(GlmGpuError):
    """A caller asked for something that cannot be done; nothing was changed."""


class OverloadedError(GlmGpuError):
    """Too much is asked at once; the same request may succeed later."""
