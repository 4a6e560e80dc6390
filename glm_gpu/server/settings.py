"""What the one who starts a server decides."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ServerSettings:
    """How a server treats its clients.

    Args:
        model_name: what /v1/models lists.
        aliases: further names that requests may use for it.
        api_key: asked of every request but for the page and /health; None asks for none.
        allowed_hosts: names and addresses that the Host header may have, lower case; empty allows all.
        max_body_bytes: of a request.
        max_connections: requests being answered at once, streams included.
        keep_alive_s: after so long without data a stream gets a comment.
        body_timeout_s: longest wait for a request's body, and a second more for each 20 kB of it.
        max_choices: greatest `n`, and prompts of one completion request.
    """

    model_name: str
    aliases: frozenset[str] = frozenset()
    api_key: str | None = field(default=None, repr=False)
    allowed_hosts: frozenset[str] = frozenset()
    max_body_bytes: int = 32 * 1024**2
    max_connections: int = 256
    keep_alive_s: float = 5.0
    body_timeout_s: float = 30.0
    max_choices: int = 128

    @property
    def names(self) -> frozenset[str]:
        """Every name of the model."""
        return self.aliases | {self.model_name}
