"""From an FP8 or BF16 checkpoint to a container of packed weights; what a container holds, and whether it is whole."""
