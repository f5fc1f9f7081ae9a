"""The demo model with as many token ids and as long a context as tests take for granted."""

import json
import shutil
from pathlib import Path

IDS, CONTEXT = 8192, 8192
_COPIED = ("generation_config.json", "special_tokens_map.json", "tokenizer_config.json")


def write(source: Path, folder: Path) -> Path:
    """Ids beyond the demo model's are as unlikely as its padding, whose vector they share."""
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    for name in _COPIED:
        shutil.copy(source / name, folder / name)
    tensors = load_file(source / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    more = table[:1].expand(IDS - len(table), -1)
    tensors["model.embed_tokens.weight"] = torch.cat([table, more]).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config |= {"vocab_size": IDS, "max_position_embeddings": CONTEXT}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words |= {f"unused{number}": number for number in range(len(table), IDS)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder
