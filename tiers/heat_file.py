"""Heat between runs: one file a model in the state folder."""

import logging
from pathlib import Path

from glm_gpu.state import read_state, write_state
from glm_gpu.tiers.heat import Heat

log = logging.getLogger(__name__)

_KIND, _VERSION = "heat", 1


class HeatFile:
    """Keeps one model's heat. Nothing here fails: what cannot be read or written is told of in one warning.

    Of two programs that run the same model at once, the one that ends last leaves its heat.

    Args:
        folder: the state folder, or None where nothing can be kept.
        fingerprint: the checkpoint's.
        is_read_only: never write.
    """

    def __init__(self, folder: Path | None, fingerprint: str, is_read_only: bool = False) -> None:
        self.path = None if folder is None else folder / "heat" / f"{fingerprint}.heat"
        self._fingerprint = fingerprint
        self._can_write = self.path is not None and not is_read_only

    def load(self, num_layers: int, num_experts: int) -> Heat:
        """The heat that earlier runs left, weighing little; a fresh one when there is none to trust."""
        heat = None if self.path is None else read_heat(self.path, self._fingerprint, num_layers, num_experts)
        if heat is None:
            return Heat(num_layers, num_experts)
        heat.begin_run()
        return heat

    def save(self, heat: Heat) -> None:
        """Write the heat for the next run."""
        if not self._can_write:
            return
        try:
            write_state(self.path, _KIND, _VERSION, {"fingerprint": self._fingerprint}, heat.arrays())
        except OSError as error:
            self._can_write = False
            log.warning(
                "%s: heat is not kept (%s); set XDG_STATE_HOME to a folder that can be written",
                self.path,
                error.strerror,
            )


def read_heat(path: Path, fingerprint: str, num_layers: int, num_experts: int) -> Heat | None:
    """The heat in a file, as it was written; None, told of in one warning, when there is none to trust."""
    content = read_state(path, _KIND, _VERSION)
    if content is None:
        return None
    header, arrays = content
    if header.get("fingerprint") != fingerprint:
        log.warning("%s: not used (belongs to another model); starting afresh", path)
        return None
    heat = Heat(num_layers, num_experts)
    try:
        heat.restore(arrays)
    except ValueError as error:
        log.warning("%s: not used (%s); starting afresh", path, error)
        return None
    return heat
