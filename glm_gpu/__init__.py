"""glm-gpu: runs GLM-5.2 and its relatives at four bits on machines people own."""

from pathlib import Path as _Path

__version__ = "0.1.0"

# In a checkout kernels/, tiers/ and cli.py lie beside this folder; once installed they lie inside it.
_here = _Path(__file__).resolve().parent
if not (_here / "kernels").is_dir() and (_here.parent / "kernels").is_dir():
    __path__.append(str(_here.parent))
