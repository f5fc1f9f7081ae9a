"""The two kinds of a mixture of experts."""

from engine.backends.layers.device.mixture import DeviceMixture
from engine.backends.layers.experts import Mixture

AnyMixture = Mixture | DeviceMixture  # on a CPU, and on a GPU
