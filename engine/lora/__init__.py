"""LoRA adapters: files, memory tiers, slots."""
