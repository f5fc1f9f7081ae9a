"""The tokenizer library's panics, which are no `Exception`: uncaught, they end a connection without an
answer."""

from core.errors import BadRequest


def is_panic(error: BaseException) -> bool:
    """The library does not export the type."""
    return type(error).__name__ == "PanicException"


def not_encodable(error: BaseException) -> BadRequest:
    """For an `except BaseException`: the refusal of a text that the tokenizer fails at. Any other error
    is raised again."""
    if not is_panic(error):
        raise error
    return BadRequest(
        "The model's tokenizer fails at this text; a run of many thousand equal characters is the usual "
        "cause.",
        next_step="Shorten runs of white space or of one character.",
        code="text_not_encodable",
    )
