"""The beginnings of prompts that need not be computed: in the pages of memory, or in conversations on disk."""

import logging
import threading
from collections.abc import Callable

from glm_gpu.conversations import ConversationStore, Found, Stopped
from glm_gpu.errors import CapacityError, GlmGpuError
from glm_gpu.pages import PagedCache, PagePool
from glm_gpu.prefix import PrefixTree

log = logging.getLogger(__name__)

# A conversation is read when it saves computing so many tokens: its file costs far less than that many rows.
_MIN_GAIN = 16


class Loading:
    """A conversation on its way from disk into a cache, on a thread of its own.

    Until `is_done`, and without `give_up`, nothing else may touch the cache.

    Args:
        cache: empty, with room for the conversation's rows.
        notify: called on that thread at the end, whatever it was.

    Attributes:
        error: why it failed; None where it did not, or was given up.
    """

    def __init__(
        self, conversations: ConversationStore, found: Found, cache: PagedCache, notify: Callable[[], None]
    ) -> None:
        self.found, self.cache = found, cache
        self.is_done = False
        self.error: Exception | None = None
        self._conversations, self._notify = conversations, notify
        self._is_wanted = True
        self._thread = threading.Thread(target=self._load, name="conversation", daemon=True)
        self._thread.start()

    def give_up(self) -> None:
        """Stop reading; the cache is empty and free again. Waits for the 4 MiB that are being read."""
        self._is_wanted = False
        self._thread.join()
        self.cache.release()

    def _load(self) -> None:
        try:
            self._conversations.load(self.found, self.cache, lambda: self._is_wanted)
        except Stopped:
            pass
        except (GlmGpuError, OSError) as error:
            self.error = error
        self.is_done = True
        self._notify()


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

    def share(self, cache: PagedCache, ids: list[int], notify: Callable[[], None]) -> Loading | None:
        """Begin an empty cache with the longest known beginning of `ids`. Never waits.

        Returns:
            What fills the cache from disk, for `loaded` once it is done; None where memory had as much.
        """
        match = self.tree.match(ids)
        found = self._conversations.find(ids, cache.max_length) if self._conversations else None
        if found is not None and found.num_common >= match.num_tokens + _MIN_GAIN:
            try:
                self._grow(cache, found.num_cached)
                return Loading(self._conversations, found, cache, notify)
            except CapacityError as error:
                log.warning("a conversation on disk is not used: %s", error)
                cache.release()
        self._share(cache, ids)
        return None

    def loaded(self, loading: Loading, ids: list[int]) -> None:
        """Keep of what was loaded the beginning that `ids` share; where it failed, begin with what memory knows."""
        cache = loading.cache
        try:
            if loading.error is not None:
                raise loading.error
            cache.truncate(loading.found.num_common)
        except (GlmGpuError, OSError) as error:
            log.warning("a conversation on disk is not used: %s", error)
            self._conversations.forget(loading.found)
            cache.release()
            self._share(cache, ids)
            return
        self.tree.insert(ids[: cache.length], cache.pages)

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

    def _share(self, cache: PagedCache, ids: list[int]) -> None:
        match = self.tree.match(ids)
        try:
            cache.share(match.pages, match.tail)
        except CapacityError:
            cache.share(match.pages)

    def _grow(self, cache: PagedCache, length: int) -> None:
        self.tree.evict(max(0, length // self._pool.page_tokens + 1 - self._pool.num_free))
        cache.grow(length)
