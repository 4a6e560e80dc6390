"""The forward pass: how GLM-5.2 (`glm_moe_dsa`) and OLMoE turn tokens into logits."""
