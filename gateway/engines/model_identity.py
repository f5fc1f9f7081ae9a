"""Which model the engines of one public name serve: replicas of one name have the same weights, and the
tokenizer that the gateway counts with."""

from dataclasses import dataclass, field

from engine.protocol import EngineInfo


@dataclass(frozen=True, slots=True)
class Entry:
    """What the operator's entry says of one engine: that it may serve other weights than its replicas,
    and which files have the model's tokenizer."""

    canary: bool = False
    names_tokenizer: bool = False


PLAIN = Entry()


@dataclass(slots=True)
class ModelIdentity:
    """Of one public name. `tokenizer_digest`: of the gateway's tokenizer, which has ids below
    `vocabulary`; empty and 0 where it has none."""

    name: str
    tokenizer_digest: str = ""
    vocabulary: int = 0
    _weights: dict[str, str] = field(
        default_factory=dict
    )  # digests by the replica that is connected

    def refusal(self, replica: str, info: EngineInfo, entry: Entry = PLAIN) -> str:
        """Why requests for the name may not go to an engine that has connected; empty where they may.
        A canary may have other weights. An engine whose checkpoint has no tokenizer is served where
        the operator names the files of one."""
        if self.tokenizer_digest and info.tokenizer_digest != self.tokenizer_digest:
            if info.tokenizer_digest:
                return (
                    f"it serves {info.model} with another tokenizer than the gateway has for "
                    f"{self.name}: set TOLLHOUSE_MODEL of the gateway to that model, or name its files "
                    "in the entry's `tokenizer`"
                )
            if not entry.names_tokenizer:
                return (
                    f"it serves {info.model} without a tokenizer in its files, so nothing says that the "
                    f"gateway's of {self.name} is that model's: name the model's tokenizer files in the "
                    "entry's `tokenizer`"
                )
            if self.vocabulary > info.vocab_size:
                return (
                    f"it serves {info.model}, which has {info.vocab_size} token ids, and the entry's "
                    f"`tokenizer` has {self.vocabulary}: name the tokenizer files of that model"
                )
        if entry.canary:
            return ""
        others = {r: digest for r, digest in self._weights.items() if r != replica}
        other = next((r for r, digest in others.items() if digest != info.base_digest), None)
        if other is not None:
            return (
                f"it serves other weights ({info.base_digest[:12]}) under the name {self.name} than "
                f"{other} ({others[other][:12]}): give its entry a `model` name of its own, or a "
                "`canary_percent`"
            )
        self._weights[replica] = info.base_digest
        return ""

    def left(self, replica: str) -> None:
        """The replica has disconnected; another version of the model may take the name when all have."""
        self._weights.pop(replica, None)
