"""Sessions to files and back, so that a conversation goes on in another process."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glm_gpu.cache import KVCache
from glm_gpu.conversations import Saved, load_conversation, save_conversation
from glm_gpu.engine import Engine
from glm_gpu.errors import RequestError
from glm_gpu.session import Session, common_prefix


def save_session(
    path: Path, engine: Engine, session: Session, ids: Sequence[int], note: dict[str, Any] | None = None
) -> None:
    """Write a session's tokens and the rows that it has of them.

    Args:
        ids: all tokens, of which the last need have no rows.

    Raises:
        RequestError: the file cannot be written.
    """
    num_cached = common_prefix(session.cached_ids, ids)
    try:
        save_conversation(path, engine.row_identity, ids, session.cache, num_cached, note)
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror}; the conversation is not saved") from None


def resume_session(path: Path, engine: Engine, session: Session) -> Saved:
    """Fill an empty session from a file; on any error it is empty still.

    Raises:
        CheckpointError: the file is damaged.
        RequestError: it is another model's, or longer than the context.
    """

    def room(num_cached: int) -> KVCache:
        if num_cached >= engine.context:
            raise RequestError(
                f"{path} holds {num_cached} tokens and the context {engine.context}; open the model with a larger "
                "--context"
            )
        return session.cache

    saved, _ = load_conversation(path, engine.row_identity, room)
    session.resume(saved.ids[: saved.num_cached])
    return saved
