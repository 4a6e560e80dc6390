"""What the store counts: uses by tier and phase, reads by their reason, and what prefetching was worth."""

from dataclasses import asdict, dataclass, field

from glm_gpu.batch import Phase


@dataclass
class PhaseCounters:
    """Distinct experts asked for in passes of one phase, by where they were when the pass began.

    `vram`, `locked` and `ram` are hits. An expert read during the pass is a miss, `prefetched` if it had arrived before
    it was asked for, `late` if it was on its way, `missed` if nobody had thought of it.
    """

    vram: int = 0
    locked: int = 0
    ram: int = 0
    prefetched: int = 0
    late: int = 0
    missed: int = 0

    @property
    def uses(self) -> int:
        return self.vram + self.locked + self.ram + self.prefetched + self.late + self.missed

    @property
    def hit_rate(self) -> float:
        """Share of uses that were hits; 1 when there were none."""
        return (self.vram + self.locked + self.ram) / self.uses if self.uses else 1.0


@dataclass(frozen=True)
class TierReport:
    """One tier as it stands: experts in it, the bytes they take and may take, their share of all uses, and hits."""

    name: str
    num_experts: int
    used_bytes: int
    capacity_bytes: int
    heat_share: float
    hits: dict[Phase, int]


@dataclass
class Counters:
    """Since the store was opened.

    Attributes:
        wait_s: time that passes stood still for reads.
        read_s: time that threads spent reading, added over threads.
        guessed, guessed_right: experts predicted for the next layer, and those of them it then used.
        needed: experts used in layers that had been predicted.
        wasted: prefetched experts that were evicted before any use.
        copied_ahead: experts copied up to a device because they were predicted for its next layer.
        ahead_used, ahead_late: those of them that were then used, and those that were used while still on their way.
        ahead_wasted: those that were pushed out before any use.
        evictions, promotions: slots emptied for another expert; experts read because heat said so.
        read_errors: reads that failed.
    """

    phases: dict[Phase, PhaseCounters] = field(
        default_factory=lambda: {"prefill": PhaseCounters(), "decode": PhaseCounters()}
    )
    wait_s: float = 0.0
    read_s: float = 0.0
    guessed: int = 0
    guessed_right: int = 0
    needed: int = 0
    wasted: int = 0
    copied_ahead: int = 0
    ahead_used: int = 0
    ahead_late: int = 0
    ahead_wasted: int = 0
    evictions: int = 0
    promotions: int = 0
    read_errors: int = 0

    @property
    def recall(self) -> float | None:
        """Share of the experts used that had been predicted; None before any prediction."""
        return self.guessed_right / self.needed if self.needed else None

    def as_dict(self) -> dict:
        """For status files and --json."""
        return asdict(self) | {"recall": self.recall}
