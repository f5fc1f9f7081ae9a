"""Sends requests to a running Tollhouse through the openai SDK: ask.py BASE_URL KEY MODEL.

Checks that a streamed answer has the text and the counts of the whole one.
"""

import sys

from openai import OpenAI

base_url, key, model = sys.argv[1:]
client = OpenAI(base_url=base_url, api_key=key, timeout=60, max_retries=0)
question = {
    "model": model,
    "messages": [{"role": "user", "content": "What is Tollhouse?"}],
    "temperature": 0,
    "max_tokens": 24,
}


def counts(usage):
    assert usage is not None and usage.prompt_tokens > 0, usage
    assert 0 < usage.completion_tokens <= 24, usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage
    return usage.prompt_tokens, usage.completion_tokens


whole = client.chat.completions.create(**question)
text = whole.choices[0].message.content
chunks = list(
    client.chat.completions.create(**question, stream=True, stream_options={"include_usage": True})
)
streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
assert text and streamed == text, (text, streamed)
counted = counts(whole.usage), counts(chunks[-1].usage)
assert counted[0] == counted[1], counted
assert any(each.id == model for each in client.models.list())
print(f"  whole and streamed: {text!r}, {counted} tokens")
