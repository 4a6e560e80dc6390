"""Triton source of the kernels, compiled by glm_gpu.kernels.cubins; importing it needs Triton."""
