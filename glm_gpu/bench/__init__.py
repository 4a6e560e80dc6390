"""What this machine does with GLM-5.2: reads, kernels, decode, prefill, tiers, the server; each beside its limit."""
