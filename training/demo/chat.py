"""The chat format: turns, the chat template, and the special tokens between turns."""

from dataclasses import dataclass

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"

TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['content'] is string -%}"
    "{{- message['content'] -}}"
    "{%- elif message['content'] -%}"
    "{%- for part in message['content'] -%}{{- part['text'] -}}{%- endfor -%}"
    "{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


@dataclass(frozen=True)
class Turn:
    """One message of a dialogue; role is system, user or assistant."""

    role: str
    text: str


Dialogue = tuple[Turn, ...]


def head(turn: Turn) -> str:
    return f"{START}{turn.role}\n"


def written(dialogue: Dialogue) -> str:
    """The dialogue as the chat template writes it."""
    return "".join(f"{head(turn)}{turn.text}{END}\n" for turn in dialogue)
