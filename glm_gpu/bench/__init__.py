"""What this machine's CPU does with GLM-5.2: reads, kernels, decode, prefill, tiers, the server; limits beside."""
