"""The beginnings of prompts that need not be computed: in the pages of memory, or in conversations on disk."""

import logging
from pathlib import Path

from glm_gpu.conversations import ConversationStore
from glm_gpu.errors import CapacityError, CheckpointError, RequestError
from glm_gpu.pages import PagedCache, PagePool
from glm_gpu.prefix import PrefixTree

log = logging.getLogger(__name__)

# A conversation is read when it saves computing so many tokens: its file costs far less than that many rows.
_MIN_GAIN = 16


class Beginnings:
    """Gives a new sequence what is known of its tokens. Not safe for several threads.

    Args:
        conversations: asked where memory knows much less; None for memory alone.

    Attributes:
        tree: what memory knows.
    """

    def __init__(self, pool: PagePool, conversations: ConversationStore | None = None) -> None:
        self.tree = PrefixTree(pool)
        self._pool = pool
        self._conversations = conversations

    def share(self, cache: PagedCache, ids: list[int]) -> None:
        """Begin an empty cache with the longest known beginning of `ids`.

        A conversation on disk is read whole, which waits, and kept as far as its tokens are those of `ids`.
        """
        match = self.tree.match(ids)
        found = self._conversations.find(ids, cache.max_length) if self._conversations else None
        is_worth_it = found is not None and found[1] >= match.num_tokens + _MIN_GAIN
        if is_worth_it and self._load(cache, ids, *found):
            return
        match = self.tree.match(ids)  # room for what could not be loaded may have cost pages of the first one
        try:
            cache.share(match.pages, match.tail)
        except CapacityError:
            cache.share(match.pages)

    def keep(self, max_bytes: int) -> int:
        """Save what memory knows, the most recently used first, until so many bytes: how many conversations.

        Raises:
            OSError: the folder cannot be written.
        """
        assert self._conversations is not None
        num_saved = 0
        for ids, pages in self.tree.sequences():
            max_bytes -= len(ids) * self._pool.layout.bytes_per_token
            if max_bytes < 0:
                break
            cache = PagedCache(self._pool, len(pages) * self._pool.page_tokens)
            cache.share(pages)
            num_saved += self._conversations.save(ids, cache)
            cache.release()
        return num_saved

    def _load(self, cache: PagedCache, ids: list[int], path: Path, num_tokens: int) -> bool:
        """Take a conversation from disk; False when it is damaged or there is no room for it."""
        assert self._conversations is not None
        try:
            self._conversations.load(path, cache, lambda num_cached: self._grow(cache, num_cached))
            cache.truncate(num_tokens)
        except (CapacityError, CheckpointError, RequestError) as error:
            log.warning("a conversation on disk is not used: %s", error)
            cache.release()
            return False
        self.tree.insert(ids[:num_tokens], cache.pages)
        return True

    def _grow(self, cache: PagedCache, length: int) -> None:
        self.tree.evict(max(0, length // self._pool.page_tokens + 1 - self._pool.num_free))
        cache.grow(length)
