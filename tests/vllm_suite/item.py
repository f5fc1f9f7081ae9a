"""What is known of the test item that runs."""

from dataclasses import dataclass


@dataclass
class Item:
    touched: str = ""  # the stand-in that it used
    requests: int = 0  # that the gateway answered
    refusal: str = ""  # the last error that refuses something by name
    error: str = ""  # the last error of the gateway

    def begin(self) -> None:
        self.touched, self.requests, self.refusal, self.error = "", 0, "", ""


ITEM = Item()
