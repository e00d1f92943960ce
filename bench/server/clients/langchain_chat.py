"""LangChain's client: python bench/server/clients/langchain_chat.py URL (pip install langchain-openai)."""

import json
import sys
import urllib.request

import openai
from langchain_openai import ChatOpenAI

URL = sys.argv[1]
with urllib.request.urlopen(f"{URL}/v1/models") as r:
    NAME = json.load(r)["data"][0]["id"]
ASKED = {"base_url": f"{URL}/v1", "api_key": "any", "temperature": 0, "max_tokens": 20, "max_retries": 0}
chat = ChatOpenAI(model=NAME, **ASKED)
whole = chat.invoke("Once upon a time, there was a")
assert whole.content and whole.usage_metadata["output_tokens"] == 20, whole
assert whole.response_metadata["finish_reason"] == "length"
streamed = "".join(piece.content for piece in chat.stream("Once upon a time, there was a"))
assert streamed == whole.content, (streamed, whole.content)
try:
    ChatOpenAI(model="another", **ASKED).invoke("Hello")
except openai.NotFoundError as e:
    assert e.code == "model_not_found", e
else:
    raise AssertionError("another model was answered")
print("langchain: whole, streamed, error: well")
