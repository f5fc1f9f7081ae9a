"""From engine output to the client's response: text, stop strings, tool calls, delivery."""
