"""Operations on a device: each function launches Triton kernels on the launcher's current stream and returns at once.

Every function takes a launcher (a card, or the simulator), arrays in that device's memory, and plain numbers. It
allocates nothing and waits for nothing: outputs and workspaces are the caller's. Arrays are C-contiguous. Row t of an
output depends on row t of the inputs alone, bit for bit, whatever the number of rows.

Storage of activations between kernels is f32, or 16-bit (bf16 or f16, one of them throughout a model). "Quarter-split"
names the order in which 16-bit activations meet packed weights: x[t, 4i + j] lies at [t, j * (I / 4) + i]. Four
consecutive weights lie in one word of a row, so a kernel unpacks words without moving anything. Sums are f32.

Nothing here imports Triton; the kernels' own source is in `source/`, compiled when it is not in a cache.
"""
