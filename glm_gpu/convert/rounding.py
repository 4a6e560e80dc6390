"""The two ways to choose a packed weight's scales, by name."""

from typing import Literal

Rounding = Literal["rtn", "search"]
# Lower perplexity on the demo's held-out texts and lower logit error on the reference fixture at every width that has
# candidates; `bench/rounding.py` prints both.
DEFAULT_ROUNDING: Rounding = "search"
