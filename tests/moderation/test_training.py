"""Training is seeded: two processes with different hash seeds make the same weights."""

import os
import subprocess
import sys

import pytest

_TRAIN = """
import hashlib, random
from moderation.classifiers import train_convolution as convolution
import numpy as np
from moderation.classifiers.train import OUTPUTS
from moderation.classifiers.train_linear import fit_head, matrix
from moderation.classifiers.train_pairs import pair_examples
from moderation.classifiers.train_vectors import word_vectors

examples = random.Random(5).sample(pair_examples(), 600)
texts = [each.text for each in examples]
start = word_vectors(texts, convolution.DIMENSIONS, seed=1)
fitted = convolution.fit(examples, OUTPUTS, 1, 1, start)
labels = np.array([each.labels["any"] for each in examples], np.float32)
linear = fit_head(matrix(texts), labels, np.ones(len(texts), np.float32), 6.0)
arrays = {**convolution.arrays(fitted), "linear": linear}
digest = hashlib.sha256("\\n".join(fitted.vocabulary.words).encode())
for name in sorted(arrays):
    digest.update(name.encode() + arrays[name].tobytes())
print(digest.hexdigest())
"""


def _trained(hash_seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", _TRAIN],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    return ran.stdout.split()[-1]


@pytest.mark.proof
def test_training_gives_the_same_weights_whatever_the_hash_seed() -> None:
    assert _trained("1") == _trained("2")
