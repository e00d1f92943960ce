"""The APIs that agents speak, OpenAI's Responses and Anthropic's Messages, translated to a chat and back."""
