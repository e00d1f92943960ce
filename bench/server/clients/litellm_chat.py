"""LiteLLM: python bench/server/clients/litellm_chat.py URL (pip install litellm)."""

import json
import sys
import urllib.request

import litellm

URL = sys.argv[1]
with urllib.request.urlopen(f"{URL}/v1/models") as r:
    NAME = json.load(r)["data"][0]["id"]
ASKED = {
    "model": f"openai/{NAME}", "api_base": f"{URL}/v1", "api_key": "any", "temperature": 0, "max_tokens": 20,
    "messages": [{"role": "user", "content": "Once upon a time, there was a"}], "num_retries": 0,
}  # fmt: skip
whole = litellm.completion(**ASKED)
text = whole.choices[0].message.content
assert text and whole.usage.completion_tokens == 20 and whole.choices[0].finish_reason == "length", whole
streamed = "".join(c.choices[0].delta.content or "" for c in litellm.completion(stream=True, **ASKED))
assert streamed == text, (streamed, text)
try:
    litellm.completion(**ASKED | {"model": "openai/another"})
except litellm.NotFoundError as e:
    assert "there is no model 'another'" in str(e), e
else:
    raise AssertionError("another model was answered")
print("litellm: whole, streamed, error: well")
