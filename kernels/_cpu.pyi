"""The C extension. Arguments are checked for type, contiguity and size; outputs are written in place."""

import numpy as np

def available() -> list[str]: ...
def implementation() -> str: ...
def select(name: str) -> None: ...
def set_threads(num_threads: int) -> None: ...
def get_threads() -> int: ...
def attend_latent(
    q: np.ndarray,
    cache: np.ndarray,
    rows: np.ndarray | None,
    counts: np.ndarray,
    scale: float,
    out: np.ndarray,
) -> None: ...
def attend_explicit(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    rows: np.ndarray | None,
    counts: np.ndarray,
    scale: float,
    out: np.ndarray,
) -> None: ...
def index_scores(
    q: np.ndarray,
    head_weights: np.ndarray,
    keys: np.ndarray,
    counts: np.ndarray,
    scale: float,
    out: np.ndarray,
) -> None: ...
def select_top(scores: np.ndarray, counts: np.ndarray, rows: np.ndarray, num: np.ndarray) -> None: ...
def norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, eps: float, out: np.ndarray) -> None: ...
def silu_mul(gate: np.ndarray, up: np.ndarray, out: np.ndarray) -> None: ...
def route(
    x: np.ndarray,
    gate: np.ndarray,
    bias: np.ndarray | None,
    n_group: int,
    topk_group: int,
    norm_topk_prob: int,
    scale: float,
    ids: np.ndarray,
    weights: np.ndarray,
) -> None: ...
def rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, is_interleaved: int, out: np.ndarray) -> None: ...
def read_all(data: np.ndarray, sums: np.ndarray) -> None: ...
def multiply_add(sums: np.ndarray) -> float: ...
