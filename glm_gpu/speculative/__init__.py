"""Drafts of what may come next, and how many of them are worth verifying.

A drafter guesses tokens; one ordinary pass over the guesses verifies them all, and those that the model would have
chosen anyway are kept. The answer is the plain one; only the number of passes changes.
"""

from glm_gpu.speculative.acceptance import MAX_WIDTH
from glm_gpu.speculative.draft import Draft
from glm_gpu.speculative.mtp import MtpDrafter
from glm_gpu.speculative.ngram import NgramDrafter
from glm_gpu.speculative.speculator import SpeculateMode, Speculator, Turn, propose
from glm_gpu.speculative.width import Offer, WidthPolicy

__all__ = [
    "MAX_WIDTH",
    "Draft",
    "MtpDrafter",
    "NgramDrafter",
    "Offer",
    "SpeculateMode",
    "Speculator",
    "Turn",
    "WidthPolicy",
    "propose",
]
