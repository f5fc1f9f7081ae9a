"""How a model's files say that its embeddings are pooled, in the layout of sentence-transformers."""

import json
import logging
from pathlib import Path

from engine.regular_files import read_text

log = logging.getLogger("tollhouse.engine")

_MODES = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}


def declared_pooling(path: Path | None) -> str:
    """The pooling of a checkpoint: the last token's state where no file names another. Empty for one
    that cannot be computed; the model then serves no embeddings."""
    file = path / "1_Pooling" / "config.json" if path is not None else None
    if file is None or not file.is_file():
        return "last"
    try:
        content = json.loads(read_text(file))
        on = [name for name, value in content.items() if name.startswith("pooling_mode_") and value]
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        log.warning("%s cannot be read (%s): the model serves no embeddings", file, error)
        return ""
    if len(on) == 1 and on[0] in _MODES:
        return _MODES[on[0]]
    log.warning("%s names the pooling %s: the model serves no embeddings", file, " + ".join(on))
    return ""
