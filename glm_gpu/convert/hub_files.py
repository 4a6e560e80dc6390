"""HubFiles: the files of a hub repository at one commit, read in ranges, fetched so that a rerun goes on."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from glm_gpu.convert.ahead import in_order
from glm_gpu.convert.hashing import hash_file
from glm_gpu.errors import CheckpointError, RequestError

_RANGE_BYTES = 16 << 20
_RANGES_AHEAD = 8
_TIMEOUT_S = 60


class HubFiles:
    """Every file of a repository at the commit that a revision names when this is made.

    Attributes:
        revision: the commit.
        sizes: bytes of each file, by name.

    Raises:
        RequestError: on creation: huggingface_hub is missing, or there is no such repository or revision.
        CheckpointError: on creation and in every method: the hub cannot be reached, or says no.
    """

    def __init__(self, repository: str, revision: str | None) -> None:
        try:
            import huggingface_hub
        except ImportError:
            raise RequestError("a hub repository needs huggingface_hub: pip install 'glm-gpu[hub]'") from None
        self._repository = repository
        with self._failures("its files cannot be listed"):
            api = huggingface_hub.HfApi()
            info = api.model_info(repository, revision=revision, files_metadata=True)
        self._endpoint = api.endpoint
        self.revision: str = info.sha
        self.sizes = {file.rfilename: file.size for file in info.siblings}
        self._hashes = {file.rfilename: file.lfs.sha256 for file in info.siblings if file.lfs}
        self._blobs = {file.rfilename: file.blob_id for file in info.siblings}
        self._executor = ThreadPoolExecutor(_RANGES_AHEAD)

    def close(self) -> None:
        """End what is being fetched."""
        self._executor.shutdown(cancel_futures=True)

    def identity(self, name: str) -> str:
        """Size and hash of a file as the hub gives them."""
        return f"{self.sizes[name]} bytes, {self._hashes.get(name) or self._blobs[name]}"

    def read(self, name: str) -> bytes:
        """All of a small file."""
        if name not in self.sizes:
            raise CheckpointError(f"{self._repository} at {self.revision} has no {name}; give a model repository")
        return self.read_range(name, 0, self.sizes[name])

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Bytes begin..end-1 of a file; tried again a few times where the connection fails."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

        if begin == end:
            return b""
        url = hf_hub_url(self._repository, name, revision=self.revision, endpoint=self._endpoint)
        headers = {**build_hf_headers(), "Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        with self._failures(f"{name} cannot be read"):
            response = http_backoff("GET", url, headers=headers, timeout=_TIMEOUT_S)
            hf_raise_for_status(response)
        data = response.content
        if response.status_code == 200:  # a server that knows no ranges sends everything
            data = data[begin:end]
        if len(data) != end - begin:
            raise CheckpointError(
                f"{self._repository}: {name} gave {len(data)} bytes, expected {end - begin}; run the same command again"
            )
        return data

    def fetch(self, name: str, folder: Path, stop: threading.Event) -> None:
        """Make a file be in a folder; under its own name it is complete and has the hub's hash.

        What an interrupted call has got of it lies in NAME.part, and is gone on from.

        Raises:
            CheckpointError: also when what arrived has another hash; or `stop` was set.
            OSError: the disk is full.
        """
        path, part = folder / name, folder / (name + ".part")
        if path.exists():
            return
        with part.open("ab") as file:
            done = file.tell()
            if done > self.sizes[name]:
                file.truncate(0)
                done = 0
            for data in self._ranges(name, done):
                if stop.is_set():
                    raise CheckpointError(f"{self._repository}: fetching {name} was interrupted; run it again")
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        expected = self._hashes.get(name)
        if expected is not None and (found := hash_file(part)) != expected:
            part.unlink()
            raise CheckpointError(
                f"{self._repository}: {name} arrived with SHA-256 {found}, the hub says {expected}; "
                "run the same command again to fetch it anew"
            )
        part.rename(path)

    def _ranges(self, name: str, begin: int) -> Iterator[bytes]:
        """The rest of a file in order, several ranges on their way at a time."""
        starts = range(begin, self.sizes[name], _RANGE_BYTES)
        return in_order(self._executor, lambda start: self._range_from(name, start), starts, _RANGES_AHEAD)

    def _range_from(self, name: str, start: int) -> bytes:
        return self.read_range(name, start, min(start + _RANGE_BYTES, self.sizes[name]))

    @contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        from huggingface_hub import errors

        try:
            yield
        except errors.GatedRepoError:
            raise CheckpointError(
                f"{self._repository}: access must be granted first; ask for it on its page, then `hf auth login`"
            ) from None
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
            raise RequestError(f"{self._repository}: no such repository or revision ({_line(error)})") from None
        # HfHubHTTPError's own base is the HTTP library's, which is requests or httpx by version
        except (OSError, *errors.HfHubHTTPError.__bases__) as error:
            raise CheckpointError(
                f"{self._repository}: {what} ({_line(error)}); check the network, or fetch it and give the folder"
            ) from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
