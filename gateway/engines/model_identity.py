"""Which model the engines of one public name serve: replicas of one name have the same weights, and the
tokenizer that the gateway counts with."""

from dataclasses import dataclass, field

from engine.protocol import EngineInfo


@dataclass(slots=True)
class ModelIdentity:
    """Of one public name. `tokenizer_digest`: of the gateway's tokenizer; empty where it has none."""

    name: str
    tokenizer_digest: str = ""
    _weights: dict[str, str] = field(
        default_factory=dict
    )  # digests by the replica that is connected

    def refusal(self, replica: str, info: EngineInfo, *, canary: bool = False) -> str:
        """Why requests for the name may not go to an engine that has connected; empty where they may.
        A canary may have other weights."""
        if self.tokenizer_digest and info.tokenizer_digest not in ("", self.tokenizer_digest):
            return (
                f"it serves {info.model} with another tokenizer than the gateway has for {self.name}: "
                f"set TOLLHOUSE_MODEL of the gateway to that model, or name its files in the entry's "
                "`tokenizer`"
            )
        if canary:
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
