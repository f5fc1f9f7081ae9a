"""The paths of the demo model and its adapters."""

from pathlib import Path

DEMO_DIR = Path(__file__).resolve().parent
MODEL_DIR = DEMO_DIR / "weights"
ADAPTERS = {name: DEMO_DIR / "adapters" / name for name in ("formal", "pirate", "json")}
RECIPE = DEMO_DIR / "recipe.json"
PROMPTS = DEMO_DIR / "prompts.json"
