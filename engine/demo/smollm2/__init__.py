"""Two LoRA adapters for SmolLM2-135M-Instruct, and how they are trained."""
